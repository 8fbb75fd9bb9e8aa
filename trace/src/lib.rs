//! Spans across processes: the context that requests carry, and the export to an OpenTelemetry collector.
//!
//! ```text
//! client: span! ──current()──► request ──► master or store node: below()
//!   │                                        │
//!   └────────── otlp (feature) ──► collector ◄──┘
//! ```
//!
//! A span costs one comparison while nobody wants spans: its level is DEBUG, and daemons log INFO. A request
//! carries a context only while an exporter runs in the sender. ADR 0034 says why.
//!
//! Not for log lines and not for metrics.

#![forbid(unsafe_code)]

mod context;
#[cfg(feature = "otlp")]
mod otlp;
mod start;

pub use context::{Context, below, current};
#[cfg(feature = "otlp")]
pub use otlp::propagate;
pub use start::{
    BoxedLayer, ENDPOINT_VARIABLE, Export, StartError, endpoint_from_env, layer, start_from_env,
};

#[doc(hidden)]
pub use tracing;

/// The target of all spans of kvpool: `RUST_LOG=info,kvpool::trace=debug` adds them to log lines.
pub const TARGET: &str = "kvpool::trace";

/// Makes a span of level DEBUG under [`TARGET`]; name and fields as in [`tracing::span!`].
#[macro_export]
macro_rules! span {
    ($($name_and_fields:tt)+) => {
        $crate::tracing::debug_span!(target: "kvpool::trace", $($name_and_fields)+)
    };
}
