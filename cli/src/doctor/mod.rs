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

/// All that was found.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) host: Host,
    pub(crate) pool: Pool,
    /// What is amiss, what matters most first.
    pub(crate) findings: Vec<Finding>,
}

impl Report {
    /// Looks at this host and at the pool.
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

    /// For people.
    pub(crate) fn tables(&self) -> String {
        tables::tables(self)
    }
}
