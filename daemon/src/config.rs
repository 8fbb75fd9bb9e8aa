//! Layered configuration: defaults < TOML file < environment < flags.
//!
//! A daemon's configuration is one struct with `#[serde(deny_unknown_fields, default)]`. Its flags are a second
//! struct of optional fields under the same names. Every error names the key and its layer, because a value that is
//! silently ignored shows only in production.
//!
//! **Environment.** With the prefix `KVMASTER_`, the variable `KVMASTER_EVICTION__HIGH_WATERMARK` sets
//! `eviction.high_watermark`. A field whose default is text takes the value verbatim. For any other field the value
//! may be a number, `true`, `[a, b]` or `{k = v}`; otherwise, or in double quotes, it is text. An empty value counts
//! as not set. The value of a list, here and in a flag, is split at its commas, except inside `etcd://a,b/c`. The
//! variables that Kubernetes sets for every service (`KVMASTER_SERVICE_HOST`, `KVMASTER_PORT=tcp://...`) are ignored.
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
        /// The error of the system.
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
        /// Why the setting cannot have this value.
        reason: String,
    },
    /// The configuration cannot be written out as TOML.
    #[error("cannot print the configuration: {0}")]
    Unprintable(String),
}

/// Loads a configuration from all its layers.
///
/// `file` is the TOML file, if the command line named one. `env_prefix` is the prefix of the daemon's environment
/// variables, with its underscore. `flags` are the flags of the command line. Fails at the first layer that cannot be
/// read, or that has a key or a value that `C` does not accept.
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

/// One source of settings, with its name for errors.
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

/// Removes flags that were not given: they must not hide the layers below.
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

/// Refuses a flag with empty text. Such a text mostly comes from an unset variable in a script, and the default would
/// hide that fault.
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

/// Splits the values of lists at commas, so that one flag can give several items.
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

/// Converts figment's first error to a [`ConfigError`].
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
