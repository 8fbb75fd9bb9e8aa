//! The transports to one node, each probed.

use crate::connection::Transport;
use kvpool_client::{Credentials, NodeStats};
use kvpool_tls::ClientTls;
use kvpool_transport::rdma::Fabric;
use kvpool_transport::{Channel, DataTls, Link, TransferError, rdma, shm, tcp};
use kvpool_types::wire::data::{Hello, HelloReply, Meta};
use kvpool_types::wire::frame::{self, Op};
use kvpool_types::{ChecksumAlgorithm, ClientId, ClusterId, Code, Epoch, HostId, Token};
use serde::Serialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Number of pings for the median round trip.
const PINGS: usize = 9;

/// One node, and the transports to it from this host.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// The state that the master reports.
    pub(crate) state: String,
    pub(crate) data_address: String,
    pub(crate) heartbeat_age_seconds: f64,
    /// Whether the node runs on this host; `None` if the node does not report its host.
    pub(crate) same_host: Option<bool>,
    /// Whether its data port accepts a caller without a token; `None` if unknown.
    pub(crate) takes_strangers: Option<bool>,
    /// The transport that a client uses: the fastest one that works and is allowed.
    pub(crate) way: Option<Transport>,
    /// Every transport, fastest first.
    pub(crate) ways: Vec<Way>,
}

/// One transport to a node.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Way {
    pub(crate) transport: Transport,
    pub(crate) works: bool,
    /// The finding, or the reason why the transport does not work.
    pub(crate) reason: String,
    /// Whether the node answered that this token may not use the transport, or not the data port that it needs.
    #[serde(skip)]
    pub(crate) is_forbidden: bool,
    /// Time to open a link.
    pub(crate) opened_micros: Option<f64>,
    /// Median round trip of the pings.
    pub(crate) round_trip_micros: Option<f64>,
}

/// The settings of the client that probes.
#[derive(Clone, Debug)]
pub(super) struct Prober {
    pub(super) cluster: ClusterId,
    pub(super) client: ClientId,
    /// The id of this host ([`super::host::Host::id`]).
    pub(super) host: String,
    /// The RDMA ports of this host, or why there are none, in a sentence.
    pub(super) rdma: Result<Arc<Fabric>, String>,
    /// The transports that the client may use.
    pub(super) choice: Transport,
    /// The token for nodes that require one.
    pub(super) credentials: Credentials,
    /// TLS for nodes whose address requires it.
    pub(super) tls: Option<ClientTls>,
    /// Timeout to open one transport.
    pub(super) timeout: Duration,
}

type Opened = Result<(Arc<dyn Link>, HelloReply), TransferError>;

impl Way {
    fn fails(transport: Transport, reason: impl Into<String>) -> Self {
        Self {
            transport,
            works: false,
            reason: reason.into(),
            is_forbidden: false,
            opened_micros: None,
            round_trip_micros: None,
        }
    }

    /// A transport that `error` kept from opening.
    fn refused(transport: Transport, error: &TransferError) -> Self {
        Self {
            is_forbidden: error.code == Code::Forbidden,
            ..Self::fails(transport, error.to_string())
        }
    }

    fn works(transport: Transport, opened: Duration, reason: String) -> Self {
        Self {
            works: true,
            opened_micros: Some(micros(opened)),
            ..Self::fails(transport, reason)
        }
    }
}

impl Prober {
    /// Probes every transport to a node.
    pub(super) async fn reach(&self, stats: &NodeStats) -> Node {
        let hello = Hello {
            min_version: frame::MIN_VERSION,
            max_version: frame::VERSION,
            cluster: self.cluster,
            client: self.client,
            // Another life of the node, or another node at its address, refuses it.
            incarnation: stats.incarnation,
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
            token: self.credentials.current().token,
        };
        let (tcp, address, host) = self.tcp(&stats.data_address, &hello).await;
        let host = host.map(|host| host.to_string());
        let same_host = host.map(|host| host == self.host);
        let takes_strangers = match address {
            Some(resolved) => {
                self.takes_strangers(&stats.data_address, resolved, &hello)
                    .await
            }
            None => None,
        };
        let shm = self.shm(&stats.shm_path, &hello, same_host).await;
        let rdma = self.rdma(&stats.data_address, &tcp, address, &hello).await;
        let ways = vec![shm, rdma, tcp];
        Node {
            name: stats.name.clone(),
            state: stats.state.clone(),
            data_address: stats.data_address.clone(),
            heartbeat_age_seconds: stats.heartbeat_age.as_secs_f64(),
            takes_strangers,
            // An opened socket is on this host, also if the data port reports another host.
            same_host: same_host.or(ways.first().filter(|shm| shm.works).map(|_| true)),
            way: choose(self.choice, &ways),
            ways,
        }
    }

    /// Probes TCP. Also returns the address and the host id if the node answers.
    async fn tcp(&self, address: &str, hello: &Hello) -> (Way, Option<SocketAddr>, Option<HostId>) {
        let fails = |reason: String| (Way::fails(Transport::Tcp, reason), None, None);
        let (address, tls) = match DataTls::of(address, self.tls.as_ref()) {
            Ok(read) => read,
            Err(error) => return fails(error.message),
        };
        let has_tls = tls.is_some();
        let resolved = tokio::time::timeout(self.timeout, tokio::net::lookup_host(address)).await;
        let resolved = match resolved {
            Ok(Ok(mut found)) => found.next(),
            Ok(Err(error)) => return fails(format!("{address}: {error}")),
            Err(_) => {
                return fails(format!(
                    "the host name of {address} was not resolved in time"
                ));
            }
        };
        let Some(resolved) = resolved else {
            return fails(format!("{address} resolves to no address"));
        };
        let (begin, by) = (Instant::now(), self.deadline());
        let asked = hello.clone();
        let options = tcp::ConnectOptions {
            tls,
            ..tcp::ConnectOptions::default()
        };
        let pinger = self.tls.clone().filter(|_| has_tls);
        let reply = match open(move || tcp::connect_with(resolved, asked, by, &options)).await {
            Ok(reply) => reply,
            Err(error) => return (Way::refused(Transport::Tcp, &error), None, None),
        };
        let opened = begin.elapsed();
        let pinged = tokio::time::timeout(
            self.timeout,
            round_trip(resolved, hello, pinger.as_ref(), address),
        )
        .await;
        let way = match pinged {
            Ok(Ok(round_trip)) => Way {
                round_trip_micros: Some(micros(round_trip)),
                ..Way::works(
                    Transport::Tcp,
                    opened,
                    match has_tls {
                        true => format!("at {resolved}, with TLS in user space"),
                        false => format!("at {resolved}"),
                    },
                )
            },
            Ok(Err(error)) => Way::fails(Transport::Tcp, format!("ping failed: {error}")),
            Err(_) => Way::fails(Transport::Tcp, "a ping was not answered in time"),
        };
        (way, Some(resolved), Some(reply.host))
    }

    /// Whether the data port, which took `hello`, takes it without a token too; `None` where that is not known.
    async fn takes_strangers(
        &self,
        told: &str,
        address: SocketAddr,
        hello: &Hello,
    ) -> Option<bool> {
        let stranger = Hello {
            token: Token::default(),
            ..hello.clone()
        };
        let (_, tls) = DataTls::of(told, self.tls.as_ref()).ok()?;
        let options = tcp::ConnectOptions {
            tls,
            ..tcp::ConnectOptions::default()
        };
        let by = self.deadline();
        let connect = move || tcp::connect_with(address, stranger, by, &options);
        let opened = tokio::task::spawn_blocking(connect).await.ok()?;
        match opened {
            Ok(_) => Some(true),
            Err(error) => (error.code == Code::Unauthenticated).then_some(false),
        }
    }

    /// Probes shared memory.
    async fn shm(&self, path: &str, hello: &Hello, same_host: Option<bool>) -> Way {
        let fails = |reason: String| Way::fails(Transport::Shm, reason);
        if same_host == Some(false) {
            return fails("the node is on another host".to_owned());
        }
        if path.is_empty() {
            return fails("the node serves no shared memory".to_owned());
        }
        let path = PathBuf::from(path);
        let (begin, by) = (Instant::now(), self.deadline());
        let (asked, there) = (hello.clone(), path.clone());
        match open(move || shm::connect(&there, asked, by)).await {
            Ok(_) => {
                let reason = format!("on this host, {}", path.display());
                Way::works(Transport::Shm, begin.elapsed(), reason)
            }
            Err(error) => Way {
                reason: told(&path, &error.to_string()),
                ..Way::refused(Transport::Shm, &error)
            },
        }
    }

    /// Probes RDMA. A link is set up at the data port, which `tcp` reached or not.
    async fn rdma(&self, told: &str, tcp: &Way, address: Option<SocketAddr>, hello: &Hello) -> Way {
        let fails = |reason: String| Way::fails(Transport::Rdma, reason);
        let fabric = match &self.rdma {
            Ok(fabric) => fabric.clone(),
            Err(reason) => return fails(reason.clone()),
        };
        let Some(address) = address else {
            let reason = "RDMA links are set up over TCP, and TCP does not work";
            return Way {
                is_forbidden: tcp.is_forbidden,
                ..fails(reason.to_owned())
            };
        };
        let (begin, by) = (Instant::now(), self.deadline());
        let ports: Vec<&str> = fabric.rails().iter().map(|rail| rail.name()).collect();
        let ports = ports.join(", ");
        let asked = hello.clone();
        let tls = match DataTls::of(told, self.tls.as_ref()) {
            Ok((_, tls)) => tls,
            Err(error) => return fails(error.message),
        };
        let connect = move || rdma::connect_with(&fabric, address, asked, by, tls.as_ref());
        match open(connect).await {
            Ok(_) => Way::works(Transport::Rdma, begin.elapsed(), format!("from {ports}")),
            Err(error) => Way::refused(Transport::Rdma, &error),
        }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }
}

/// Opens a link and closes it again. Both may block.
async fn open(
    connect: impl FnOnce() -> Opened + Send + 'static,
) -> Result<HelloReply, TransferError> {
    let opened = tokio::task::spawn_blocking(|| connect().map(|(_, reply)| reply)).await;
    opened.unwrap_or_else(|panic| {
        Err(TransferError {
            code: Code::Internal,
            message: panic.to_string(),
        })
    })
}

/// The median time of a ping to the node at `address`.
async fn round_trip(
    address: SocketAddr,
    hello: &Hello,
    tls: Option<&ClientTls>,
    authority: &str,
) -> Result<Duration, String> {
    let connected = match tls {
        None => Channel::connect(address, Duration::ZERO).await,
        Some(tls) => Channel::connect_tls(address, Duration::ZERO, tls, authority).await,
    };
    let channel = connected.map_err(|error| error.to_string())?;
    let epoch = Epoch::default();
    let said = channel
        .call(Op::Hello, epoch, |out| hello.encode(out))
        .await;
    said.and_then(|reply| reply.expect(Op::HelloReply))
        .map_err(|error| error.to_string())?;
    let mut times = Vec::with_capacity(PINGS);
    for _ in 0..PINGS {
        let begin = Instant::now();
        channel
            .ping(epoch)
            .await
            .map_err(|error| error.to_string())?;
        times.push(begin.elapsed());
    }
    times.sort();
    times
        .get(PINGS / 2)
        .copied()
        .ok_or_else(|| "no ping was measured".to_owned())
}

/// The transport that a client uses: the first that works and is allowed.
fn choose(choice: Transport, ways: &[Way]) -> Option<Transport> {
    ways.iter()
        .filter(|way| choice == Transport::Auto || way.transport == choice)
        .find(|way| way.works)
        .map(|way| way.transport)
}

/// The error with the path of the socket, unless it names the path already.
fn told(path: &Path, error: &str) -> String {
    let path = path.display().to_string();
    if error.contains(&path) {
        error.to_owned()
    } else {
        format!("{path}: {error}")
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_way_that_works_and_is_allowed_is_taken() {
        let works = |way| Way::works(way, Duration::ZERO, String::new());
        let ways = [
            Way::fails(Transport::Shm, "another host"),
            works(Transport::Rdma),
            works(Transport::Tcp),
        ];
        assert_eq!(choose(Transport::Auto, &ways), Some(Transport::Rdma));
        assert_eq!(choose(Transport::Tcp, &ways), Some(Transport::Tcp));
        assert_eq!(choose(Transport::Shm, &ways), None);
    }
}
