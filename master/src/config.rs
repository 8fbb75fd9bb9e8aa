//! The settings of a kvmaster and their defaults.

use crate::directory::Policy;
use bytesize::ByteSize;
use kvpool_auth::AuthSettings;
use kvpool_daemon::config::exact;
use kvpool_daemon::http_guard::HttpOpen;
use kvpool_tls::{ClientAuth, Version};
use kvpool_types::Length;
use serde::{Deserialize, Deserializer, Serialize, de};
use std::path::PathBuf;
use std::time::Duration;

/// The smallest [`Config::max_waiting`]: room for two of the largest messages.
const LEAST_WAITING: ByteSize = ByteSize::mib(16);

/// The settings of one kvmaster. Every field has a flag, an environment variable (`KVMASTER_` and
/// its name) and a key in the configuration file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `host:port` that serves clients and nodes, over gRPC and frames.
    pub listen: String,
    /// `host:port` that serves `/metrics`, `/healthz`, `/readyz` and the JSON views.
    pub http_listen: String,
    /// `host:port` or `host` of `listen` for other machines. The default is the bound address, or
    /// none if `listen` is every interface.
    pub advertise: Option<String>,
    /// The directory of the embedded metadata store.
    pub data_dir: PathBuf,
    /// Whether to set aside a damaged store in `data_dir` and begin an empty pool.
    pub accept_empty_store: bool,
    /// The etcd servers, each `http://host:port`. Without servers, the metadata store is the
    /// embedded one.
    #[serde(deserialize_with = "etcd_servers")]
    pub etcd: Vec<String>,
    /// The name of the pool in etcd's keys.
    pub cluster: String,
    /// The etcd user; empty for none.
    pub etcd_user: String,
    /// The file with the etcd user's password.
    pub etcd_password_file: Option<PathBuf>,
    /// The CA certificates that verify etcd's certificate, PEM; for `https://` servers.
    pub etcd_ca: Option<PathBuf>,
    /// The client certificate for etcd, PEM.
    pub etcd_cert: Option<PathBuf>,
    /// The private key of `etcd_cert`, PEM.
    pub etcd_key: Option<PathBuf>,
    /// Leader lease TTL in etcd: without a renewal for this long, another master may lead.
    #[serde(with = "humantime_serde")]
    pub leader_ttl: Duration,
    /// Whether the leader compacts etcd's history and defragments its files. Both act on the whole
    /// etcd, so do not use it when other applications share the etcd.
    pub etcd_compact: bool,
    /// The public keys that verify tokens: a JWKS file. Without it no caller needs a token.
    pub auth_jwks: Option<PathBuf>,
    /// The issuer of tokens: their claim `iss`.
    pub auth_issuer: String,
    /// The audience of tokens: one of their claim `aud`.
    pub auth_audience: String,
    /// The policy that gives roles to tokens: a TOML file.
    pub auth_policy: Option<PathBuf>,
    /// The HTTP paths that need no token.
    pub auth_http_open: Vec<HttpOpen>,
    /// When to answer a commit.
    pub commit_ack: CommitAck,
    /// The high watermark: the largest share of a segment that may be used.
    pub eviction_high_watermark_ratio: f64,
    /// The reserve below the high watermark, as a share of the pool. A round begins when less than
    /// half of the reserve is free, and ends when all of it is.
    pub eviction_ratio: f64,
    /// The eviction order.
    pub eviction_policy: Policy,
    /// The lease TTL: how long a lease protects a block against eviction.
    #[serde(with = "humantime_serde")]
    pub lease_ttl: Duration,
    /// The longest time that a put may take to write its bytes.
    #[serde(with = "humantime_serde")]
    pub max_grant_ttl: Duration,
    /// The longest time that a put may wait for room.
    #[serde(with = "humantime_serde")]
    pub max_wait: Duration,
    /// The interval between a node's heartbeats.
    #[serde(with = "humantime_serde")]
    pub heartbeat_interval: Duration,
    /// A node silent for this long is suspect: clients and placement avoid it, and its blocks stay.
    #[serde(with = "humantime_serde")]
    pub suspect_after: Duration,
    /// A node silent for this long is dropped with its blocks.
    #[serde(with = "humantime_serde")]
    pub drop_after: Duration,
    /// A medium absent for this long is dropped with the copies on it.
    #[serde(with = "humantime_serde")]
    pub ssd_drop_after: Duration,
    /// The largest block, at most 1 GiB, which one frame of the data port can carry.
    #[serde(with = "exact::size")]
    pub max_block_size: ByteSize,
    /// The most keys in one request.
    pub max_batch_keys: u32,
    /// The memory of commits that wait for room or durability. Other waiting calls get the same
    /// amount.
    #[serde(with = "exact::size")]
    pub max_waiting: ByteSize,
    /// The bytes a second that a node may send to other nodes for copies and moves of replicas; zero for
    /// no limit.
    #[serde(with = "exact::size")]
    pub replica_bandwidth: ByteSize,
    /// The bytes a second that one replica of a block should serve. A block that is looked up
    /// faster gets further replicas. With zero no block does.
    #[serde(with = "exact::size")]
    pub hot_rate: ByteSize,
    /// The most bytes of the further replicas of all hot blocks.
    #[serde(with = "exact::size")]
    pub hot_budget: ByteSize,
    /// The most namespaces.
    pub max_namespaces: u32,
    /// The most connections of clients and nodes, over frames and gRPC together. A framed
    /// connection has a thread. Callers before their hello do not count.
    pub max_connections: usize,
    /// The memory for the one-time migration of a store of format 1.
    #[serde(with = "exact::size")]
    pub store_cache: ByteSize,
    /// The certificate of every port, PEM. Without one the ports are plain.
    pub tls_cert: Option<PathBuf>,
    /// The private key of `tls_cert`, PEM.
    pub tls_key: Option<PathBuf>,
    /// The authorities of the pool's certificates, PEM.
    pub tls_ca: Option<PathBuf>,
    /// Which callers need a certificate. The default with `tls_cert` and `tls_ca` is daemons,
    /// otherwise none.
    pub tls_client_auth: Option<ClientAuth>,
    /// The name that the certificates of called daemons must have, instead of the called host.
    pub tls_server_name: Option<String>,
    /// The oldest version of TLS.
    pub tls_min_version: Version,
    /// Whether ports may be open to other hosts without TLS and without tokens.
    pub insecure: bool,
    /// The file that gets the addresses as JSON, once the master serves.
    pub ready_file: Option<PathBuf>,
    /// The format of log lines.
    pub log_format: kvpool_daemon::telemetry::LogFormat,
    /// The URL of the OpenTelemetry collector that gets the master's spans.
    pub otlp_endpoint: Option<String>,
}

/// When to answer a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CommitAck {
    /// When its record is on stable storage, so that it survives a crash.
    Durable,
    /// At once. A crash may lose the commits of about the last 50 ms. While the store stalls, it
    /// may lose up to two groups of the log (about 16,384 records or 1 MiB each).
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
            auth_jwks: None,
            auth_issuer: String::new(),
            auth_audience: AuthSettings::DEFAULT_AUDIENCE.into(),
            auth_policy: None,
            auth_http_open: HttpOpen::DEFAULT.to_vec(),
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
            ssd_drop_after: Duration::from_secs(24 * 3600),
            max_block_size: ByteSize(Length::MAX_BLOCK.0),
            max_batch_keys: 16_384,
            max_waiting: ByteSize::gib(1),
            replica_bandwidth: ByteSize(0),
            hot_rate: ByteSize(0),
            hot_budget: ByteSize::gib(1),
            max_namespaces: 65_536,
            max_connections: 8192,
            store_cache: ByteSize::mib(2),
            tls_cert: None,
            tls_key: None,
            tls_ca: None,
            tls_client_auth: None,
            tls_server_name: None,
            tls_min_version: Version::Tls13,
            insecure: false,
            ready_file: None,
            log_format: Default::default(),
            otlp_endpoint: None,
        }
    }
}

/// Why settings are unusable.
#[derive(Debug, thiserror::Error)]
#[error("{setting}: {problem}")]
pub struct InvalidSetting {
    setting: &'static str,
    problem: String,
}

impl Config {
    /// The settings of TLS.
    pub fn tls(&self) -> kvpool_daemon::tls::Settings {
        kvpool_daemon::tls::Settings {
            cert: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            ca: self.tls_ca.clone(),
            client_auth: self.tls_client_auth,
            server_name: self.tls_server_name.clone(),
            min_version: self.tls_min_version,
        }
    }

    /// Checks the rules that involve several fields, or that a field's type cannot express.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting`] names the setting, and says what is wrong and what to change.
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
        self.auth()?;
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

    /// The settings of tokens; `None` while tokens are off.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting`] when only some of the settings of tokens are set.
    pub fn auth(&self) -> Result<Option<AuthSettings>, InvalidSetting> {
        let (jwks, policy) = (self.auth_jwks.as_ref(), self.auth_policy.as_ref());
        AuthSettings::from_parts(jwks, &self.auth_issuer, &self.auth_audience, policy)
            .map_err(|(setting, problem)| InvalidSetting { setting, problem })
    }
}

/// Reads the etcd servers. A password in a URL would be in the log and in the output of `--print-config`, so it is
/// refused, and the message does not repeat it.
fn etcd_servers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let servers = Vec::<String>::deserialize(deserializer)?;
    if servers.iter().any(|server| server.contains('@')) {
        return Err(de::Error::custom(
            "a URL names a user or a password: name the user with etcd_user (--etcd-user), and the file of the \
             password with etcd_password_file (--etcd-password-file)",
        ));
    }
    Ok(servers)
}

/// A duration in the form of a configuration file.
fn shown(time: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicting_settings_are_reported_with_both_values() {
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
        // The sum of any durations can be checked without overflow.
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
    fn a_password_in_an_etcd_url_is_refused_and_not_repeated() {
        let read = |server: &str| {
            let text = serde_json::json!({ "etcd": [server] }).to_string();
            serde_json::from_str::<Config>(&text)
        };
        let plain = read("http://[::1]:2379").unwrap();
        assert_eq!(plain.etcd, ["http://[::1]:2379"]);
        let refused = read("http://root:abracadabra@a:2379").unwrap_err();
        let refused = refused.to_string();
        for option in ["--etcd-user", "--etcd-password-file"] {
            assert!(refused.contains(option), "{refused}");
        }
        assert!(!refused.contains("abracadabra"), "{refused}");
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
