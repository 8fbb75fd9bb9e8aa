//! The files of a guarded pool, and of the TLS streams that bound its cases: one authority, one certificate, one
//! signing key.

use super::cases::Guard;
use anyhow::Context as _;
use kvctl::cluster::Security;
use kvctl::connection::Connection;
use kvpool_auth::issue::{NewToken, SigningKey, publish, save_secret};
use kvpool_auth::now;
use kvpool_client::ClientFiles;
use kvpool_tls::testing::{Authority, Life, Pair};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

const AUDIENCE: &str = "kvpool";
const ISSUER: &str = "kvbench";

/// The name in the certificate. It takes the place of the hosts, whose addresses differ between paths.
pub(crate) const SERVER_NAME: &str = "localhost";

/// How long the tokens of a run are valid, in seconds.
const TOKEN_LIFE: u64 = 24 * 3600;

const POLICY: &str = r#"
[[rule]]
subject = "node"
roles = ["node"]
namespaces = ["*"]

[[rule]]
subject = "client"
roles = ["admin"]
namespaces = ["*"]
"#;

/// The token and certificate that a client presents to a guarded pool, and the authority that it trusts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Access {
    /// The file of its token.
    pub(crate) token_file: Option<PathBuf>,
    /// The certificates of the authority.
    pub(crate) ca: Option<PathBuf>,
    /// Its certificate.
    pub(crate) cert: Option<PathBuf>,
    /// The key of its certificate.
    pub(crate) key: Option<PathBuf>,
    /// The name that the certificates have, instead of the called host.
    pub(crate) server_name: Option<String>,
}

impl Access {
    /// The settings from the options of the command.
    pub(crate) fn of(connection: &Connection) -> Self {
        Self {
            token_file: connection.token_file.clone(),
            ca: connection.tls_ca.clone(),
            cert: connection.tls_cert.clone(),
            key: connection.tls_key.clone(),
            server_name: connection.tls_server_name.clone(),
        }
    }

    /// Makes a connection of this process use it.
    pub(crate) fn apply(&self, connection: &mut Connection) {
        let Self {
            token_file,
            ca,
            cert,
            key,
            server_name,
        } = self.clone();
        connection.token_file = token_file;
        connection.tls_ca = ca;
        connection.tls_cert = cert;
        connection.tls_key = key;
        connection.tls_server_name = server_name;
    }

    /// The same for the options of a client.
    pub(crate) fn files(&self) -> ClientFiles {
        let Self {
            ca,
            cert,
            key,
            server_name,
            ..
        } = self.clone();
        ClientFiles {
            ca,
            cert,
            key,
            server_name,
            ..ClientFiles::default()
        }
    }
}

/// The files of one run.
#[derive(Debug)]
pub(crate) struct Material {
    ca: PathBuf,
    pair: Pair,
    jwks: PathBuf,
    policy: PathBuf,
    node_token: PathBuf,
    client_token: PathBuf,
}

impl Material {
    /// Makes the files in `directory`.
    pub(crate) fn make(directory: &Path) -> anyhow::Result<Self> {
        let authority = Authority::new(directory, "kvbench-ca");
        let pair = authority.sign("kvbench", Life::Valid);
        let key = SigningKey::generate().context("cannot make a key for tokens")?;
        let jwks = directory.join("jwks.json");
        publish(&key, &jwks)?;
        let policy = directory.join("policy.toml");
        std::fs::write(&policy, POLICY).context("cannot write the policy of tokens")?;
        let token = |subject: &str| -> anyhow::Result<PathBuf> {
            let begins = now();
            let text = key.sign(&NewToken {
                subject,
                issuer: ISSUER,
                audience: AUDIENCE,
                begins,
                expires: begins + TOKEN_LIFE,
            })?;
            let path = directory.join(format!("{subject}.token"));
            save_secret(&path, &text)?;
            Ok(path)
        };
        Ok(Self {
            ca: authority.ca.clone(),
            node_token: token("node")?,
            client_token: token("client")?,
            pair,
            jwks,
            policy,
        })
    }

    /// The certificate of a server, and its key.
    pub(crate) fn pair(&self) -> (PathBuf, PathBuf) {
        (self.pair.cert.clone(), self.pair.key.clone())
    }

    /// The certificates of the authority.
    pub(crate) fn ca(&self) -> PathBuf {
        self.ca.clone()
    }

    /// The flags of the daemons of a pool.
    pub(crate) fn flags(&self, guard: Guard) -> Security {
        let flags = |flags: &[(&str, &Path)]| -> Vec<OsString> {
            let flags = flags.iter();
            let flags = flags.map(|(flag, path)| [OsString::from(flag), path.as_os_str().into()]);
            flags.flatten().collect()
        };
        match guard {
            Guard::Tokens => {
                let mut daemon =
                    flags(&[("--auth-jwks", &self.jwks), ("--auth-policy", &self.policy)]);
                daemon.extend(["--auth-issuer".into(), ISSUER.into()]);
                Security {
                    daemon,
                    node: flags(&[("--token-file", &self.node_token)]),
                    has_tls: false,
                }
            }
            Guard::Tls => {
                let mut daemon = flags(&[
                    ("--tls-ca", &self.ca),
                    ("--tls-cert", &self.pair.cert),
                    ("--tls-key", &self.pair.key),
                ]);
                daemon.extend(["--tls-server-name".into(), SERVER_NAME.into()]);
                Security {
                    daemon,
                    node: Vec::new(),
                    has_tls: true,
                }
            }
        }
    }

    /// The settings for a client of the pool.
    pub(crate) fn access(&self, guard: Guard) -> Access {
        match guard {
            Guard::Tokens => Access {
                token_file: Some(self.client_token.clone()),
                ..Access::default()
            },
            Guard::Tls => Access {
                ca: Some(self.ca()),
                server_name: Some(SERVER_NAME.to_owned()),
                ..Access::default()
            },
        }
    }
}
