//! The client's side: the authorities that it trusts, and the certificate that it presents.

use crate::error::TlsError;
use crate::reload::Reloaded;
use crate::server::Version;
use crate::{ALPN_FRAMES, ALPN_GRPC, PLAIN_SCHEME, pem, provider};
use rustls::ClientConfig;
use rustls::client::Resumption;
use rustls::pki_types::ServerName;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// The files and names of a client. Without an authority there is no TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientFiles {
    /// The authorities of servers, PEM. The system's authorities are not trusted.
    pub ca: Option<PathBuf>,
    /// The certificate to present, PEM; only with a key.
    pub cert: Option<PathBuf>,
    /// Its private key, PEM.
    pub key: Option<PathBuf>,
    /// The name that every server's certificate must have, instead of the host that is called.
    pub server_name: Option<String>,
    /// The oldest version.
    pub min_version: Version,
    /// Why these settings cannot be used: the environment names an unknown version. [`ClientTls::open`] returns it as
    /// an error.
    pub problem: Option<String>,
}

impl ClientFiles {
    /// The settings of the environment: `KVPOOL_TLS_CA`, `KVPOOL_TLS_CERT`, `KVPOOL_TLS_KEY`,
    /// `KVPOOL_TLS_SERVER_NAME` and `KVPOOL_TLS_MIN_VERSION`. An empty variable counts as not set.
    pub fn from_environment() -> Self {
        Self::named_by(|name| std::env::var(name).ok())
    }

    fn named_by(variable: impl Fn(&str) -> Option<String>) -> Self {
        let text = |name: &str| {
            let value = variable(&format!("KVPOOL_TLS_{name}"));
            value.filter(|value| !value.is_empty())
        };
        let version = text("MIN_VERSION").map(|version| version.parse());
        let (min_version, problem) = match version {
            None => (Version::default(), None),
            Some(Ok(version)) => (version, None),
            Some(Err(why)) => (
                Version::default(),
                Some(format!("KVPOOL_TLS_MIN_VERSION: {why}")),
            ),
        };
        Self {
            ca: text("CA").map(PathBuf::from),
            cert: text("CERT").map(PathBuf::from),
            key: text("KEY").map(PathBuf::from),
            server_name: text("SERVER_NAME"),
            min_version,
            problem,
        }
    }
}

/// See the module's documentation. Cheap to clone.
#[derive(Clone)]
pub struct ClientTls {
    configs: Arc<Reloaded<Configs>>,
    server_name: Option<ServerName<'static>>,
    /// Whether plain addresses that a master or etcd names are refused.
    refuses_plain: bool,
}

struct Configs {
    grpc: Arc<ClientConfig>,
    frames: Arc<ClientConfig>,
}

impl std::fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ClientTls({:?})", self.server_name)
    }
}

impl ClientTls {
    /// Reads the files; `None` where no authority is named.
    ///
    /// # Errors
    ///
    /// A file or a setting cannot be used.
    pub fn open(files: &ClientFiles) -> Result<Option<Self>, TlsError> {
        if let Some(problem) = &files.problem {
            return Err(TlsError::BadSetting(problem.clone()));
        }
        let Some(ca) = files.ca.clone() else {
            return Ok(None);
        };
        if files.cert.is_some() != files.key.is_some() {
            return Err(TlsError::Incomplete(
                "a TLS certificate and its private key go together: name both, or none",
            ));
        }
        let server_name = files.server_name.as_deref().map(server_name).transpose()?;
        if let Some(key) = &files.key {
            pem::warn_if_readable(key);
        }
        let watched = [Some(ca.clone()), files.cert.clone(), files.key.clone()];
        let watched = watched.into_iter().flatten().collect();
        let files = files.clone();
        let configs = Reloaded::open(watched, move || {
            let new = ClientFiles {
                min_version: Version::Tls13,
                ..files.clone()
            };
            let mut frames = config(&new, &ca, ALPN_FRAMES)?;
            // A session seals its own records.
            frames.enable_secret_extraction = true;
            Ok(Configs {
                grpc: config(&files, &ca, ALPN_GRPC)?.into(),
                frames: frames.into(),
            })
        })?;
        Ok(Some(Self {
            configs: Arc::new(configs),
            server_name,
            refuses_plain: false,
        }))
    }

    /// The same TLS for a caller with these configured addresses of masters. If none of them begins with `http://`,
    /// plain addresses that a master or etcd names later are refused. A caller configured for TLS must not send its
    /// token unencrypted.
    #[must_use]
    pub fn among(self, given: &[impl AsRef<str>]) -> Self {
        let is_plain = |address: &&_| AsRef::<str>::as_ref(*address).starts_with(PLAIN_SCHEME);
        Self {
            refuses_plain: !given.iter().any(|address| is_plain(&address)),
            ..self
        }
    }

    /// Whether a master may not be called at a plain address.
    pub const fn refuses_plain(&self) -> bool {
        self.refuses_plain
    }

    /// Whether the plain data port at `HOST:PORT` may not be called. A port of this host may: its bytes cross no
    /// network.
    pub fn refuses_plain_data(&self, authority: &str) -> bool {
        self.refuses_plain && !is_loopback(authority)
    }

    /// The configuration of the next handshake for gRPC.
    pub fn grpc(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.configs.get().grpc)
    }

    /// The configuration of the next handshake for frames. Frames use TLS 1.3 only.
    pub fn frames(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.configs.get().frames)
    }

    /// Checks the files once a second, also without handshakes, as long as this value lives.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub fn keep_looking(&self) -> std::io::Result<()> {
        self.configs.keep_looking()
    }

    /// Why the files could not be used at the last check; `None` if they could.
    pub fn failure(&self) -> Option<String> {
        self.configs.failure()
    }

    /// The name that the certificate of the server at `HOST:PORT` must have.
    pub fn name_of(&self, authority: &str) -> Result<ServerName<'static>, TlsError> {
        if let Some(name) = &self.server_name {
            return Ok(name.clone());
        }
        server_name(host_of(authority))
    }
}

/// The host of `HOST:PORT`, without the brackets of an IPv6 address.
fn host_of(authority: &str) -> &str {
    let host = authority
        .rsplit_once(':')
        .map_or(authority, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

fn is_loopback(authority: &str) -> bool {
    let host = host_of(authority);
    let address = host.parse::<IpAddr>();
    address.map_or(host == "localhost", |address| address.is_loopback())
}

fn server_name(name: &str) -> Result<ServerName<'static>, TlsError> {
    ServerName::try_from(name.to_owned()).map_err(|_| TlsError::BadName(name.to_owned()))
}

fn config(
    files: &ClientFiles,
    ca: &std::path::Path,
    alpn: &[u8],
) -> Result<ClientConfig, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(files.min_version.spoken())
        .map_err(|error| TlsError::BadPair(error.to_string()))?
        .with_root_certificates(pem::roots(ca)?);
    let mut config = match (&files.cert, &files.key) {
        (Some(cert), Some(key)) => builder
            .with_client_auth_cert(pem::certificates(cert)?, pem::key(key)?)
            .map_err(|error| TlsError::BadPair(error.to_string()))?,
        _ => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Authority;

    #[test]
    fn the_environment_names_a_version_of_tls_or_is_refused() {
        let version = |value: &str| {
            let value = value.to_owned();
            ClientFiles::named_by(move |name| {
                (name == "KVPOOL_TLS_MIN_VERSION").then(|| value.clone())
            })
        };
        assert_eq!(version("1.2").min_version, Version::Tls12);
        for usual in ["", "1.3"] {
            let files = version(usual);
            assert_eq!(files.min_version, Version::Tls13);
            assert!(ClientTls::open(&files).unwrap().is_none());
        }
        let refused = ClientTls::open(&version("1,2")).unwrap_err().to_string();
        assert_eq!(refused, "KVPOOL_TLS_MIN_VERSION: `1,2` is not 1.2 or 1.3");
    }

    #[test]
    fn a_caller_that_was_given_https_alone_refuses_plain_addresses_beyond_this_host() {
        let directory = tempfile::tempdir().unwrap();
        let files = Authority::new(directory.path(), "authority").client(None);
        let tls = ClientTls::open(&files).unwrap().unwrap();
        assert!(!tls.refuses_plain() && !tls.refuses_plain_data("10.0.0.3:7072"));
        let mixed = ["https://a:7070", "http://b:7070"];
        assert!(!tls.clone().among(&mixed).refuses_plain());
        let strict = tls.clone().among(&["https://a:7070", "etcd://c:2379/pool"]);
        assert!(strict.refuses_plain());
        for far in ["10.0.0.3:7072", "[fd00::3]:7072", "node-3:7072"] {
            assert!(strict.refuses_plain_data(far), "{far}");
        }
        for near in ["127.0.0.3:7072", "[::1]:7072", "localhost:7072"] {
            assert!(!strict.refuses_plain_data(near), "{near}");
        }
    }
}
