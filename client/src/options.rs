//! What a client is told when it connects.

use crate::errors::ConnectError;
use kvpool_auth::Credentials;
/// The masters in a list with commas, for [`Options::masters`].
pub use kvpool_etcd::discover::split_list as masters;
pub use kvpool_etcd::discover::{BadMaster, DEFAULT_MASTER, parse_master};
pub use kvpool_tls::ClientFiles;
use kvpool_transport::rdma::RdmaOptions;
use kvpool_types::namespace::Namespace;
use kvpool_types::{Length, Token};
use std::path::PathBuf;
use std::time::Duration;

/// How a client reaches the pool, and its timeouts and limits.
#[derive(Clone, Debug)]
pub struct Options {
    /// The masters, as `host:port` or `http://host:port`, or `https://host:port` for TLS; or where they are
    /// announced, as `etcd://host:port[,host:port...]/cluster`. Any of them will do: the one that leads is
    /// found from there, and followed when another takes its place. The default is what the environment
    /// variable `KVPOOL_MASTER` names, else [`DEFAULT_MASTER`].
    pub masters: Vec<String>,
    /// The namespace that all keys of this client belong to. It is made known at connect.
    pub namespace: Namespace,
    /// Which ways bytes may go.
    pub transport: TransportChoice,
    /// How RDMA is used, where this host has it.
    pub rdma: RdmaOptions,
    /// How long operations may take when they are not told otherwise.
    pub timeouts: Timeouts,
    /// The most keys in one message; the master's own limit also holds.
    pub max_batch_keys: usize,
    /// About how many bytes one message may have.
    pub max_message_bytes: Length,
    /// How many messages of one batch are in flight at a time.
    pub batch_concurrency: usize,
    /// How many locations of blocks are remembered while their leases run; 0: none.
    pub location_cache: u64,
    /// How many TCP connections to one node share the work.
    pub tcp_connections_per_node: usize,
    /// The most pinned host memory that blocks of GPUs pass through at a time; larger blocks are refused.
    /// It is allocated when it is first used.
    pub gpu_staging: Length,
    /// How long a call to the master polls for its answer, with a whole core, before it sleeps. Zero,
    /// the default, never polls. Worth it only where cores are idle: 50 us then save the time that
    /// waking a sleeping core takes.
    pub spin: Duration,
    /// The token that says who the client is; empty for none, or for the one in `token_file`.
    pub token: Token,
    /// Whom to trust, and what to present, where an address asks for TLS.
    pub tls: ClientFiles,
    /// The file with the token, which is read again when it changes. The default is what the environment
    /// variable `KVPOOL_TOKEN_FILE` names.
    pub token_file: Option<PathBuf>,
}

impl Options {
    /// The client's token, or where it comes from.
    pub fn credentials(&self) -> Credentials {
        match &self.token_file {
            Some(path) if self.token.as_str().is_empty() => Credentials::file(path),
            _ => Credentials::fixed(self.token.clone()),
        }
    }
}

/// The addresses as the client calls them.
pub(crate) fn read_masters(given: &[String]) -> Result<Vec<String>, ConnectError> {
    let read = kvpool_etcd::discover::parse_masters(given);
    read.map_err(|BadMaster { address, reason }| ConnectError::BadAddress { address, reason })
}

impl Default for Options {
    fn default() -> Self {
        Self {
            masters: kvpool_etcd::discover::default_masters(),
            namespace: Namespace::default(),
            transport: TransportChoice::Auto,
            rdma: RdmaOptions::default(),
            timeouts: Timeouts::default(),
            max_batch_keys: 2048,
            max_message_bytes: Length(4 << 20),
            batch_concurrency: 4,
            location_cache: 100_000,
            tcp_connections_per_node: connections(),
            gpu_staging: Length(256 << 20),
            spin: Duration::ZERO,
            token: Token::default(),
            token_file: kvpool_auth::token_file_of_environment(),
            tls: ClientFiles::default(),
        }
    }
}

/// The default number of TCP connections per node. A streaming connection keeps two threads busy, so more
/// connections than cores do not help. A second one always does, because each end of the first sometimes
/// waits for the other.
fn connections() -> usize {
    let cores = kvpool_seams::cores().unwrap_or(2);
    cores.clamp(2, 4)
}

/// Which ways bytes may go between this process and store nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// The best that both ends have: shared memory on the same host, then RDMA, then TCP.
    #[default]
    Auto,
    /// Shared memory only: blocks that lie on other hosts cannot be moved.
    Shm,
    /// RDMA only, also with nodes on the same host.
    Rdma,
    /// TCP only, also with nodes on the same host.
    Tcp,
}

/// How long operations may take, from the call to the return, when the call does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Connecting to the pool.
    pub connect: Duration,
    /// A put, the wait for room included.
    pub put: Duration,
    /// A get, with all its attempts.
    pub get: Duration,
    /// Any other call: exist, match_prefix, remove, list, describe, stats, renew, release.
    pub control: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            put: Duration::from_secs(10),
            get: Duration::from_secs(5),
            control: Duration::from_secs(3),
        }
    }
}
