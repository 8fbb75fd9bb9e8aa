//! `kvctl`: the command line of kvpool.
//!
//! Commands for operators (`status`, `ls`, `get`, ...) use a running pool. `demo` and `replay` start
//! their own pool and workers as processes and run a workload on them.
//!
//! ```text
//!  commands/  ──►  job ──► cluster   kvmaster and kvstore-nodes
//!                   │ ──► fleet     worker processes ──► workload, fill
//!                   └ ──► report
//! ```

#![forbid(unsafe_code)]

mod bench;
mod cli;
mod cluster;
mod commands;
mod connection;
mod doctor;
mod exit;
mod fill;
mod fleet;
mod job;
mod output;
mod process;
mod progress;
mod remote;
mod report;
mod stats;
mod worker;
mod workload;

use clap::Parser;
use std::io::IsTerminal;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(cli.log_filter())
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // A log that nobody reads any more is no reason to fail.
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .init();
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(run(cli)));
    result.unwrap_or_else(|error| {
        output::complain(&error);
        ExitCode::from(exit::code(&error))
    })
}

/// Runs the command until it ends or somebody interrupts it; what it started goes with it.
async fn run(cli: cli::Cli) -> anyhow::Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        result = Box::pin(cli.run()) => result.map(|()| ExitCode::SUCCESS),
        _ = interrupt.recv() => Ok(ExitCode::from(exit::INTERRUPTED)),
        _ = terminate.recv() => Ok(ExitCode::from(exit::INTERRUPTED)),
    }
}
