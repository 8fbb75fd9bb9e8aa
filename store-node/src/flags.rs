//! The command line of kvstore-node. What is not given comes from the environment, the file, or the
//! defaults.

use crate::config::Isolation;
use kvpool_daemon::telemetry::LogFormat;
use serde::Serialize;
use std::path::PathBuf;

const ABOUT: &str = "kvstore-node contributes memory to the pool and serves the bytes of its blocks.

It registers with a kvmaster, which decides what is kept where. Clients read and write its memory
directly: through shared memory on the same host, over RDMA, or over TCP. It knows no keys.

Start a kvmaster first, then a node on every host that has memory to give:

    kvstore-node --master http://HOST:7070 --segment 8GiB --listen 0.0.0.0:7072 --advertise THIS_HOST \\
        --insecure

The node allocates and touches its memory at start, so that a lack of memory shows then. After SIGTERM
it first copies blocks to its SSDs, or moves them to other nodes with --move-drain-timeout. Then it waits
for work in progress, and leaves the pool.

Every flag can also be set in a TOML file (--config) under the same name with underscores, or in the
environment (KVSTORE_NODE_DRAIN_TIMEOUT=5s). There, commas separate the items of a repeated flag. Flags
override the environment, which overrides the file.";

/// What the command line gave.
#[derive(Debug, clap::Parser, Serialize)]
#[command(
    name = "kvstore-node",
    version,
    about = "Contributes memory to the pool and serves the bytes of its blocks",
    long_about = ABOUT
)]
pub struct Flags {
    /// Read settings from this TOML file
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Print the settings that would be used, as TOML, and exit
    #[arg(long)]
    #[serde(skip)]
    pub print_config: bool,
    /// Address of a kvmaster, HOST:PORT with or without http://, or https://HOST:PORT for TLS; or
    /// etcd://HOST:PORT[,HOST:PORT]/CLUSTER where masters are announced; repeat, or separate by commas. Any
    /// master leads the node to the leader [default: $KVPOOL_MASTER, or http://127.0.0.1:7070]
    #[arg(long, value_name = "URL")]
    master: Vec<String>,
    /// File with the token of this node, whose policy gives it the role node; read again when it changes
    /// [default: the file that KVPOOL_TOKEN_FILE names]
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    token_file: Option<PathBuf>,
    /// Name of the node, the same across restarts [default: host name and data port]
    #[arg(long)]
    name: Option<String>,
    /// Contribute a segment of memory of this size, for instance 8GiB; repeat for more, or separate by
    /// commas. At least one is required
    #[arg(long, value_name = "SIZE")]
    segment: Vec<String>,
    /// Keep blocks that leave memory on this disk, partition or file:
    /// path=PATH[,size=SIZE][,dwpd=NUMBER][,namespace=NAME][,reset]; repeat for more. A new file of path= needs a size.
    /// dwpd limits the writes, in drive writes per day. With namespace, only blocks of that namespace go there. With
    /// reset, whatever else it holds is lost. With dir=DIRECTORY instead of path=, the node takes the first file there
    /// that no other process has
    #[arg(long, value_name = "MEDIUM")]
    ssd: Vec<String>,
    /// Allocate segments from 2 MiB pages; the host must have reserved enough (vm.nr_hugepages)
    #[arg(long)]
    #[serde(skip_serializing_if = "is_false")]
    hugepages: bool,
    /// Listen here for data connections over TCP [default: 127.0.0.1:7072]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Address that clients use to connect; required with --listen 0.0.0.0. HOST is a name, an IPv4 address or
    /// an IPv6 address: ::1 alone, [::1]:7072 with a port. To use a loopback address with a master on another
    /// host, give it here [default: the listening address]
    #[arg(long, value_name = "HOST[:PORT]")]
    advertise: Option<String>,
    /// Serve /metrics, /healthz and /readyz here [default: 127.0.0.1:7073]
    #[arg(long, value_name = "HOST:PORT")]
    http_listen: Option<String>,
    /// Hand memory to processes of this host over this Unix socket [default:
    /// $XDG_RUNTIME_DIR/kvpool/NAME.sock, else /tmp/kvpool-UID/NAME.sock]
    #[arg(long, value_name = "PATH", conflicts_with = "no_shm")]
    shm_path: Option<PathBuf>,
    /// Serve no shared memory
    #[arg(long)]
    #[serde(skip_serializing_if = "is_false")]
    no_shm: bool,
    /// Serve no RDMA, even if the host has a device
    #[arg(long, conflicts_with = "rdma_device")]
    #[serde(skip_serializing_if = "is_false")]
    no_rdma: bool,
    /// Serve over this RDMA device; repeat for more, or separate by commas [default: every active port, if
    /// there is any]
    #[arg(long, value_name = "NAME[:PORT]")]
    rdma_device: Vec<String>,
    /// Use this entry of the RDMA ports' GID tables [default: by type, RoCE v2 first]
    #[arg(long, value_name = "INDEX")]
    rdma_gid_index: Option<u8>,
    /// Path MTU for RDMA in bytes: 256, 512, 1024, 2048 or 4096 [default: the port's]
    #[arg(long, value_name = "BYTES")]
    rdma_mtu: Option<u32>,
    /// Mark RDMA packets with this traffic class [default: 0]
    #[arg(long, value_name = "CLASS")]
    rdma_traffic_class: Option<u8>,
    /// Let one client process hold at most this share of the memory by its views and its writes through shared
    /// memory; a single block may exceed it. Writes over RDMA and TCP do not count, because the node can end them
    /// [default: 0.25]
    #[arg(long, value_name = "SHARE")]
    max_held_ratio: Option<f64>,
    /// Who may reach the memory itself: with shared every caller, with strict those that may write in every
    /// namespace, and the others use TCP. Strict needs --auth-jwks [default: shared]
    #[arg(long, value_enum, value_name = "MODE", hide_possible_values = true)]
    #[serde(skip_serializing_if = "Option::is_none")]
    isolation: Option<Isolation>,
    /// Most connections at once: of the data port, and as many of the Unix socket [default: 1024]
    #[arg(long, value_name = "N")]
    max_connections: Option<usize>,
    /// After SIGTERM, wait this long for work in progress [default: 10s]
    #[arg(long, value_name = "TIME")]
    drain_timeout: Option<String>,
    /// After SIGTERM, first copy blocks from memory to the SSDs for at most this long [default: 30s]
    #[arg(long, value_name = "TIME")]
    ssd_drain_timeout: Option<String>,
    /// After SIGTERM, first let the pool move blocks to other nodes for at most this long, the blocks used last
    /// first. Not where an SSD takes them [default: 0s]
    #[arg(long, value_name = "TIME")]
    move_drain_timeout: Option<String>,
    #[command(flatten)]
    #[serde(flatten)]
    tls: kvpool_daemon::tls::Flags,
    #[command(flatten)]
    #[serde(flatten)]
    tokens: kvpool_daemon::tokens::Flags,
    /// Write the addresses to this file, as JSON, once the node serves
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
    /// Format of log lines [default: text]
    #[arg(long, value_enum)]
    log_format: Option<LogFormat>,
    /// Export trace spans to this OpenTelemetry collector, over OTLP (gRPC). Not in builds without the feature
    /// otlp [default: $KVPOOL_OTLP_ENDPOINT, or none]
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes fields by reference"
)]
const fn is_false(flag: &bool) -> bool {
    !*flag
}
