//! The options with which a client connects.

use crate::errors::ConnectError;
use kvpool_auth::Credentials;
/// Splits a list of masters with commas, for [`Options::masters`].
pub use kvpool_etcd::discover::split_list as masters;
pub use kvpool_etcd::discover::{BadMaster, DEFAULT_MASTER, parse_master};
pub use kvpool_tls::ClientFiles;
use kvpool_transport::rdma::RdmaOptions;
use kvpool_types::namespace::Namespace;
use kvpool_types::{Length, Token};
use std::path::PathBuf;
use std::time::Duration;

/// The addresses, transports, timeouts and limits of a client.
#[derive(Clone, Debug)]
pub struct Options {
    /// The masters, as `host:port`, `http://host:port`, or `https://host:port` for TLS. Or the etcd key under
    /// which masters are announced, as `etcd://host:port[,host:port...]/cluster`. One master of the pool is
    /// enough: it names the leader, and the client follows the leader when it changes. The default is the
    /// value of the environment variable `KVPOOL_MASTER`, else [`DEFAULT_MASTER`].
    pub masters: Vec<String>,
    /// The namespace of all keys of this client. The client creates it at connect if it does not exist.
    pub namespace: Namespace,
    /// The transports that may be used.
    pub transport: TransportChoice,
    /// The RDMA settings, for hosts with RDMA.
    pub rdma: RdmaOptions,
    /// The timeouts of calls that give none.
    pub timeouts: Timeouts,
    /// The most keys in one message. The master's own limit also holds.
    pub max_batch_keys: usize,
    /// The approximate most bytes of one message.
    pub max_message_bytes: Length,
    /// The most messages of one batch in flight at a time.
    pub batch_concurrency: usize,
    /// The most block locations in the cache, which keeps them while their leases would run. 0 disables the
    /// cache.
    pub location_cache: u64,
    /// The number of TCP connections to one node.
    pub tcp_connections_per_node: usize,
    /// The most pinned host memory in bytes for the blocks of GPUs. Larger blocks are refused. The memory is
    /// allocated at its first use.
    pub gpu_staging: Length,
    /// How long a call polls for the master's answer, with a whole core, before it sleeps. Zero, the default,
    /// never polls. Polling is worth it only where cores are idle. A value of 50 us then saves the time for
    /// waking a sleeping core.
    pub spin: Duration,
    /// The token that states the client's identity. Empty for no token, or to use `token_file`.
    pub token: Token,
    /// The certificates to trust and to present, for addresses that require TLS.
    pub tls: ClientFiles,
    /// The file with the token, which is read again when it changes. The default is the value of the
    /// environment variable `KVPOOL_TOKEN_FILE`.
    pub token_file: Option<PathBuf>,
}

impl Options {
    /// The client's token, or the file that it comes from.
    pub fn credentials(&self) -> Credentials {
        match &self.token_file {
            Some(path) if self.token.as_str().is_empty() => Credentials::file(path),
            _ => Credentials::fixed(self.token.clone()),
        }
    }
}

/// The given addresses in the form in which the client calls them.
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
/// connections than cores do not help. A second connection always helps, because each end of the first one
/// sometimes waits for the other.
fn connections() -> usize {
    let cores = kvpool_seams::cores().unwrap_or(2);
    cores.clamp(2, 4)
}

/// The transports that may be used between this process and store nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// The best transport that both ends have: shared memory on the same host, then RDMA, then TCP.
    #[default]
    Auto,
    /// Shared memory only. Blocks on other hosts cannot be read or written.
    Shm,
    /// RDMA only, also with nodes on the same host.
    Rdma,
    /// TCP only, also with nodes on the same host.
    Tcp,
}

/// The timeouts of calls that give none, from the call to the return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// The time limit of connecting to the pool.
    pub connect: Duration,
    /// The time limit of a put, with the wait for room.
    pub put: Duration,
    /// The time limit of a get, with all its attempts.
    pub get: Duration,
    /// The time limit of any other call: exist, match_prefix, remove, list, describe, stats, renew, release.
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
