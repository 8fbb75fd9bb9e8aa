//! The frame of a command-line program: logs, the runtime, interrupts, and the exit code.

use crate::{exit, output};
use std::io::IsTerminal;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Runs `work` until it ends or a signal interrupts it, and returns the exit code of the program `name`.
///
/// `work` runs on the calling thread, which must be the main thread if `work` starts processes. Dropping
/// `work` must end all that it started. Logs go to standard error; `RUST_LOG` replaces `filter`.
pub fn run(name: &str, filter: &str, work: impl Future<Output = anyhow::Result<()>>) -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(filter));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // A closed standard error must not fail the program.
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .init();
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(until_interrupted(work)));
    result.unwrap_or_else(|error| {
        output::print_error(name, &error);
        ExitCode::from(exit::code(&error))
    })
}

async fn until_interrupted(
    work: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        result = Box::pin(work) => result.map(|()| ExitCode::SUCCESS),
        _ = interrupt.recv() => Ok(ExitCode::from(exit::INTERRUPTED)),
        _ = terminate.recv() => Ok(ExitCode::from(exit::INTERRUPTED)),
    }
}
