//! Logging: lines for people or JSON for collectors, on standard error, filtered by `RUST_LOG`.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::IsTerminal;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// The variable that sets which events are logged, in place of the daemon's own filter.
pub const FILTER_VARIABLE: &str = "RUST_LOG";

/// Keeps the audit log, whatever a filter says about other targets. This directive stands before
/// the filter, so the filter can still replace it for the same target.
const AUDIT: &str = "audit=info";

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TelemetryError {
    /// A filter cannot be read.
    #[error(
        "bad log filter `{filter}` ({origin}): {source}; write for instance `info,kvpool=debug`"
    )]
    BadFilter {
        /// The filter.
        filter: String,
        /// Where it came from.
        origin: &'static str,
        /// Why the filter cannot be read.
        source: tracing_subscriber::filter::ParseError,
    },
    /// Spans cannot be exported.
    #[error(transparent)]
    Export(#[from] kvpool_trace::StartError),
    /// Something in this process has set up logging before.
    #[error("logging is set up already")]
    AlreadySet,
}

/// Starts logging for the whole process. `default_filter` holds unless `RUST_LOG` is set and not
/// empty. To be called once; a second call is refused and changes nothing.
pub fn init(format: LogFormat, default_filter: &str) -> Result<(), TelemetryError> {
    let from_env = std::env::var(FILTER_VARIABLE).ok();
    let filter = filter(from_env.as_deref(), default_filter)?;
    // A line that cannot be written is lost. A report of this to standard error would panic, for example after the
    // terminal has closed.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    }
    .map_err(|_| TelemetryError::AlreadySet)
}

/// Like [`init`], and exports the spans of the process to an OpenTelemetry collector if `endpoint` or
/// `KVPOOL_OTLP_ENDPOINT` names one. The export ends when the returned value is dropped.
pub fn init_with_export(
    format: LogFormat,
    default_filter: &str,
    service: &'static str,
    endpoint: Option<&str>,
) -> Result<Option<kvpool_trace::Export>, TelemetryError> {
    let from_env = kvpool_trace::endpoint_from_env();
    let Some(endpoint) = endpoint.or(from_env.as_deref()) else {
        return init(format, default_filter).map(|()| None);
    };
    let from_env = std::env::var(FILTER_VARIABLE).ok();
    let filter = filter(from_env.as_deref(), default_filter)?;
    let (spans, export) = kvpool_trace::layer(endpoint, service)?;
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    let lines = match format {
        LogFormat::Text => lines.with_filter(filter).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_filter(filter).boxed(),
    };
    tracing_subscriber::registry()
        .with(spans)
        .with(lines)
        .try_init()
        .map_err(|_| TelemetryError::AlreadySet)?;
    tracing::info!(endpoint, service, "exporting spans over OTLP");
    Ok(Some(export))
}

fn filter(from_env: Option<&str>, default: &str) -> Result<EnvFilter, TelemetryError> {
    let (filter, origin) = match from_env {
        Some(filter) if !filter.trim().is_empty() => (filter, FILTER_VARIABLE),
        _ => (default, "the daemon's default"),
    };
    EnvFilter::builder()
        .parse(format!("{AUDIT},{filter}"))
        .map_err(|source| TelemetryError::BadFilter {
            filter: filter.to_owned(),
            origin,
            source,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_covers_the_default_unless_it_is_empty() {
        let shown = |from_env| filter(from_env, "info").unwrap().to_string();
        assert_eq!(shown(None), "audit=info,info");
        assert_eq!(shown(Some(" ")), "audit=info,info");
        assert_eq!(shown(Some("warn")), "audit=info,warn");
    }

    #[test]
    fn a_filter_that_does_not_name_the_audit_log_keeps_it() {
        let writes_audit = |text| {
            let filter = filter(Some(text), "info").unwrap();
            let subscriber = tracing_subscriber::registry().with(filter);
            tracing::subscriber::with_default(
                subscriber,
                || tracing::enabled!(target: "audit", tracing::Level::INFO),
            )
        };
        for without in ["kvpool_master=debug", "warn,kvpool=trace", "off"] {
            assert!(writes_audit(without), "{without}");
        }
        for with in ["audit=info", "warn,audit=debug", "audit"] {
            assert!(writes_audit(with), "{with}");
        }
        for against in ["audit=off", "info,audit=warn"] {
            assert!(!writes_audit(against), "{against}");
        }
    }

    #[test]
    fn a_bad_filter_is_refused_by_name() {
        let error = filter(Some("kvpool=loud"), "info").unwrap_err();
        assert!(error.to_string().contains("kvpool=loud"), "{error}");
        assert!(error.to_string().contains(FILTER_VARIABLE), "{error}");
    }

    #[test]
    fn logging_is_set_up_once() {
        init(LogFormat::Json, "info").unwrap();
        assert!(matches!(
            init(LogFormat::Text, "info"),
            Err(TelemetryError::AlreadySet)
        ));
    }
}
