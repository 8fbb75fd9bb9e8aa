//! Whether this host and a pool are fit: what there is, what works, and what does not, and why.
//!
//! - `host` what this host has: memory, limits, RDMA ports
//! - `pool` the masters and the nodes, each node reached in every way that there is
//! - `node` the ways to one node
//! - `findings` what is amiss, and what that means for the exit code
//! - `tables` all of it for people

pub(crate) mod findings;
pub(crate) mod host;
pub(crate) mod node;
pub(crate) mod pool;
mod tables;

use crate::connection::Connection;
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
    /// Inspects this host and the pool.
    pub(crate) async fn make(connection: &Connection) -> anyhow::Result<Self> {
        let (host, fabric) = tokio::task::spawn_blocking(Host::read).await?;
        let pool = Pool::look(connection, &host, fabric.as_ref()).await;
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
