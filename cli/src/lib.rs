//! `kvctl`, the command line of kvpool, and the parts that it shares with `kvbench`.
//!
//! Commands for operators (`status`, `ls`, `get`, ...) use a running pool. `demo` and `replay` start
//! their own pool and workers as processes and run a workload on them. `bench` loads a pool, or measures hand-offs.
//!
//! ```text
//!  cli ──► commands ──► job ──► fleet ──► worker processes ──► workload, fill
//!             │          └────► report
//!             ├──► load         the threads of `bench`
//!             ├──► handoff      the hand-offs of `bench handoff`
//!             ├──► doctor
//!             └──► context, connection, output, exit, cluster, process, ...   shared with kvbench
//! ```
//!
//! A module uses modules to its right or below, never the other way.
//!
//! The public modules are the shared parts: the options of a command, connections, exit codes, output,
//! pools and child processes. This is not a client library: use `kvpool_client`.

#![forbid(unsafe_code)]

mod cli;
pub mod cluster;
mod commands;
pub mod connection;
pub mod context;
pub mod doctor;
pub mod exit;
pub mod fill;
mod fleet;
mod handoff;
mod job;
mod load;
mod masters;
mod media;
pub mod output;
pub mod process;
pub mod program;
pub mod progress;
pub mod remote;
mod report;
mod shares;
mod silence;
pub mod size;
pub mod stats;
mod tokens;
mod worker;
mod workload;

pub use cli::Cli;
