//! The TLS settings that both daemons share.
//!
//! A daemon with a certificate serves TLS on every port. A daemon with an authority verifies the
//! daemons that it calls, and presents its own certificate to them.

use kvpool_tls::{ClientAuth, ClientFiles, ClientTls, ServerFiles, ServerTls, TlsError, Version};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntGauge, Registry};
use serde::Serialize;
use std::path::PathBuf;

/// The flags of TLS, to be flattened into a daemon's flags.
#[derive(Debug, Default, clap::Args, Serialize)]
// The daemons call their own flags so too, and clap takes a name once.
#[group(skip)]
#[command(next_help_heading = "Security")]
pub struct Flags {
    /// Serve TLS on every port, with this certificate (PEM, with the intermediate ones). It is read again
    /// when it changes
    #[arg(long, value_name = "PEM")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert
    #[arg(long, value_name = "PEM")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_key: Option<PathBuf>,
    /// Certificates of the authority that signs the pool's certificates. It verifies the daemons that this
    /// one calls, and the callers that present a certificate
    #[arg(long, value_name = "PEM")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_ca: Option<PathBuf>,
    /// Callers that need a certificate: none; store nodes at a master (daemons); or everybody (all)
    /// [default: daemons with --tls-cert and --tls-ca, else none]
    #[arg(long, value_name = "none|daemons|all")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_client_auth: Option<ClientAuth>,
    /// Name that the certificate of every called daemon must have, instead of the called host
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_server_name: Option<String>,
    /// Oldest version of TLS that is spoken: 1.3, or 1.2 [default: 1.3]
    #[arg(long, value_name = "VERSION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_min_version: Option<Version>,
    /// Listen beyond loopback without TLS and without tokens: anyone who reaches a port can use the pool
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    insecure: bool,
}

/// The settings of one daemon.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The certificate.
    pub cert: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
    /// The authority.
    pub ca: Option<PathBuf>,
    /// Which callers need a certificate; `None` for the default.
    pub client_auth: Option<ClientAuth>,
    /// The name that called daemons must have.
    pub server_name: Option<String>,
    /// The oldest version.
    pub min_version: Version,
}

/// The two sides of a daemon.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// TLS of its ports; `None` without TLS.
    pub server: Option<ServerTls>,
    /// TLS of its calls to addresses whose scheme requires TLS.
    pub client: Option<ClientTls>,
}

impl Settings {
    /// Reads the files.
    ///
    /// # Errors
    ///
    /// Settings that go together are not complete, or a file cannot be used.
    pub fn open(&self) -> Result<Tls, TlsError> {
        let server = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => Some(ServerTls::open(ServerFiles {
                cert: cert.clone(),
                key: key.clone(),
                client_ca: self.ca.clone(),
                client_auth: self.client_auth.unwrap_or(match self.ca {
                    Some(_) => ClientAuth::Daemons,
                    None => ClientAuth::None,
                }),
                min_version: self.min_version,
            })?),
            (None, None) if matches!(self.client_auth, None | Some(ClientAuth::None)) => None,
            (None, None) => {
                return Err(TlsError::Incomplete(
                    "--tls-client-auth asks for certificates, which only TLS carries: pass --tls-cert and --tls-key",
                ));
            }
            _ => {
                return Err(TlsError::Incomplete(
                    "--tls-cert and --tls-key go together: pass both, or none",
                ));
            }
        };
        let client = ClientTls::open(&ClientFiles {
            ca: self.ca.clone(),
            cert: self.cert.clone(),
            key: self.key.clone(),
            server_name: self.server_name.clone(),
            min_version: self.min_version,
            problem: None,
        })?;
        Ok(Tls { server, client })
    }
}

/// When a daemon's certificate expires, for `/metrics`.
struct Expiry {
    tls: Option<ServerTls>,
    gauge: IntGauge,
}

impl Collector for Expiry {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let expires_at = self.tls.as_ref().and_then(ServerTls::expires_at);
        self.gauge.set(expires_at.unwrap_or(0));
        self.gauge.collect()
    }
}

/// Whether a daemon's files of TLS can be used, for `/metrics`.
struct Files {
    tls: Tls,
    failed: IntGauge,
}

impl Collector for Files {
    fn desc(&self) -> Vec<&Desc> {
        self.failed.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.failed.set(i64::from(self.tls.problem().is_some()));
        self.failed.collect()
    }
}

impl Tls {
    /// Adds to `registry` when the certificate expires, and whether changed files can be used. From then on the
    /// daemon checks the files once a second. The names of the metrics begin with `prefix`, which may be empty.
    pub fn watch(&self, registry: &Registry, prefix: &str) -> Result<(), prometheus::Error> {
        let gauge = IntGauge::new(
            format!("{prefix}tls_certificate_expires_timestamp_seconds"),
            "When the certificate of the ports expires; 0 without TLS.",
        )?;
        let failed = IntGauge::new(
            format!("{prefix}tls_files_failed"),
            "1 while changed files of TLS cannot be used; else 0.",
        )?;
        let looks = [
            self.server.as_ref().map(ServerTls::keep_looking),
            self.client.as_ref().map(ClientTls::keep_looking),
        ];
        for error in looks.into_iter().flatten().filter_map(Result::err) {
            tracing::error!(%error, "no thread to watch the TLS files: only handshakes look at them");
        }
        let tls = self.server.clone();
        registry.register(Box::new(Expiry { tls, gauge }))?;
        let tls = self.clone();
        registry.register(Box::new(Files { tls, failed }))
    }

    /// Why the files cannot be used, as a sentence; `None` while they can be used.
    pub fn problem(&self) -> Option<String> {
        let of_ports = self.server.as_ref().and_then(ServerTls::failure);
        // Ports and calls have the same files, and mostly the same failure.
        let failure = of_ports.or_else(|| self.client.as_ref().and_then(ClientTls::failure))?;
        Some(format!(
            "changed TLS files cannot be used: {failure}. The certificates loaded before stay in use"
        ))
    }

    /// The scheme of this daemon's gRPC addresses.
    pub const fn scheme(&self) -> &'static str {
        match self.server {
            Some(_) => "https://",
            None => "http://",
        }
    }

    /// Whether every caller of the control and data ports presents a certificate.
    pub fn knows_callers(&self) -> bool {
        self.server.as_ref().is_some_and(ServerTls::asks_all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_go_together_are_asked_for_together() {
        let some = || Some(PathBuf::from("/nowhere"));
        let complaint = |settings: Settings| settings.open().unwrap_err().to_string();
        let none = Settings::default;
        none().open().unwrap();
        let said = complaint(Settings {
            cert: some(),
            ..none()
        });
        assert!(said.contains("--tls-key"), "{said}");
        let said = complaint(Settings {
            key: some(),
            ..none()
        });
        assert!(said.contains("--tls-cert"), "{said}");
        for asked in [ClientAuth::Daemons, ClientAuth::All] {
            let client_auth = Some(asked);
            let said = complaint(Settings {
                client_auth,
                ..none()
            });
            assert!(said.contains("--tls-cert"), "{said}");
            let (cert, key) = (some(), some());
            let said = complaint(Settings {
                cert,
                key,
                client_auth,
                ..none()
            });
            assert!(said.contains("--tls-ca"), "{said}");
        }
        let said = complaint(Settings {
            cert: some(),
            key: some(),
            ..none()
        });
        assert!(said.contains("/nowhere"), "{said}");
    }
}
