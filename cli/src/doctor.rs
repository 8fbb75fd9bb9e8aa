//! Checks this host and a pool: their state, the transports that work, and why others do not.
//!
//! - `host`: memory, limits and RDMA ports of this host
//! - `pool`: the masters, and the nodes over every transport
//! - `node`: the transports to one node
//! - `exposure`: ports that are open to other hosts
//! - `findings`: the problems, and their exit code
//! - `tables`: the tables for people

mod exposure;
pub(crate) mod findings;
mod host;
mod node;
mod pool;
mod tables;

use crate::connection::{Connection, Transport};
use findings::Finding;
use host::Host;
use pool::Pool;
use serde::Serialize;

/// The result of `kvctl doctor`.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) host: Host,
    pub(crate) pool: Pool,
    /// The findings, gravest first.
    pub(crate) findings: Vec<Finding>,
}

impl Report {
    /// Inspects this host and the pool. Fails if a file that `connection` names cannot be used.
    pub(crate) async fn make(connection: &Connection) -> anyhow::Result<Self> {
        connection.check_files()?;
        let (host, fabric) = tokio::task::spawn_blocking(Host::read).await?;
        let pool = Pool::inspect(connection, &host, fabric.as_ref()).await;
        let findings = findings::of(&host, &pool, connection);
        Ok(Self {
            host,
            pool,
            findings,
        })
    }

    /// The tables for the terminal.
    pub(crate) fn tables(&self) -> String {
        tables::tables(self)
    }
}

/// Why transfers between this host and the nodes cannot use RDMA; `None` if they can.
///
/// With `--master` the nodes are the nodes of that pool. Without it they are on this host, so the devices of this
/// host decide.
///
/// # Errors
///
/// The named pool does not answer.
pub async fn no_rdma(connection: &Connection) -> anyhow::Result<Option<String>> {
    let (host, _) = tokio::task::spawn_blocking(Host::read).await?;
    if host.rdma.reason.is_some() || connection.master.is_none() {
        return Ok(host.rdma.reason);
    }
    // A block can be placed on any node, so RDMA must reach all of them.
    connection.check_files()?;
    let nodes = pool::nodes_by(connection, Transport::Rdma).await?;
    Ok(nodes.iter().find_map(|node| {
        let way = node
            .ways
            .iter()
            .find(|way| way.transport == Transport::Rdma)?;
        (!way.works).then(|| format!("node {}: {}", node.name, way.reason))
    }))
}
