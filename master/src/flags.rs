//! The command line of kvmaster. What is not given comes from the environment, the file, or the
//! defaults.

use crate::config::CommitAck;
use crate::directory::Policy;
use kvpool_daemon::telemetry::LogFormat;
use serde::Serialize;
use std::path::PathBuf;

const ABOUT: &str = "kvmaster knows which block of the pool lies where.

It hands out room for puts, answers where blocks are, and makes room by evicting the least recently
used. It never touches a block's bytes: these go between clients and kvstore-nodes.

Start one, then nodes that point at it:

    kvmaster --data-dir /var/lib/kvmaster --listen 0.0.0.0:7070 --advertise HOST
    kvstore-node --master http://HOST:7070 --segment 8GiB --listen 0.0.0.0:7072 --advertise THIS_HOST

Every flag can also be set in a TOML file (--config) under the same name with underscores, or in the
environment (KVMASTER_LEASE_TTL=10s). Flags win over the environment, it over the file.";

/// What the command line gave.
#[derive(Debug, clap::Parser, Serialize)]
#[command(
    name = "kvmaster",
    version,
    about = "Knows which block of the pool lies where",
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
    /// Serve clients and nodes here, in gRPC and in frames [default: 127.0.0.1:7070]
    #[arg(long, value_name = "HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    listen: Option<String>,
    /// Serve /metrics, /healthz, /readyz and /api/v1 here [default: 127.0.0.1:7071]
    #[arg(long, value_name = "HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    http_listen: Option<String>,
    /// Tell others to reach --listen here; needed with etcd when listening on 0.0.0.0 [default: the
    /// listening address, or nothing on 0.0.0.0]
    #[arg(long, value_name = "HOST[:PORT]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    advertise: Option<String>,
    /// Keep the metadata in etcd: its servers, separated by commas
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd: Option<Vec<String>>,
    /// The pool's name in etcd's keys, the same for all its masters [default: default]
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster: Option<String>,
    /// Log in to etcd as this user
    #[arg(long, value_name = "USER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_user: Option<String>,
    /// The file that holds the password of --etcd-user
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_password_file: Option<PathBuf>,
    /// Check etcd's certificates against these
    #[arg(long, value_name = "PEM")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_ca: Option<PathBuf>,
    /// Show etcd this certificate
    #[arg(long, value_name = "PEM")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_cert: Option<PathBuf>,
    /// The certificate's key
    #[arg(long, value_name = "PEM")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_key: Option<PathBuf>,
    /// Another master may lead when etcd has not heard of this one for so long [default: 3s]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    leader_ttl: Option<String>,
    /// Whether the leader compacts etcd's history and defragments its files, of the whole etcd and not of
    /// its own keys alone; say false where others share it [default: true]
    #[arg(long, value_name = "BOOL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_compact: Option<bool>,
    /// Keep the metadata in this directory, without etcd [default: data/kvmaster]
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    data_dir: Option<PathBuf>,
    /// When the metadata in --data-dir is damaged, incomplete or foreign: set it aside and begin an empty
    /// pool, instead of refusing to start
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    accept_empty_store: bool,
    /// Answer a commit once it is on disk, or at once from memory: a crash then loses the commits of about
    /// the last 50 ms, or, while the disk or etcd stalls, up to some 32,768 of however long that lasts
    /// [default: durable]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    commit_ack: Option<CommitAck>,
    /// Never use more than this share of a segment; reaching it starts eviction [default: 0.95]
    #[arg(long, value_name = "SHARE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    eviction_high_watermark_ratio: Option<f64>,
    /// Evict down to the high watermark less this share of the pool [default: 0.05]
    #[arg(long, value_name = "SHARE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    eviction_ratio: Option<f64>,
    /// Evict leaves of chains first, oldest first (prefix), or plainly the oldest (lru) [default:
    /// prefix]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    eviction_policy: Option<Policy>,
    /// Protect what a reader was told for this long [default: 5s]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ttl: Option<String>,
    /// Let no put write for longer than this [default: 60s]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_grant_ttl: Option<String>,
    /// Let no put wait for room longer than this [default: 60s]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_wait: Option<String>,
    /// Have nodes speak this often [default: 500ms]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    heartbeat_interval: Option<String>,
    /// Avoid a node that has been silent for this long, and keep its blocks [default: 3s]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    suspect_after: Option<String>,
    /// Give up a node that has been silent for this long, and its blocks [default: 10m]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    drop_after: Option<String>,
    /// Refuse larger blocks [default: 1GiB, which is also the most]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_block_size: Option<String>,
    /// Refuse requests of more keys; clients split theirs [default: 16384]
    #[arg(long, value_name = "KEYS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_batch_keys: Option<u32>,
    /// Let waiting commits hold this much memory, and other waiting calls as much [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_waiting: Option<String>,
    /// Refuse to create more namespaces [default: 65536]
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_namespaces: Option<u32>,
    /// Serve this many connections of clients and nodes; a client has three and a node one [default: 8192]
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_connections: Option<usize>,
    /// Use so much memory to carry a store of format 1 over, once [default: 2MiB]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    store_cache: Option<String>,
    /// Write the addresses to this file as JSON once serving
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    ready_file: Option<PathBuf>,
    /// Log lines for people (text) or for collectors (json) [default: text]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    log_format: Option<LogFormat>,
}
