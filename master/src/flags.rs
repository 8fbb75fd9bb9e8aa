//! The command line of kvmaster. The environment, the file and the defaults supply settings that it
//! omits.

use crate::config::CommitAck;
use crate::directory::Policy;
use kvpool_daemon::telemetry::LogFormat;
use serde::Serialize;
use std::path::PathBuf;

const ABOUT: &str = "kvmaster holds the pool's metadata: which block lies on which store node.

It reserves room for puts, answers lookups, and evicts blocks when the pool is full. Block bytes
never pass through it: clients and kvstore-nodes exchange them directly.

Start a master, then nodes that point at it:

    kvmaster --data-dir /var/lib/kvmaster --listen 0.0.0.0:7070 --advertise HOST --insecure
    kvstore-node --master http://HOST:7070 --segment 8GiB --listen 0.0.0.0:7072 --advertise THIS_HOST \\
        --insecure

Every flag can also be set in a TOML file (--config) under the same name with underscores, or in the
environment (KVMASTER_LEASE_TTL=10s). Flags override the environment, which overrides the file.";

/// The options on the command line.
#[derive(Debug, clap::Parser, Serialize)]
#[command(
    name = "kvmaster",
    version,
    about = "Holds the metadata of a kvpool: which block lies on which store node",
    long_about = ABOUT
)]
pub struct Flags {
    /// Read settings from this TOML file
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Print the effective settings as TOML and exit
    #[arg(long)]
    #[serde(skip)]
    pub print_config: bool,
    /// Address that serves clients and nodes, over gRPC and frames [default: 127.0.0.1:7070]
    #[arg(long, value_name = "HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    listen: Option<String>,
    /// Address that serves the page, /metrics, /healthz, /readyz and /api/v1 [default: 127.0.0.1:7071]
    #[arg(long, value_name = "HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    http_listen: Option<String>,
    /// Address of --listen as other machines reach it; required with etcd when listening on 0.0.0.0. HOST is a
    /// name, an IPv4 address or an IPv6 address: ::1 alone, [::1]:7070 with a port
    /// [default: the listening address, or none on 0.0.0.0]
    #[arg(long, value_name = "HOST[:PORT]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    advertise: Option<String>,
    /// Keep the metadata in etcd: URLs of its servers, separated by commas
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd: Option<Vec<String>>,
    /// Name of the pool in etcd's keys; the same on all masters of the pool [default: default]
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster: Option<String>,
    /// Log in to etcd as this user
    #[arg(long, value_name = "USER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_user: Option<String>,
    /// File that holds the password of --etcd-user
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_password_file: Option<PathBuf>,
    /// CA certificates that verify etcd's certificate
    #[arg(long, value_name = "PEM")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_ca: Option<PathBuf>,
    /// Client certificate that this master presents to etcd
    #[arg(long, value_name = "PEM")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_cert: Option<PathBuf>,
    /// Private key of --etcd-cert
    #[arg(long, value_name = "PEM")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_key: Option<PathBuf>,
    /// Leader lease TTL in etcd: without a renewal for this long, another master may lead [default: 3s]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    leader_ttl: Option<String>,
    /// Let the leader compact and defragment etcd. Both act on the whole etcd: set false if other
    /// applications share it [default: true]
    #[arg(long, value_name = "BOOL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    etcd_compact: Option<bool>,
    /// Keep the metadata in this directory, without etcd [default: data/kvmaster]
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    data_dir: Option<PathBuf>,
    /// If the metadata in --data-dir is damaged, incomplete or foreign, set it aside and start an empty
    /// pool, instead of refusing to start
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    accept_empty_store: bool,
    /// Answer a commit when it is on stable storage (durable), or at once (memory). With memory, a crash
    /// loses about the last 50 ms of commits; if the disk or etcd stalls, up to about 32,768 commits
    /// [default: durable]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    commit_ack: Option<CommitAck>,
    /// High watermark: the largest share of a segment that may be used [default: 0.95]
    #[arg(long, value_name = "SHARE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    eviction_high_watermark_ratio: Option<f64>,
    /// Reserve below the high watermark, as a share of the pool. Eviction starts when less than half of
    /// the reserve is free and stops when all of it is free [default: 0.05]
    #[arg(long, value_name = "SHARE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    eviction_ratio: Option<f64>,
    /// Eviction order: the oldest leaf of a chain first (prefix), or the oldest block first (lru)
    /// [default: prefix]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    eviction_policy: Option<Policy>,
    /// Lease TTL: how long a lookup protects a block against eviction [default: 5s]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ttl: Option<String>,
    /// Longest time that a put may take to write its bytes [default: 60s]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_grant_ttl: Option<String>,
    /// Longest time that a put may wait for room [default: 60s]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_wait: Option<String>,
    /// Interval between a node's heartbeats [default: 500ms]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    heartbeat_interval: Option<String>,
    /// Suspect a node after this long without a heartbeat: it is avoided, its blocks stay [default: 3s]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    suspect_after: Option<String>,
    /// Drop a node and the blocks in its memory after this long without a heartbeat [default: 10m]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    drop_after: Option<String>,
    /// Drop an SSD and the copies on it after this long without a node that has it [default: 1day]
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    ssd_drop_after: Option<String>,
    /// Largest block that a put may store; at most 1GiB [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_block_size: Option<String>,
    /// Most keys in one request; clients split larger batches [default: 16384]
    #[arg(long, value_name = "KEYS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_batch_keys: Option<u32>,
    /// Memory limit of waiting commits; other waiting calls get the same limit [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_waiting: Option<String>,
    /// Bytes a second that a node may send to other nodes for copies and moves of replicas; 0B for no
    /// limit [default: 0B]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    replica_bandwidth: Option<String>,
    /// Bytes a second that one replica of a block should serve. A block that is looked up faster gets
    /// further replicas; 0B: none does [default: 0B]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    hot_rate: Option<String>,
    /// Most bytes of the further replicas of all hot blocks [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    hot_budget: Option<String>,
    /// Most namespaces that the pool may have [default: 65536]
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_namespaces: Option<u32>,
    /// Most connections of clients and nodes; a client opens three, a node one [default: 8192]
    #[arg(long, value_name = "COUNT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_connections: Option<usize>,
    /// Memory for the one-time migration of a store of format 1 [default: 2MiB]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    store_cache: Option<String>,
    #[command(flatten)]
    #[serde(flatten)]
    tls: kvpool_daemon::tls::Flags,
    #[command(flatten)]
    #[serde(flatten)]
    tokens: kvpool_daemon::tokens::Flags,
    /// Write the addresses to this file as JSON when the master serves
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    ready_file: Option<PathBuf>,
    /// Format of log lines: for people (text) or for collectors (json) [default: text]
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    log_format: Option<LogFormat>,
    /// Export trace spans to this OpenTelemetry collector, over OTLP (gRPC). Not in builds without the feature
    /// otlp [default: $KVPOOL_OTLP_ENDPOINT, or none]
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    otlp_endpoint: Option<String>,
}
