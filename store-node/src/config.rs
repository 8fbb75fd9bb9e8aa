//! The settings of a kvstore-node, with their defaults and checks.

use crate::media::SsdConfig;
use bytesize::ByteSize;
use kvpool_auth::AuthSettings;
use kvpool_daemon::config::exact;
use kvpool_daemon::http_guard::HttpOpen;
use kvpool_daemon::telemetry::LogFormat;
use kvpool_etcd::discover::{default_masters, parse_masters};
use kvpool_tls::{ClientAuth, Version};
use kvpool_transport::rdma::RdmaOptions;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The longest path of a Unix socket in bytes, without the terminating zero.
const MAX_SOCKET_PATH: usize = 107;
/// Every segment is a multiple of this length in bytes: a page.
const PAGE: u64 = 4096;
/// Every segment in hugepages is a multiple of this length in bytes.
const HUGEPAGE: u64 = 2 << 20;

/// The settings of one kvstore-node. Every field has a flag, an environment variable
/// (`KVSTORE_NODE_` and its name) and a place in the configuration file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The addresses at which kvmasters serve gRPC, as `host:port` or `http://host:port`. Or the etcd key
    /// under which they are announced, as `etcd://host:port[,host:port...]/cluster`. The node keeps a session
    /// with the leader. The default is the value of the environment variable `KVPOOL_MASTER`.
    pub master: Vec<String>,
    /// The file with the node's token, which is read again when it changes.
    pub token_file: Option<PathBuf>,
    /// The node's name, the same in all its incarnations; empty for host name and data port.
    pub name: String,
    /// The sizes of the memory segments that the node contributes.
    #[serde(with = "exact::sizes")]
    pub segment: Vec<ByteSize>,
    /// The disks, partitions or files that keep blocks which leave memory, each as
    /// `path=PATH[,size=SIZE][,reset]` or `dir=DIRECTORY[,size=SIZE]`, split at the commas.
    pub ssd: Vec<String>,
    /// Whether the segments use 2 MiB pages that the host has reserved.
    pub hugepages: bool,
    /// The listening address of the data port, `host:port`.
    pub listen: String,
    /// The address that the node advertises to others, `host:port` or `host`; empty for the listening
    /// address.
    pub advertise: String,
    /// The listening address for `/metrics`, `/healthz` and `/readyz`, `host:port`.
    pub http_listen: String,
    /// The Unix socket over which processes of this host map the memory. Empty for
    /// `$XDG_RUNTIME_DIR/kvpool/NAME.sock`, or `/tmp/kvpool-UID/NAME.sock`.
    pub shm_path: PathBuf,
    /// Whether to serve no shared memory.
    pub no_shm: bool,
    /// Whether to serve no RDMA, even with a device.
    pub no_rdma: bool,
    /// The RDMA devices to serve over, as `name` or `name:port`. Empty for every active port, if there is
    /// any. A named device must exist.
    pub rdma_device: Vec<String>,
    /// The index into the ports' GID tables; `None` chooses by type, RoCE v2 first.
    pub rdma_gid_index: Option<u8>,
    /// The path MTU of RDMA in bytes; `None` takes the port's.
    pub rdma_mtu: Option<u32>,
    /// The traffic class of RDMA.
    pub rdma_traffic_class: u8,
    /// The share of the node's memory that one client may hold by views and by writes through shared memory.
    /// One larger block is allowed.
    pub max_held_ratio: f64,
    /// The most data connections at once.
    pub max_connections: usize,
    /// Which callers may access the memory directly, over shared memory or RDMA.
    pub isolation: Isolation,
    /// The public keys that verify tokens, a JWKS file. Without it no caller needs a token.
    pub auth_jwks: Option<PathBuf>,
    /// The issuer of tokens, as in their claim `iss`.
    pub auth_issuer: String,
    /// The audience of tokens, which must be in their claim `aud`.
    pub auth_audience: String,
    /// The policy that maps tokens to roles, a TOML file.
    pub auth_policy: Option<PathBuf>,
    /// The HTTP paths that need no token.
    pub auth_http_open: Vec<HttpOpen>,
    /// How long work in progress may continue after SIGTERM.
    #[serde(with = "humantime_serde")]
    pub drain_timeout: Duration,
    /// How long a stopping node may copy blocks from its memory to its media.
    #[serde(with = "humantime_serde")]
    pub ssd_drain_timeout: Duration,
    /// How long a stopping node may have its blocks moved to other nodes; zero disables it.
    #[serde(with = "humantime_serde")]
    pub move_drain_timeout: Duration,
    /// The certificate of every port, PEM. Without one the ports are plain.
    pub tls_cert: Option<PathBuf>,
    /// The private key of `tls_cert`, PEM.
    pub tls_key: Option<PathBuf>,
    /// The authorities of the pool's certificates, PEM.
    pub tls_ca: Option<PathBuf>,
    /// Which callers need a certificate. The default is daemons with `tls_cert` and `tls_ca`, else none.
    pub tls_client_auth: Option<ClientAuth>,
    /// The name that the certificates of called daemons must have, instead of the called host.
    pub tls_server_name: Option<String>,
    /// The oldest version of TLS.
    pub tls_min_version: Version,
    /// Whether ports may be open to other hosts without TLS and without tokens.
    pub insecure: bool,
    /// The file to which the node writes its addresses as JSON, once it serves.
    pub ready_file: Option<PathBuf>,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// The URL of the OpenTelemetry collector that gets the node's spans.
    pub otlp_endpoint: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            master: default_masters(),
            token_file: None,
            name: String::new(),
            segment: Vec::new(),
            ssd: Vec::new(),
            hugepages: false,
            listen: "127.0.0.1:7072".into(),
            advertise: String::new(),
            http_listen: "127.0.0.1:7073".into(),
            shm_path: PathBuf::new(),
            no_shm: false,
            no_rdma: false,
            rdma_device: Vec::new(),
            rdma_gid_index: None,
            rdma_mtu: None,
            rdma_traffic_class: 0,
            max_held_ratio: 0.25,
            max_connections: 1024,
            isolation: Isolation::Shared,
            auth_jwks: None,
            auth_issuer: String::new(),
            auth_audience: AuthSettings::DEFAULT_AUDIENCE.into(),
            auth_policy: None,
            auth_http_open: HttpOpen::DEFAULT.to_vec(),
            drain_timeout: Duration::from_secs(10),
            ssd_drain_timeout: Duration::from_secs(30),
            move_drain_timeout: Duration::ZERO,
            tls_cert: None,
            tls_key: None,
            tls_ca: None,
            tls_client_auth: None,
            tls_server_name: None,
            tls_min_version: Version::Tls13,
            insecure: false,
            ready_file: None,
            log_format: LogFormat::default(),
            otlp_endpoint: None,
        }
    }
}

/// Which callers may access the memory of a node directly. A caller that maps a segment, or has its RDMA
/// registration, can access every block in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// Every caller.
    #[default]
    Shared,
    /// Callers that may write in every namespace. The others use TCP.
    Strict,
}

/// Why the settings cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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

    /// Checks the rules that the type of a single field cannot express.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting`] names the setting, and says what is wrong and what to change.
    pub fn validate(&self) -> Result<(), InvalidSetting> {
        self.check_segments()?;
        self.media()?;
        self.masters()?;
        if self.auth()?.is_none() && self.isolation == Isolation::Strict {
            return invalid(
                "isolation",
                "strict needs tokens, which say who a caller is: set auth_jwks, auth_issuer and auth_policy",
            );
        }
        if !self.name.is_empty() {
            check_name(&self.name)?;
        }
        if !self.no_shm {
            check_socket_path(&self.shm_path)?;
        }
        let ratio = self.max_held_ratio;
        if !(ratio > 0.0 && ratio <= 1.0) {
            return invalid(
                "max_held_ratio",
                format!("{ratio}: the ratio must be above 0 and at most 1"),
            );
        }
        if self.no_rdma && !self.rdma_device.is_empty() {
            return invalid(
                "rdma_device",
                "no_rdma switches RDMA off: remove one of the two settings",
            );
        }
        self.rdma_options()
            .validate()
            .map_err(|error| InvalidSetting {
                setting: "rdma",
                problem: error.to_string(),
            })?;
        if self.max_connections == 0 {
            return invalid(
                "max_connections",
                "0 would refuse every connection: set 1 or more",
            );
        }
        Ok(())
    }

    /// The settings of tokens; `None` while tokens are off.
    pub(crate) fn auth(&self) -> Result<Option<AuthSettings>, InvalidSetting> {
        let (jwks, policy) = (self.auth_jwks.as_ref(), self.auth_policy.as_ref());
        AuthSettings::from_parts(jwks, &self.auth_issuer, &self.auth_audience, policy)
            .map_err(|(setting, problem)| InvalidSetting { setting, problem })
    }

    /// The settings of RDMA.
    pub(crate) fn rdma_options(&self) -> RdmaOptions {
        RdmaOptions {
            devices: self.rdma_device.clone(),
            gid_index: self.rdma_gid_index,
            mtu: self.rdma_mtu,
            traffic_class: self.rdma_traffic_class,
            ..RdmaOptions::default()
        }
    }

    /// The media of `ssd`.
    pub(crate) fn media(&self) -> Result<Vec<SsdConfig>, InvalidSetting> {
        SsdConfig::parse(&self.ssd).map_err(|bad| InvalidSetting {
            setting: "ssd",
            problem: bad.to_string(),
        })
    }

    fn check_segments(&self) -> Result<(), InvalidSetting> {
        if self.segment.is_empty() {
            return invalid(
                "segment",
                "a node needs at least one segment of memory: pass for example --segment 8GiB",
            );
        }
        let (unit, what) = if self.hugepages {
            (HUGEPAGE, "the size of a hugepage")
        } else {
            (PAGE, "the size of a page")
        };
        for size in &self.segment {
            if size.0 == 0 || !size.0.is_multiple_of(unit) {
                return invalid(
                    "segment",
                    format!(
                        "{} bytes: a segment is a positive multiple of {unit} bytes, {what}",
                        size.0
                    ),
                );
            }
        }
        let total = self
            .segment
            .iter()
            .try_fold(0u64, |sum, size| sum.checked_add(size.0));
        if total.is_none() {
            return invalid("segment", "all segments together exceed 2^64 bytes");
        }
        Ok(())
    }

    /// The masters' addresses in the form in which the node calls them.
    pub(crate) fn masters(&self) -> Result<Vec<String>, InvalidSetting> {
        let bad = |problem: String| InvalidSetting {
            setting: "master",
            problem,
        };
        if self.master.is_empty() {
            return Err(bad(
                "a node needs at least one kvmaster to register with".to_owned()
            ));
        }
        parse_masters(&self.master).map_err(|error| bad(error.to_string()))
    }
}

/// The name of a node without a configured name.
pub(crate) fn default_name(port: u16) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "node",
        host => host,
    };
    format!("{host}-{port}")
}

/// The path of the Unix socket of a node without a configured path.
pub(crate) fn default_socket(name: &str) -> PathBuf {
    let directory = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(directory) if !directory.is_empty() => Path::new(&directory).join("kvpool"),
        _ => PathBuf::from(format!(
            "/tmp/kvpool-{}",
            rustix::process::getuid().as_raw()
        )),
    };
    directory.join(format!("{name}.sock"))
}

/// Checks a name, since names go into file names, labels and log lines.
fn check_name(name: &str) -> Result<(), InvalidSetting> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    if name.len() > 64 || name.starts_with('.') || !name.chars().all(fits) {
        return invalid(
            "name",
            format!(
                "`{name}`: a name has 1 to 64 letters, digits, `-`, `_`, `.` or `:`, and does not start with `.`"
            ),
        );
    }
    Ok(())
}

pub(crate) fn check_socket_path(path: &Path) -> Result<(), InvalidSetting> {
    let bytes = path.as_os_str().len();
    if bytes > MAX_SOCKET_PATH {
        return invalid(
            "shm_path",
            format!(
                "{}: the path of a socket has at most {MAX_SOCKET_PATH} bytes, this one has {bytes}",
                path.display()
            ),
        );
    }
    Ok(())
}

fn invalid(setting: &'static str, problem: impl Into<String>) -> Result<(), InvalidSetting> {
    let problem = problem.into();
    Err(InvalidSetting { setting, problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Config {
        Config {
            segment: vec![ByteSize::mib(64), ByteSize(12_288)],
            ..Config::default()
        }
    }

    /// The setting that is complained of.
    fn complaint(change: impl FnOnce(&mut Config)) -> (&'static str, String) {
        let mut config = good();
        change(&mut config);
        let error = config.validate().unwrap_err();
        (error.setting, error.to_string())
    }

    #[test]
    fn each_bad_setting_is_named() {
        good().validate().unwrap();
        let announced = "etcd://h:2379,[::1]:2379/pool-1".to_owned();
        let master = vec![announced.clone(), "h:7070".to_owned()];
        let several = Config { master, ..good() };
        several.validate().unwrap();
        assert_eq!(
            several.masters().unwrap(),
            [announced, "http://h:7070".to_owned()]
        );
        let (setting, text) = complaint(|c| c.segment.clear());
        assert_eq!(setting, "segment");
        assert!(text.contains("--segment 8GiB"), "{text}");
        for size in [0, 1, 4097] {
            assert_eq!(complaint(|c| c.segment.push(ByteSize(size))).0, "segment");
        }
        assert_eq!(complaint(|c| c.hugepages = true).0, "segment");
        let huge = u64::MAX - 4095;
        assert_eq!(
            complaint(|c| c.segment = vec![ByteSize(huge); 2]).0,
            "segment"
        );
        assert_eq!(complaint(|c| c.master.clear()).0, "master");
        for master in [
            "127.0.0.1",
            "https://",
            "http://",
            "http://:7070",
            "http://a b",
            "etcd://h:1",
            "etcd://h/pool",
        ] {
            assert_eq!(
                complaint(|c| c.master = vec![master.into()]).0,
                "master",
                "{master}"
            );
        }
        let name = "10.0.0.1:4000".to_owned();
        Config { name, ..good() }.validate().unwrap();
        for name in ["a b", "../x", ".x", "a/b"] {
            assert_eq!(complaint(|c| c.name = name.into()).0, "name", "{name}");
        }
        let long = "x".repeat(108);
        assert_eq!(complaint(|c| c.shm_path = long.into()).0, "shm_path");
        for ratio in [0.0, -1.0, 1.1, f64::NAN] {
            assert_eq!(complaint(|c| c.max_held_ratio = ratio).0, "max_held_ratio");
        }
        assert_eq!(complaint(|c| c.max_connections = 0).0, "max_connections");
    }

    #[test]
    fn several_masters_are_given_with_commas() {
        let flags = [
            "kvstore-node",
            "--segment=64MiB,12KiB",
            "--master=http://a:1,http://b:1",
            "--master=etcd://c:1,d:1/pool",
        ];
        let flags = <crate::Flags as clap::Parser>::parse_from(flags);
        let config: Config = kvpool_daemon::load(None, "NOBODYS_", &flags).unwrap();
        config.validate().unwrap();
        let masters = ["http://a:1", "http://b:1", "etcd://c:1,d:1/pool"];
        assert_eq!(config.master, masters);
        assert_eq!(config.segment, good().segment);
    }

    #[test]
    fn sizes_are_printed_without_loss() {
        let text = serde_json::to_string(&good()).unwrap();
        assert!(text.contains(r#"["64MiB","12KiB"]"#), "{text}");
        let back: Config = serde_json::from_str(&text).unwrap();
        assert_eq!(back.segment, good().segment);
        let odd = Config {
            segment: vec![ByteSize(1_234_567_891)],
            ..good()
        };
        let back: Config = serde_json::from_str(&serde_json::to_string(&odd).unwrap()).unwrap();
        assert_eq!(back.segment, odd.segment);
    }
}
