//! The kvstore-node binary: reads its settings and runs until it is told to stop.

use clap::Parser;
use kvpool_daemon::{config, fault, signals, telemetry};
use kvpool_store_node::{Config, Flags, Node};
use std::pin::pin;
use std::process::ExitCode;

fn main() -> ExitCode {
    fault::end_on_panic("kvstore-node");
    let ended = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(anyhow::Error::from)
        .and_then(|runtime| {
            let ended = runtime.block_on(run());
            // A failed start may leave threads that still touch memory. The exit does not wait for them.
            runtime.shutdown_background();
            ended
        });
    match ended {
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
    let otlp = config.otlp_endpoint.as_deref();
    let _export = telemetry::init_with_export(config.log_format, "info", "kvstore-node", otlp)?;
    let mut shutdown = pin!(signals::shutdown()?);
    let node = tokio::select! {
        node = Node::start(config) => node?,
        signal = &mut shutdown => {
            tracing::info!(%signal, "received a signal during start, stopping");
            return Ok(());
        }
    };
    let signal = shutdown.await;
    tracing::info!(%signal, "received a signal, draining");
    node.drain().await;
    Ok(())
}
