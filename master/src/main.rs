//! The kvmaster binary: reads its settings and runs until it is told to stop.

use clap::Parser;
use kvpool_daemon::{config, signals, telemetry};
use kvpool_master::{Config, Flags, Server};
use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvmaster: {error:#}");
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
    telemetry::init(config.log_format, "info")?;
    let shutdown = signals::shutdown()?;
    let server = Server::start(config).await?;
    tokio::select! {
        signal = shutdown => tracing::info!(%signal, "stopping"),
        later = server.superseded() => {
            server.stop().await;
            let epoch = later?;
            anyhow::bail!("a node knows a later term: epoch {epoch} is stored, start again to lead");
        }
    }
    server.stop().await;
    Ok(())
}
