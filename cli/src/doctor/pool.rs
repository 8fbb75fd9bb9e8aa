//! The pool: its masters, and its nodes with the ways to them.

use super::host::Host;
use super::node::{Asker, Node};
use crate::commands::cluster::with_addresses;
use crate::connection::{Connection, Transport, connect_error, control_error};
use crate::exit;
use futures::future::join_all;
use kvpool_client::{Client, Options, PoolStats, TransportChoice, cluster_status};
use kvpool_transport::rdma::Fabric;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;

/// How long one question may take: what does not answer must not hold up the rest for long.
const PATIENCE: Duration = Duration::from_secs(3);

/// A pool, as far as it could be looked at.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Pool {
    /// The masters that were asked.
    pub(crate) asked: String,
    /// Whether they were named, or are only where a pool is looked for when nothing is said.
    pub(crate) named: bool,
    /// What is wrong with the masters; `None` when the nodes are known.
    pub(crate) failure: Option<Failure>,
    /// Where the leader is.
    pub(crate) leader: Option<String>,
    pub(crate) masters: Vec<Master>,
    pub(crate) nodes: Vec<Node>,
}

/// Why the nodes are not known.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Failure {
    pub(crate) reason: String,
    /// Whether nobody was there to answer, which has an exit code of its own.
    pub(crate) unreachable: bool,
}

/// One master.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Master {
    pub(crate) address: String,
    /// The part that it plays, by its own word or another one's; `None` when nobody says.
    pub(crate) role: Option<String>,
    pub(crate) version: Option<String>,
    /// Why it does not answer; `None` when it does, or was not asked.
    pub(crate) reason: Option<String>,
}

impl Failure {
    fn of(error: &anyhow::Error) -> Self {
        Self {
            reason: format!("{error:#}"),
            unreachable: error.is::<exit::Unreachable>(),
        }
    }
}

impl Pool {
    /// Looks at the pool that `connection` names.
    pub(super) async fn look(
        connection: &Connection,
        host: &Host,
        fabric: Option<&Arc<Fabric>>,
    ) -> Self {
        let mut pool = Self {
            asked: connection.master().to_owned(),
            named: connection.master.is_some(),
            failure: None,
            leader: None,
            masters: Vec::new(),
            nodes: Vec::new(),
        };
        let found = async {
            pool.ask_masters(connection).await?;
            let (client, stats) = stats(connection).await?;
            let rdma = match (fabric, &host.rdma.reason) {
                (Some(fabric), _) => Ok(fabric.clone()),
                (None, reason) => Err(reason.clone().unwrap_or_default()),
            };
            let asker = Asker {
                cluster: client.cluster_id(),
                client: client.client_id(),
                host: host.id.clone(),
                rdma,
                choice: connection.transport,
                patience: connection.timeout.min(PATIENCE),
            };
            pool.nodes = join_all(stats.nodes.iter().map(|node| asker.reach(node))).await;
            anyhow::Ok(())
        };
        if let Err(error) = Box::pin(found).await {
            pool.failure = Some(Failure::of(&error));
        }
        pool
    }

    async fn ask_masters(&mut self, connection: &Connection) -> anyhow::Result<()> {
        let patience = connection.timeout.min(PATIENCE);
        let status = cluster_status(&connection.masters(), patience).await;
        let status = with_addresses(status.map_err(connect_error)?);
        self.leader = status.leader;
        let members = status.members.into_iter().map(|member| Master {
            address: member.address,
            role: Some(member.role),
            version: Some(member.version),
            reason: None,
        });
        self.masters = members.collect();
        for (address, reason) in status.unreached {
            // What others say of it may be there all the same.
            let known = self.masters.iter_mut().find(|one| one.address == address);
            match known {
                Some(master) => master.reason = Some(reason),
                None => self.masters.push(Master {
                    address,
                    role: None,
                    version: None,
                    reason: Some(reason),
                }),
            }
        }
        Ok(())
    }
}

/// Asks the leader for the nodes, as a client that moves no bytes.
async fn stats(connection: &Connection) -> anyhow::Result<(Client, PoolStats)> {
    let options = Options {
        // Nothing is opened for it: what there is of RDMA is known already.
        transport: TransportChoice::Tcp,
        ..connection.options()
    };
    let client = Client::connect(options).await.map_err(connect_error)?;
    let stats = client.stats().await.map_err(control_error)?;
    Ok((client, stats))
}

/// The pool's nodes, and how this host reaches them by `choice`.
pub(crate) async fn nodes_by(
    connection: &Connection,
    choice: Transport,
) -> anyhow::Result<Vec<Node>> {
    let connection = Connection {
        transport: choice,
        ..connection.clone()
    };
    let (host, fabric) = tokio::task::spawn_blocking(Host::read).await?;
    let pool = Pool::look(&connection, &host, fabric.as_ref()).await;
    match pool.failure {
        Some(failure) if failure.unreachable => Err(exit::Unreachable(failure.reason).into()),
        Some(failure) => Err(anyhow::anyhow!(failure.reason)),
        None => Ok(pool.nodes),
    }
}
