//! Starts the export, in builds that have it.

use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::registry::LookupSpan;

/// The variable with the collector's URL, for clients and for daemons without `--otlp-endpoint`.
pub const ENDPOINT_VARIABLE: &str = "KVPOOL_OTLP_ENDPOINT";

/// A layer of a subscriber that exports spans.
pub type BoxedLayer<S> = Box<dyn Layer<S> + Send + Sync>;

/// A running export. Dropping it sends the spans that are left, which takes some seconds at most.
#[derive(Debug)]
#[must_use = "the export ends when this is dropped"]
pub struct Export(
    #[cfg(feature = "otlp")]
    #[expect(dead_code, reason = "held for its destructor")]
    pub(crate) crate::otlp::Exporting,
    #[cfg(not(feature = "otlp"))] std::convert::Infallible,
);

/// Why spans cannot be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// This build has no exporter.
    #[error(
        "spans to {endpoint} not exported: this build has no OpenTelemetry export; build with `--features otlp`, or \
         leave out --otlp-endpoint and {ENDPOINT_VARIABLE}"
    )]
    NotBuilt {
        /// The collector's URL.
        endpoint: String,
    },
    /// The URL cannot be used.
    #[error(
        "OTLP endpoint `{endpoint}` refused: {reason}; give a URL such as http://127.0.0.1:4317"
    )]
    BadEndpoint {
        /// The collector's URL.
        endpoint: String,
        /// Why.
        reason: String,
    },
    /// Another part of the process has set up logging.
    #[error(
        "spans not exported: a tracing subscriber is set already; add kvpool_trace::layer to it"
    )]
    AlreadySet,
}

/// A layer that sends the spans of kvpool to the collector at `endpoint` over OTLP (gRPC), as the service
/// `service`. The process joins traces of its peers from now on.
///
/// # Errors
///
/// The URL is invalid, or this build has no exporter. A collector that does not answer is not an
/// error.
pub fn layer<S>(
    endpoint: &str,
    service: &'static str,
) -> Result<(BoxedLayer<S>, Export), StartError>
where
    S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
{
    #[cfg(feature = "otlp")]
    {
        crate::otlp::layer(endpoint, service)
    }
    #[cfg(not(feature = "otlp"))]
    {
        let _ = service;
        Err(StartError::NotBuilt {
            endpoint: endpoint.to_owned(),
        })
    }
}

/// The collector's URL that the environment names.
pub fn endpoint_from_env() -> Option<String> {
    std::env::var(ENDPOINT_VARIABLE)
        .ok()
        .filter(|endpoint| !endpoint.trim().is_empty())
}

/// Exports the spans of this process if `KVPOOL_OTLP_ENDPOINT` is set; for programs without a subscriber of
/// their own. `None` when the variable is not set.
///
/// # Errors
///
/// As of [`layer`], and when the process has a subscriber already.
pub fn start_from_env(service: &'static str) -> Result<Option<Export>, StartError> {
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::util::SubscriberInitExt;
    let Some(endpoint) = endpoint_from_env() else {
        return Ok(None);
    };
    let (layer, export) = layer(&endpoint, service)?;
    tracing_subscriber::registry()
        .with(layer)
        .try_init()
        .map_err(|_| StartError::AlreadySet)?;
    Ok(Some(export))
}
