//! A store node inside this process, as in a worker that contributes its own memory to the pool.

use super::protocol::Embed;
use anyhow::Context as _;
use bytesize::ByteSize;
use kvpool_store_node::{Config, Node};

/// A running node and its own runtime.
#[derive(Debug)]
pub(super) struct Embedded {
    // Declared before the runtime: the node's tasks run there.
    node: Node,
    runtime: tokio::runtime::Runtime,
}

impl Embedded {
    /// Allocates the segment and starts to serve it.
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

    /// Drains the node and leaves the pool.
    pub(super) fn stop(self) {
        self.runtime.block_on(self.node.drain());
    }
}
