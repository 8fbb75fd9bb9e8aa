//! The pool: its masters, its nodes, and the transports to them.

use super::host::Host;
use super::node::{Node, Prober};
use crate::connection::{Connection, Transport, connect_error, control_error, is_hidden};
use crate::{exit, masters, media, shares, tokens};
use futures::future::join_all;
use kvpool_client::{Client, ConnectError, Options, PoolStats, TransportChoice};
use kvpool_tls::ClientTls;
use kvpool_transport::rdma::Fabric;
use kvpool_types::{Causes, Code, Token};
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;

/// Timeout of one request: a silent master must not delay the others for long.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The pool, as far as it answered.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Pool {
    /// The masters that were asked.
    pub(crate) asked: String,
    /// Whether --master named them; otherwise they are the default address.
    pub(crate) named: bool,
    /// Why the nodes are unknown; `None` if they are known.
    pub(crate) failure: Option<Failure>,
    /// The address of the leader.
    pub(crate) leader: Option<String>,
    /// Why the leader takes no changes; `None` if it takes them.
    pub(crate) read_only: Option<String>,
    /// The alarms of the metadata store.
    pub(crate) alarms: Vec<String>,
    /// The pool of each named master that tells it. Empty if only one master is named.
    pub(crate) pools: Vec<NamedPool>,
    pub(crate) masters: Vec<Master>,
    pub(crate) nodes: Vec<Node>,
    /// Whether the token does not show the nodes.
    pub(crate) is_hidden: bool,
    /// Whether the caller showed a token.
    #[serde(skip)]
    pub(crate) has_token: bool,
    /// Whether the leader accepts a caller without a token; `None` if unknown.
    pub(crate) takes_strangers: Option<bool>,
    /// The problems of its masters, media, guaranteed shares and files of tokens.
    #[serde(skip)]
    pub(crate) problems: Vec<String>,
}

/// Why the nodes are unknown.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Failure {
    pub(crate) reason: String,
    /// Whether no master answered: exit code 4.
    pub(crate) unreachable: bool,
}

/// The pool of one named master.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NamedPool {
    pub(crate) address: String,
    pub(crate) cluster_id: String,
}

/// One master.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Master {
    pub(crate) address: String,
    /// Its role, as reported by itself or by another master; `None` if unknown.
    pub(crate) role: Option<String>,
    pub(crate) version: Option<String>,
    /// Why the master does not answer; `None` if it answers or was not asked.
    pub(crate) reason: Option<String>,
}

impl Failure {
    fn of(error: &anyhow::Error) -> Self {
        Self {
            reason: Causes(error.as_ref()).to_string(),
            unreachable: error.is::<exit::Unreachable>(),
        }
    }
}

impl Pool {
    /// Inspects the pool that `connection` names.
    pub(super) async fn inspect(
        connection: &Connection,
        host: &Host,
        fabric: Option<&Arc<Fabric>>,
    ) -> Self {
        let mut pool = Self {
            asked: connection.master().to_owned(),
            named: connection.master.is_some(),
            failure: None,
            leader: None,
            read_only: None,
            alarms: Vec::new(),
            pools: Vec::new(),
            masters: Vec::new(),
            nodes: Vec::new(),
            is_hidden: false,
            has_token: false,
            takes_strangers: None,
            problems: Vec::new(),
        };
        let found = async {
            pool.ask_masters(connection).await?;
            let (client, stats) = stats(connection).await?;
            let credentials = connection.credentials()?;
            pool.problems.extend(media::problems(&stats.media));
            pool.problems.extend(shares::problem(&stats));
            pool.problems.extend(tokens::problems(&stats));
            pool.is_hidden = is_hidden(&stats);
            pool.has_token = !credentials.current().token.as_str().is_empty();
            pool.takes_strangers = match pool.has_token {
                true => takes_strangers(connection).await,
                false => Some(true),
            };
            let rdma = match (fabric, &host.rdma.reason) {
                (Some(fabric), _) => Ok(fabric.clone()),
                (None, reason) => Err(reason.clone().unwrap_or_default()),
            };
            let prober = Prober {
                cluster: client.cluster_id(),
                client: client.client_id(),
                host: host.id.clone(),
                rdma,
                choice: connection.transport,
                credentials,
                tls: ClientTls::open(&connection.tls())?
                    .map(|tls| tls.among(&connection.masters())),
                timeout: connection.timeout.min(TIMEOUT),
            };
            pool.nodes = join_all(stats.nodes.iter().map(|node| prober.reach(node))).await;
            anyhow::Ok(())
        };
        if let Err(error) = Box::pin(found).await {
            pool.failure = Some(Failure::of(&error));
        }
        pool
    }

    async fn ask_masters(&mut self, connection: &Connection) -> anyhow::Result<()> {
        let timeout = connection.timeout.min(TIMEOUT);
        let status = Box::pin(masters::status(connection, timeout));
        let pools = Box::pin(async {
            match connection.masters().len() {
                0 | 1 => Ok(Vec::new()),
                _ => masters::pools(connection, timeout).await,
            }
        });
        let (status, pools) = tokio::join!(status, pools);
        let pools = pools?.into_iter().map(|(address, pool)| NamedPool {
            address,
            cluster_id: pool.to_string(),
        });
        self.pools = pools.collect();
        let status = status?;
        self.read_only = masters::read_only(&status);
        self.problems = masters::problems(&status);
        self.leader = status.leader;
        self.alarms = status.alarms;
        let members = status.members.into_iter().map(|member| Master {
            address: member.address,
            role: Some(member.role),
            version: Some(member.version),
            reason: None,
        });
        self.masters = members.collect();
        for (address, reason) in status.unreached {
            // Another master may have described it.
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

/// Asks the leader for the nodes, with a client that moves no block bytes.
async fn stats(connection: &Connection) -> anyhow::Result<(Client, PoolStats)> {
    let options = Options {
        // The doctor knows the RDMA ports already; this client opens none.
        transport: TransportChoice::Tcp,
        ..connection.options()
    };
    let client = Client::connect(options).await.map_err(connect_error)?;
    let stats = client.stats().await.map_err(control_error)?;
    Ok((client, stats))
}

/// Whether the leader, which answers a caller with a token, answers one without; `None` where that is not known.
async fn takes_strangers(connection: &Connection) -> Option<bool> {
    let mut options = Options {
        transport: TransportChoice::Tcp,
        token: Token::default(),
        token_file: None,
        ..connection.options()
    };
    options.timeouts.connect = options.timeouts.connect.min(TIMEOUT);
    match Client::connect(options).await {
        Ok(_) => Some(true),
        Err(ConnectError::Refused { source, .. }) if source.code == Code::Unauthenticated => {
            Some(false)
        }
        Err(_) => None,
    }
}

/// The nodes of the pool, and the transports of `choice` from this host.
pub(crate) async fn nodes_by(
    connection: &Connection,
    choice: Transport,
) -> anyhow::Result<Vec<Node>> {
    let connection = Connection {
        transport: choice,
        ..connection.clone()
    };
    let (host, fabric) = tokio::task::spawn_blocking(Host::read).await?;
    let pool = Pool::inspect(&connection, &host, fabric.as_ref()).await;
    match pool.failure {
        Some(failure) if failure.unreachable => Err(exit::Unreachable(failure.reason).into()),
        Some(failure) => Err(anyhow::anyhow!(failure.reason)),
        None => Ok(pool.nodes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_client::ControlError;

    #[test]
    fn a_failure_says_each_reason_once() {
        let refused = ConnectError::Refused {
            masters: "http://a:1".to_owned(),
            source: ControlError {
                code: Code::Unauthenticated,
                message: "name a file".to_owned(),
            },
        };
        let failure = Failure::of(&connect_error(refused));
        assert_eq!(
            failure.reason.matches("name a file").count(),
            1,
            "{failure:?}"
        );
        assert!(!failure.unreachable);
    }
}
