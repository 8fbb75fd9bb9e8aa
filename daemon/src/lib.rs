//! The parts that both kvpool daemons share: configuration in layers, logging, the HTTP probe port,
//! listening and advertised addresses, signals and panics.
//!
//! ```text
//! defaults < --config FILE < environment < flags      config::load
//!                      │
//!                      ▼
//! telemetry::init ► bind ► advertise::decide ► probe::serve ► … ► signals::shutdown
//! ```
//!
//! The crate knows nothing of blocks, masters or nodes. It is not for clients: a library inside a
//! worker leaves logging, signals and configuration to the worker.
//!
//! ADR 0001 says why this is a crate of its own.

#![forbid(unsafe_code)]

pub mod advertise;
pub mod bind;
pub mod callers;
pub mod config;
pub mod fault;
pub mod http_guard;
pub mod latency;
pub mod probe;
pub mod signals;
pub mod telemetry;
pub mod tls;
pub mod tokens;

pub use bind::{BindError, Exposed, Guards, bind, refuse_if_exposed};
pub use config::{ConfigError, load, print_config};
pub use probe::Health;
