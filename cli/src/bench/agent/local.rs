//! A store node inside this process: what a worker has that serves its own memory to the pool.

use super::protocol::Embed;
use anyhow::Context as _;
use bytesize::ByteSize;
use kvpool_store_node::{Config, Node};

/// A running node and the runtime that it has for itself.
#[derive(Debug)]
pub(super) struct Embedded {
    // Before the runtime, which its tasks run on.
    node: Node,
    runtime: tokio::runtime::Runtime,
}

impl Embedded {
    /// Takes the memory and begins to serve.
    pub(super) fn start(embed: Embed) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("bench-node")
            .enable_all()
            .build()
            .context("cannot start a runtime")?;
        let config = Config {
            master: vec![embed.master],
            name: "local".to_owned(),
            segment: vec![ByteSize(embed.segment)],
            listen: "127.0.0.1:0".to_owned(),
            http_listen: "127.0.0.1:0".to_owned(),
            shm_path: embed.socket,
            ..Config::default()
        };
        let node = runtime.block_on(Box::pin(Node::start(config)))?;
        Ok(Self { node, runtime })
    }

    /// Leaves the pool in order.
    pub(super) fn stop(self) {
        self.runtime.block_on(self.node.drain());
    }
}
