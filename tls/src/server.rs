//! The server's side: the certificate that a port presents, and the certificates that it requires.

use crate::error::TlsError;
use crate::reload::Reloaded;
use crate::{ALPN_FRAMES, ALPN_GRPC, ALPN_HTTP, pem, provider};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ServerConfig, SupportedProtocolVersion, version};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// The oldest accepted version of TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Version {
    /// TLS 1.2.
    #[serde(rename = "1.2")]
    Tls12,
    /// TLS 1.3.
    #[default]
    #[serde(rename = "1.3")]
    Tls13,
}

impl Version {
    pub(crate) const fn spoken(self) -> &'static [&'static SupportedProtocolVersion] {
        static BOTH: [&SupportedProtocolVersion; 2] = [&version::TLS13, &version::TLS12];
        static NEW: [&SupportedProtocolVersion; 1] = [&version::TLS13];
        match self {
            Self::Tls12 => &BOTH,
            Self::Tls13 => &NEW,
        }
    }
}

impl std::str::FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "1.2" => Ok(Self::Tls12),
            "1.3" => Ok(Self::Tls13),
            other => Err(format!("`{other}` is not 1.2 or 1.3")),
        }
    }
}

/// Which callers need a certificate of the authority. A presented certificate must always be valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClientAuth {
    /// No caller needs a certificate.
    None,
    /// Store nodes need a certificate at the port of a master.
    Daemons,
    /// Every caller needs a certificate, except at HTTP ports.
    All,
}

impl std::str::FromStr for ClientAuth {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "daemons" => Ok(Self::Daemons),
            "all" => Ok(Self::All),
            other => Err(format!("`{other}` is not none, daemons or all")),
        }
    }
}

/// The port that a handshake is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// gRPC and frames of a master.
    Control,
    /// Frames of a store node. The version is TLS 1.3.
    Data,
    /// Probes, metrics and views. Probes have no certificate, so this port requires none.
    Http,
}

/// The files of a server.
#[derive(Clone, Debug)]
pub struct ServerFiles {
    /// The certificate and the intermediate certificates, PEM.
    pub cert: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
    /// The authorities of clients, PEM.
    pub client_ca: Option<PathBuf>,
    /// Which clients need a certificate.
    pub client_auth: ClientAuth,
    /// The oldest version.
    pub min_version: Version,
}

/// See the module's documentation. Cheap to clone.
#[derive(Clone)]
pub struct ServerTls {
    configs: Arc<Reloaded<Configs>>,
    client_auth: ClientAuth,
}

struct Configs {
    control: Arc<ServerConfig>,
    data: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
    expires_at: Option<i64>,
}

impl std::fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ServerTls({:?})", self.client_auth)
    }
}

impl ServerTls {
    /// Reads the files. Fails when they cannot be used, or when certificates are required and no
    /// authority is named.
    pub fn open(files: ServerFiles) -> Result<Self, TlsError> {
        let client_auth = files.client_auth;
        if client_auth != ClientAuth::None && files.client_ca.is_none() {
            return Err(TlsError::Incomplete(
                "client certificates are asked for: name their authority with --tls-ca",
            ));
        }
        pem::warn_if_readable(&files.key);
        let mut watched = vec![files.cert.clone(), files.key.clone()];
        watched.extend(files.client_ca.clone());
        let configs = Reloaded::open(watched, move || Configs::load(&files))?;
        Ok(Self {
            configs: Arc::new(configs),
            client_auth,
        })
    }

    /// The configuration of the next handshake on a port.
    pub fn config(&self, port: Port) -> Arc<ServerConfig> {
        let configs = self.configs.get();
        Arc::clone(match port {
            Port::Control => &configs.control,
            Port::Data => &configs.data,
            Port::Http => &configs.http,
        })
    }

    /// When the certificate of the next handshake expires, in seconds since 1970; `None` where its dates cannot be
    /// read.
    pub fn expires_at(&self) -> Option<i64> {
        self.configs.get().expires_at
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

    /// Whether every caller needs a certificate.
    pub fn asks_all(&self) -> bool {
        self.client_auth == ClientAuth::All
    }

    /// Whether store nodes need a certificate at a master.
    pub fn asks_daemons(&self) -> bool {
        self.client_auth != ClientAuth::None
    }
}

impl Configs {
    fn load(files: &ServerFiles) -> Result<Self, TlsError> {
        let (asked, needed) = match files.client_auth {
            ClientAuth::None => (false, false),
            ClientAuth::Daemons => (true, false),
            ClientAuth::All => (true, true),
        };
        let build = |asked, needed, alpn: &[&[u8]]| config(files, asked, needed, alpn);
        let new = ServerFiles {
            min_version: Version::Tls13,
            ..files.clone()
        };
        let mut control = build(asked, needed, &[ALPN_GRPC, ALPN_FRAMES])?;
        let mut data = config(&new, asked, needed, &[ALPN_FRAMES])?;
        // A session seals its own records.
        control.enable_secret_extraction = true;
        data.enable_secret_extraction = true;
        Ok(Self {
            control: control.into(),
            data: data.into(),
            http: build(false, false, &[ALPN_HTTP, ALPN_GRPC])?.into(),
            expires_at: pem::expires_at(&files.cert)?,
        })
    }
}

fn config(
    files: &ServerFiles,
    asked: bool,
    needed: bool,
    alpn: &[&[u8]],
) -> Result<ServerConfig, TlsError> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(files.min_version.spoken())
        .map_err(|error| TlsError::BadPair(error.to_string()))?;
    let builder = match files.client_ca.as_deref().filter(|_| asked) {
        None => builder.with_no_client_auth(),
        Some(file) => {
            let roots = Arc::new(pem::roots(file)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
            let verifier = if needed {
                verifier
            } else {
                verifier.allow_unauthenticated()
            };
            let verifier = verifier.build().map_err(|error| TlsError::BadFile {
                file: file.to_owned(),
                reason: error.to_string(),
            })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let chain = pem::certificates(&files.cert)?;
    let mut config = builder
        .with_single_cert(chain, pem::key(&files.key)?)
        .map_err(|error| TlsError::BadPair(error.to_string()))?;
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    // A resumed session would skip the client's certificate. Connections live long, so resumption
    // would save little.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use crate::testing::{Authority, Life};
    use std::time::Duration;

    #[test]
    fn a_certificate_expires_when_its_file_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new(directory.path(), "authority");
        let pair = authority.sign("server", Life::Expired);
        let tls = pair.server();
        let in_2001 = 978_307_200;
        assert_eq!(tls.expires_at(), Some(in_2001));
        // An expired certificate follows the new one, as an old intermediate certificate may.
        let expired = std::fs::read_to_string(&pair.cert).unwrap();
        let pair = authority.sign("server", Life::Valid);
        let own = std::fs::read_to_string(&pair.cert).unwrap();
        std::fs::write(&pair.cert, own + &expired).unwrap();
        std::thread::sleep(Duration::from_millis(1200));
        assert!(tls.expires_at() > Some(in_2001));
    }
}
