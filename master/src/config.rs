//! What can be set on a kvmaster, and what it is when it is not.

use crate::directory::Policy;
use bytesize::ByteSize;
use kvpool_daemon::config::exact;
use kvpool_types::Length;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// The least [`Config::max_waiting`]: the largest message, and as much again.
const LEAST_WAITING: ByteSize = ByteSize::mib(16);

/// The settings of one kvmaster. Every field has a flag, an environment variable
/// (`KVMASTER_` and its name) and a place in the configuration file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where clients and nodes are served, in gRPC and in frames, `host:port`.
    pub listen: String,
    /// Where `/metrics`, `/healthz`, `/readyz` and the JSON views are served, `host:port`.
    pub http_listen: String,
    /// Where others reach `listen`, `host:port` or `host`; by default the address that it is bound to, or
    /// none where that is every interface.
    pub advertise: Option<String>,
    /// Where the embedded metadata store keeps its files.
    pub data_dir: PathBuf,
    /// Whether a store in `data_dir` that cannot be read back whole is set aside and an empty pool begun.
    pub accept_empty_store: bool,
    /// The etcd servers, `http://host:port` each; without any the metadata store is the embedded one.
    pub etcd: Vec<String>,
    /// Which pool's metadata in etcd: the name in its keys.
    pub cluster: String,
    /// The etcd user; empty for none.
    pub etcd_user: String,
    /// The file that holds its password.
    pub etcd_password_file: Option<PathBuf>,
    /// The certificates that etcd's are checked against, PEM; for `https://` servers.
    pub etcd_ca: Option<PathBuf>,
    /// The certificate that etcd checks, PEM.
    pub etcd_cert: Option<PathBuf>,
    /// Its key, PEM.
    pub etcd_key: Option<PathBuf>,
    /// Leader lease TTL in etcd: without a renewal for this long, another master may lead.
    #[serde(with = "humantime_serde")]
    pub leader_ttl: Duration,
    /// Whether the leader compacts etcd's history and defragments its files. That is of the whole etcd:
    /// not where others share it.
    pub etcd_compact: bool,
    /// When a commit is answered.
    pub commit_ack: CommitAck,
    /// No more than this share of a segment is ever used; reaching it starts eviction.
    pub eviction_high_watermark_ratio: f64,
    /// The reserve below the high watermark, as a share of the pool: a round begins when less than half of it is free,
    /// and ends when all of it is.
    pub eviction_ratio: f64,
    /// Which blocks are evicted first.
    pub eviction_policy: Policy,
    /// How long a lease protects a block.
    #[serde(with = "humantime_serde")]
    pub lease_ttl: Duration,
    /// The longest time that a grant may be written through.
    #[serde(with = "humantime_serde")]
    pub max_grant_ttl: Duration,
    /// The longest time that a put may wait for room.
    #[serde(with = "humantime_serde")]
    pub max_wait: Duration,
    /// How often a node speaks.
    #[serde(with = "humantime_serde")]
    pub heartbeat_interval: Duration,
    /// A node that has not spoken for so long is suspect: it is avoided, its blocks are kept.
    #[serde(with = "humantime_serde")]
    pub suspect_after: Duration,
    /// A node that has not spoken for so long is given up, and its blocks with it.
    #[serde(with = "humantime_serde")]
    pub drop_after: Duration,
    /// The largest block; at most 1 GiB, which is what one frame of the data port carries.
    #[serde(with = "exact::size")]
    pub max_block_size: ByteSize,
    /// The most keys in one request.
    pub max_batch_keys: u32,
    /// What requests that wait (for room or for durability) may hold: commits so much, other calls so much.
    #[serde(with = "exact::size")]
    pub max_waiting: ByteSize,
    /// The most namespaces.
    pub max_namespaces: u32,
    /// The most connections of clients and nodes, in frames and in gRPC together; a framed one has a thread.
    /// Callers that have not said who they are take no place.
    pub max_connections: usize,
    /// The memory that reading a store of format 1 may use, once, to carry it over.
    #[serde(with = "exact::size")]
    pub store_cache: ByteSize,
    /// Once it serves, the addresses are written to this file as JSON.
    pub ready_file: Option<PathBuf>,
    /// How log lines are written.
    pub log_format: kvpool_daemon::telemetry::LogFormat,
}

/// When a commit is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CommitAck {
    /// Once its record is on stable storage: it survives a crash.
    Durable,
    /// At once: a crash may lose what was committed in the last moments, about 50 ms; while the store
    /// stalls, up to two groups of the log (about 16,384 records or 1 MiB each), however long that lasts.
    Memory,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7070".into(),
            http_listen: "127.0.0.1:7071".into(),
            advertise: None,
            data_dir: "data/kvmaster".into(),
            accept_empty_store: false,
            etcd: Vec::new(),
            cluster: "default".into(),
            etcd_user: String::new(),
            etcd_password_file: None,
            etcd_ca: None,
            etcd_cert: None,
            etcd_key: None,
            leader_ttl: Duration::from_secs(3),
            etcd_compact: true,
            commit_ack: CommitAck::Durable,
            eviction_high_watermark_ratio: 0.95,
            eviction_ratio: 0.05,
            eviction_policy: Policy::Prefix,
            lease_ttl: Duration::from_secs(5),
            max_grant_ttl: Duration::from_secs(60),
            max_wait: Duration::from_secs(60),
            heartbeat_interval: Duration::from_millis(500),
            suspect_after: Duration::from_secs(3),
            drop_after: Duration::from_secs(600),
            max_block_size: ByteSize(Length::MAX_BLOCK.0),
            max_batch_keys: 16_384,
            max_waiting: ByteSize::gib(1),
            max_namespaces: 65_536,
            max_connections: 8192,
            store_cache: ByteSize::mib(2),
            ready_file: None,
            log_format: Default::default(),
        }
    }
}

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{setting}: {problem}")]
pub struct InvalidSetting {
    setting: &'static str,
    problem: String,
}

impl Config {
    /// Checks what no single field's type can.
    pub fn validate(&self) -> Result<(), InvalidSetting> {
        let invalid = |setting, problem: String| Err(InvalidSetting { setting, problem });
        let high = self.eviction_high_watermark_ratio;
        if !(high > 0.0 && high <= 1.0) {
            return invalid(
                "eviction_high_watermark_ratio",
                format!("{high} is not above 0 and at most 1"),
            );
        }
        let ratio = self.eviction_ratio;
        if !(ratio >= 0.0 && ratio < high) {
            return invalid(
                "eviction_ratio",
                format!("{ratio} is not between 0 and the high watermark {high}"),
            );
        }
        let times = [
            ("lease_ttl", self.lease_ttl),
            ("max_grant_ttl", self.max_grant_ttl),
            ("heartbeat_interval", self.heartbeat_interval),
        ];
        for (setting, time) in times {
            if time < Duration::from_millis(10) {
                return invalid(setting, format!("{} is shorter than 10ms", shown(time)));
            }
        }
        let (suspect_after, heartbeat) = (self.suspect_after, self.heartbeat_interval);
        if heartbeat
            .checked_mul(2)
            .is_none_or(|two| suspect_after < two)
        {
            return invalid(
                "suspect_after",
                format!(
                    "{} is shorter than two heartbeat intervals of {}",
                    shown(suspect_after),
                    shown(heartbeat)
                ),
            );
        }
        if self.drop_after < suspect_after {
            return invalid(
                "drop_after",
                format!(
                    "{} is shorter than suspect_after, which is {}",
                    shown(self.drop_after),
                    shown(suspect_after)
                ),
            );
        }
        let largest = self.max_block_size.as_u64();
        if largest == 0 || largest > Length::MAX_BLOCK.0 {
            return invalid(
                "max_block_size",
                format!("{largest} bytes is not between 1 byte and 1 GiB"),
            );
        }
        if self.leader_ttl < Duration::from_secs(2) {
            return invalid(
                "leader_ttl",
                format!(
                    "{} is shorter than 2s, the least that etcd keeps",
                    shown(self.leader_ttl)
                ),
            );
        }
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if self.cluster.is_empty() || !self.cluster.chars().all(is_name) {
            return invalid(
                "cluster",
                format!("{:?} is not made of letters, digits, - _ .", self.cluster),
            );
        }
        if self.etcd_password_file.is_some() && self.etcd_user.is_empty() {
            return invalid("etcd_password_file", "requires etcd_user".into());
        }
        if self.etcd_cert.is_some() != self.etcd_key.is_some() {
            let (given, missing) = match self.etcd_cert {
                Some(_) => ("etcd_cert", "etcd_key"),
                None => ("etcd_key", "etcd_cert"),
            };
            return invalid(given, format!("given without {missing}: they go together"));
        }
        if self.etcd_ca.is_none()
            && (self.etcd_cert.is_some() || self.etcd.iter().any(|e| e.starts_with("https:")))
        {
            return invalid(
                "etcd_ca",
                "required to verify etcd's certificate: name the CA file".into(),
            );
        }
        if self.max_batch_keys == 0 {
            return invalid("max_batch_keys", "must be at least 1".into());
        }
        if self.max_waiting < LEAST_WAITING {
            return invalid(
                "max_waiting",
                format!(
                    "{} is less than {LEAST_WAITING}, the most that one call may hold",
                    self.max_waiting
                ),
            );
        }
        if self.max_connections == 0 {
            return invalid("max_connections", "0 would refuse every connection".into());
        }
        Ok(())
    }
}

/// A time as it is written in a configuration.
fn shown(time: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_another_one_rules_out_is_told_with_both_values() {
        let said = |spoil: fn(&mut Config)| {
            let mut config = Config::default();
            spoil(&mut config);
            config.validate().unwrap_err().to_string()
        };
        let second = Duration::from_secs(1);
        for (text, spoil) in [
            (
                "suspect_after: 600ms is shorter than two heartbeat intervals of 500ms",
                (|c| c.suspect_after = Duration::from_millis(600)) as fn(&mut Config),
            ),
            (
                "drop_after: 2s is shorter than suspect_after, which is 3s",
                |c| c.drop_after = Duration::from_secs(2),
            ),
            ("lease_ttl: 1ms is shorter than 10ms", |c| {
                c.lease_ttl = Duration::from_millis(1)
            }),
            (
                "leader_ttl: 1s is shorter than 2s, the least that etcd keeps",
                |c| c.leader_ttl = Duration::from_secs(1),
            ),
            ("etcd_key: given without etcd_cert: they go together", |c| {
                c.etcd_key = Some("key".into())
            }),
            (
                "eviction_ratio: 0.96 is not between 0 and the high watermark 0.95",
                |c| c.eviction_ratio = 0.96,
            ),
        ] {
            assert_eq!(said(spoil), text);
        }
        // No sum of times is too large to be judged.
        let config = Config {
            heartbeat_interval: Duration::MAX,
            suspect_after: second,
            ..Config::default()
        };
        assert!(config.validate().is_err());
    }

    #[test]
    fn defaults_are_valid_and_bad_settings_are_named() {
        Config::default().validate().unwrap();
        type Spoil = fn(&mut Config);
        let cases: [(&str, Spoil); 7] = [
            ("eviction_high_watermark_ratio", |c| {
                c.eviction_high_watermark_ratio = 1.5
            }),
            ("eviction_ratio", |c| c.eviction_ratio = 0.96),
            ("lease_ttl", |c| c.lease_ttl = Duration::ZERO),
            ("suspect_after", |c| {
                c.suspect_after = Duration::from_millis(600)
            }),
            ("max_connections", |c| c.max_connections = 0),
            ("max_block_size", |c| {
                c.max_block_size = ByteSize(Length::MAX_BLOCK.0 + 1);
            }),
            ("etcd_password_file", |c| {
                c.etcd_password_file = Some("password".into())
            }),
        ];
        for (setting, spoil) in cases {
            let mut config = Config::default();
            spoil(&mut config);
            let error = config.validate().unwrap_err().to_string();
            assert!(error.starts_with(setting), "{error}");
        }
    }

    #[test]
    fn sizes_are_printed_without_loss() {
        let config = Config {
            max_block_size: ByteSize::kib(1_500_001),
            store_cache: ByteSize(1_234_567),
            ..Config::default()
        };
        let text = serde_json::to_string(&config).unwrap();
        let back: Config = serde_json::from_str(&text).unwrap();
        assert_eq!(back.max_block_size, config.max_block_size);
        assert_eq!(back.store_cache, config.store_cache);
    }
}
