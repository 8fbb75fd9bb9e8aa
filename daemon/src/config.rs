//! Layered configuration: defaults < TOML file < environment < flags.
//!
//! A daemon's configuration is one struct with `#[serde(deny_unknown_fields, default)]`; its flags
//! are a second struct of optional fields under the same names. Every mistake is reported with the
//! key and the place it came from, since a value that is silently ignored is found out in production.
//!
//! **Environment.** With the prefix `KVMASTER_`, the variable `KVMASTER_EVICTION__HIGH_WATERMARK`
//! sets `eviction.high_watermark`. A field whose default is text takes the value verbatim. For any
//! other field the value may be a number, `true`, `[a, b]` or `{k = v}`; otherwise, or in double quotes,
//! it is text. An empty value counts as not set. What is given for a list, here
//! and in a flag, is split at its commas, but for those inside `etcd://a,b/c`. The variables that Kubernetes
//! makes for every service (`KVMASTER_SERVICE_HOST`, `KVMASTER_PORT=tcp://...`) are passed over.
//!
//! **Flags.** A flag that was not given must serialize as none, or as an empty list. A flag with empty text is refused.

mod environment;
pub mod exact;

#[cfg(test)]
mod tests;

use figment::error::Kind;
use figment::providers::Serialized;
use figment::value::{Dict, Value};
use figment::{Figment, Metadata, Profile, Provider};
use kvpool_auth::toml_problem;
use kvpool_etcd::discover::split_list;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Why a configuration cannot be used. The messages name the key, where it came from and the reason.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file given by `--config` cannot be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not TOML.
    #[error("{} is not valid TOML: {problem}", path.display())]
    BadToml {
        /// The file.
        path: PathBuf,
        /// Where in the file, and why.
        problem: String,
    },
    /// A key that no setting has.
    #[error("unknown setting `{key}` in {origin}: expected {expected}")]
    UnknownField {
        /// The dotted key.
        key: String,
        /// The layer that holds it.
        origin: String,
        /// The settings that there are.
        expected: String,
    },
    /// A setting holds a value that it cannot have.
    #[error("invalid value for `{key}` in {origin}: {reason}")]
    BadValue {
        /// The dotted key.
        key: String,
        /// The layer that holds it.
        origin: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The configuration cannot be written out as TOML.
    #[error("cannot print the configuration: {0}")]
    Unprintable(String),
}

/// Loads a configuration from all its layers.
///
/// `file` is the TOML file, if one was named; `env_prefix` is what the daemon's environment variables
/// begin with, its underscore included; `flags` is what the command line gave. Fails on the first
/// layer that cannot be read or holds a key or value that `C` does not take.
pub fn load<C, F>(file: Option<&Path>, env_prefix: &str, flags: &F) -> Result<C, ConfigError>
where
    C: Serialize + DeserializeOwned + Default,
    F: Serialize,
{
    // A variable that is not UTF-8 is refused only if it is one of ours.
    let vars = std::env::vars_os().map(|(name, value)| {
        (
            name.to_string_lossy().into_owned(),
            value.into_string().map_err(|_| ()),
        )
    });
    load_from(file, env_prefix, vars, flags)
}

/// The configuration as TOML, as `--print-config` prints it. The text loads back as it is.
pub fn to_toml<C: Serialize>(config: &C) -> Result<String, ConfigError> {
    toml::to_string_pretty(config).map_err(|error| ConfigError::Unprintable(error.to_string()))
}

/// Prints the configuration to standard output as TOML.
pub fn print_config<C: Serialize>(config: &C) -> Result<(), ConfigError> {
    let text = to_toml(config)?;
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| ConfigError::Unprintable(error.to_string()))
}

fn load_from<C, F>(
    file: Option<&Path>,
    env_prefix: &str,
    vars: impl IntoIterator<Item = (String, Result<String, ()>)>,
    flags: &F,
) -> Result<C, ConfigError>
where
    C: Serialize + DeserializeOwned + Default,
    F: Serialize,
{
    let defaults = Layer::serialize("built-in defaults", &C::default())?;
    let mut figment = Figment::new();
    let variables = environment::layers(env_prefix, vars, &defaults.dict)?;
    figment = figment.merge(defaults);
    if let Some(path) = file {
        figment = figment.merge(read_file(path)?);
    }
    for variable in variables {
        figment = figment.merge(variable);
    }
    let mut flags = Layer::serialize("the command line", flags)?;
    drop_absent(&mut flags.dict);
    refuse_empty(&flags)?;
    split_lists(&mut flags.dict);
    figment.merge(flags).extract().map_err(explain)
}

fn read_file(path: &Path) -> Result<Layer, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    let table: toml::Table = text.parse().map_err(|error| ConfigError::BadToml {
        path: path.to_owned(),
        problem: toml_problem(&text, &error),
    })?;
    Layer::serialize(path.display().to_string(), &table)
}

/// One source of settings, with the name that errors call it by.
struct Layer {
    origin: String,
    dict: Dict,
}

impl Layer {
    fn serialize<T: Serialize>(
        origin: impl Into<String>,
        settings: &T,
    ) -> Result<Self, ConfigError> {
        let origin = origin.into();
        match Value::serialize(settings) {
            Ok(Value::Dict(_, dict)) => Ok(Self { origin, dict }),
            // A struct without fields is no dictionary to serde: it sets nothing.
            Ok(_) => Ok(Self {
                origin,
                dict: Dict::new(),
            }),
            Err(error) => Err(ConfigError::BadValue {
                key: error.path.join("."),
                origin,
                reason: error.kind.to_string(),
            }),
        }
    }
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.origin.clone())
    }

    fn data(&self) -> Result<figment::value::Map<Profile, Dict>, figment::Error> {
        Serialized::defaults(&self.dict).data()
    }
}

/// Takes out what was not given, so that it does not cover the layers below.
fn drop_absent(dict: &mut Dict) {
    dict.retain(|_, value| match value {
        Value::Empty(..) => false,
        Value::Array(_, items) => !items.is_empty(),
        Value::Dict(_, inner) => {
            drop_absent(inner);
            !inner.is_empty()
        }
        _ => true,
    });
}

/// Refuses a flag with empty text. It mostly comes from a variable of a script that is not set, and the default would
/// hide that.
fn refuse_empty(flags: &Layer) -> Result<(), ConfigError> {
    let Some(mut path) = empty_in(&flags.dict) else {
        return Ok(());
    };
    path.reverse();
    Err(ConfigError::BadValue {
        key: path.join("."),
        origin: flags.origin.clone(),
        reason: "it is empty; leave the flag out for the default".to_owned(),
    })
}

/// The first empty text in these settings: the last part of its key first.
fn empty_in(dict: &Dict) -> Option<Vec<String>> {
    dict.iter().find_map(|(key, value)| {
        let mut path = match value {
            Value::Array(_, items) if items.iter().any(is_empty) => Vec::new(),
            Value::Dict(_, inner) => empty_in(inner)?,
            value if is_empty(value) => Vec::new(),
            _ => return None,
        };
        path.push(key.clone());
        Some(path)
    })
}

fn is_empty(value: &Value) -> bool {
    value.as_str().is_some_and(|text| text.trim().is_empty())
}

/// Splits what was given for lists, so that one flag can give several items.
fn split_lists(dict: &mut Dict) {
    for value in dict.values_mut() {
        match value {
            Value::Array(_, items) => *items = items.drain(..).flat_map(split_item).collect(),
            Value::Dict(_, inner) => split_lists(inner),
            _ => {}
        }
    }
}

fn split_item(item: Value) -> Vec<Value> {
    match item.as_str() {
        Some(text) => split_list(text).into_iter().map(Value::from).collect(),
        None => vec![item],
    }
}

/// Turns figment's first error into ours.
fn explain(error: figment::Error) -> ConfigError {
    let origin = error
        .metadata
        .map_or_else(|| "the configuration".into(), |m| m.name.into_owned());
    let mut path = error.path;
    match error.kind {
        Kind::UnknownField(field, expected) => {
            if path.last() != Some(&field) {
                path.push(field);
            }
            ConfigError::UnknownField {
                key: path.join("."),
                origin,
                expected: one_of(expected),
            }
        }
        Kind::UnknownVariant(found, expected) => ConfigError::BadValue {
            key: path.join("."),
            origin,
            reason: format!("`{found}` is not one of {}", one_of(expected)),
        },
        kind => ConfigError::BadValue {
            key: path.join("."),
            origin,
            reason: kind.to_string(),
        },
    }
}

fn one_of(names: &[&str]) -> String {
    if names.is_empty() {
        return "no setting at all".into();
    }
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}
