//! The kvmaster binary: reads its settings and runs until it is told to stop.

use clap::Parser;
use kvpool_daemon::{config, fault, signals, telemetry};
use kvpool_master::{Config, Flags, Server};
use kvpool_types::Causes;
use std::pin::pin;
use std::process::ExitCode;

fn main() -> ExitCode {
    fault::end_on_panic("kvmaster");
    let ended = tokio::runtime::Runtime::new()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| {
            let ended = runtime.block_on(run());
            // An aborted start may still work on a thread. The process does not wait for it.
            runtime.shutdown_background();
            ended
        });
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvmaster: {}", Causes(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

async fn run() -> anyhow::Result<()> {
    let flags = Flags::parse();
    let config: Config = config::load(flags.config.as_deref(), "KVMASTER_", &flags)?;
    if flags.print_config {
        return Ok(config::print_config(&config)?);
    }
    config.validate()?;
    let otlp = config.otlp_endpoint.as_deref();
    let _export = telemetry::init_with_export(config.log_format, "info", "kvmaster", otlp)?;
    let mut shutdown = pin!(signals::shutdown()?);
    let server = tokio::select! {
        server = Server::start(config) => server?,
        signal = &mut shutdown => {
            tracing::info!(%signal, "stopped during start");
            return Ok(());
        }
    };
    tokio::select! {
        signal = shutdown => tracing::info!(%signal, "stopping"),
        why = server.failed() => {
            server.stop().await;
            anyhow::bail!("kvmaster cannot continue and stopped: {why}");
        }
        later = server.superseded() => {
            server.stop().await;
            let epoch = later?;
            anyhow::bail!("a node reported a later term: stored epoch {epoch}; restart kvmaster to lead");
        }
    }
    server.stop().await;
    Ok(())
}
