//! The kvstore-node binary: reads its settings and runs until it is told to stop.

use clap::Parser;
use kvpool_daemon::{config, signals, telemetry};
use kvpool_store_node::{Config, Flags, Node};
use std::process::ExitCode;

#[tokio::main(worker_threads = 2)]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvstore-node: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> anyhow::Result<()> {
    let flags = Flags::parse();
    let config: Config = config::load(flags.config.as_deref(), "KVSTORE_NODE_", &flags)?;
    if flags.print_config {
        return Ok(config::print_config(&config)?);
    }
    config.validate()?;
    telemetry::init(config.log_format, "info")?;
    let shutdown = signals::shutdown()?;
    let node = Node::start(config).await?;
    let signal = shutdown.await;
    tracing::info!(%signal, "draining");
    node.drain().await;
    Ok(())
}
