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
//! Not for log lines. The only part for metrics is the list of latency buckets, which clients and
//! daemons share.

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

/// The upper ends of the buckets of every latency histogram, in microseconds: 10 us to 10 s, three a decade.
pub const LATENCY_BUCKETS_US: [u64; 19] = [
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000,
];

/// Makes a span of level DEBUG under [`TARGET`]; name and fields as in [`tracing::span!`].
#[macro_export]
macro_rules! span {
    ($($name_and_fields:tt)+) => {
        $crate::tracing::debug_span!(target: "kvpool::trace", $($name_and_fields)+)
    };
}
