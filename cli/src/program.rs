//! The frame of a command-line program: logs, the runtime, interrupts, and the exit code.

use crate::{exit, output};
use std::io::IsTerminal;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};
use tracing::Subscriber;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Runs `work` until it ends or a signal interrupts it, and returns the exit code of the program `name`.
///
/// `work` runs on the calling thread, which must be the main thread if `work` starts processes. Dropping
/// `work` must end all that it started. Logs go to standard error; `RUST_LOG` replaces `filter`.
pub fn run(name: &str, filter: &str, work: impl Future<Output = anyhow::Result<()>>) -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(filter));
    let _export = match start_logs(filter) {
        Ok(export) => export,
        Err(error) => {
            output::print_error(name, &error);
            return ExitCode::FAILURE;
        }
    };
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

/// Log lines on standard error, and spans to the collector that `KVPOOL_OTLP_ENDPOINT` names.
fn start_logs(filter: EnvFilter) -> anyhow::Result<Option<kvpool_trace::Export>> {
    let Some(endpoint) = kvpool_trace::endpoint_from_env() else {
        // One filter for all layers: a filtered event costs one comparison.
        let all = tracing_subscriber::registry().with(filter);
        all.with(log_lines()).init();
        return Ok(None);
    };
    let (spans, export) = kvpool_trace::layer(&endpoint, "kvctl")?;
    let all = tracing_subscriber::registry().with(spans);
    all.with(log_lines().with_filter(filter)).init();
    Ok(Some(export))
}

fn log_lines<S>() -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // A closed standard error must not fail the program.
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
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
