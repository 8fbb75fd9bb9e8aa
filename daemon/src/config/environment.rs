//! Environment variables as layers of configuration. Each variable is a layer, so that an error
//! names the variable.

use super::{ConfigError, Layer};
use figment::util::nest;
use figment::value::{Dict, Value};
use kvpool_etcd::discover::split_list;

/// The layers of the variables in `vars` whose names begin with `prefix`, in the order of their
/// names.
///
/// `defaults` is the configuration without these variables. Its values show which fields are texts and which are
/// lists.
pub(super) fn layers(
    prefix: &str,
    vars: impl IntoIterator<Item = (String, Result<String, ()>)>,
    defaults: &Dict,
) -> Result<Vec<Layer>, ConfigError> {
    let mut ours: Vec<_> = vars
        .into_iter()
        .filter(|(name, _)| name.len() > prefix.len() && name.starts_with(prefix))
        .collect();
    ours.sort();
    let defaults = Value::from(defaults.clone());
    let mut layers = Vec::with_capacity(ours.len());
    for (name, value) in ours {
        let key = name[prefix.len()..].to_lowercase().replace("__", ".");
        let origin = format!("the environment variable {name}");
        let Ok(text) = value else {
            return Err(ConfigError::BadValue {
                key,
                origin,
                reason: "it is not UTF-8".into(),
            });
        };
        if text.is_empty() || is_service_link(&name, &text) {
            continue;
        }
        let value = read(&key, text, &defaults);
        if let Value::Dict(_, dict) = nest(&key, value) {
            layers.push(Layer { origin, dict });
        }
    }
    Ok(layers)
}

/// Whether Kubernetes set the variable. Kubernetes describes every service of the namespace to
/// every pod. These names begin with the prefix when the service has the name of the daemon.
fn is_service_link(name: &str, value: &str) -> bool {
    let of_port = name
        .match_indices("_PORT_")
        .any(|(at, found)| name[at + found.len()..].starts_with(|c: char| c.is_ascii_digit()));
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || of_port
        || (name.ends_with("_PORT") && (value.starts_with("tcp://") || value.starts_with("udp://")))
}

fn read(key: &str, text: String, defaults: &Value) -> Value {
    let default = defaults.find_ref(key);
    if let Some(Value::String(..) | Value::Char(..)) = default {
        return Value::from(text);
    }
    let value = match text.parse() {
        Ok(value) => value,
        Err(never) => match never {},
    };
    match (default, value) {
        (Some(Value::Array(..)), Value::Array(tag, items)) => Value::Array(tag, items),
        (Some(Value::Array(..)), Value::String(_, unquoted)) => split_list(&unquoted).into(),
        (Some(Value::Array(..)), _) => split_list(&text).into(),
        (_, value) => value,
    }
}
