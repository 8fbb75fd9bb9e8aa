//! An authority and its certificates, for tests and benchmarks.

use crate::client::{ClientFiles, ClientTls};
use crate::server::{ClientAuth, ServerFiles, ServerTls, Version};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};
use std::path::{Path, PathBuf};

/// A certificate and its key, in files.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The certificate, PEM.
    pub cert: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
}

impl Pair {
    /// A server that presents this certificate and requires none. Panics when the server cannot be
    /// made.
    pub fn server(&self) -> ServerTls {
        let server = ServerTls::open(ServerFiles {
            cert: self.cert.clone(),
            key: self.key.clone(),
            client_ca: None,
            client_auth: ClientAuth::None,
            min_version: Version::Tls13,
        });
        server.unwrap()
    }
}

/// An authority whose files lie in a directory.
pub struct Authority {
    directory: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
    /// Its certificate, PEM.
    pub ca: PathBuf,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Authority({})", self.ca.display())
    }
}

/// The life of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It is valid.
    Valid,
    /// It was valid until 2001.
    Expired,
}

impl Authority {
    /// Makes an authority called `name` in `directory`. Panics when it fails.
    pub fn new(directory: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let issuer = CertifiedIssuer::self_signed(params, key).unwrap();
        let ca = directory.join(format!("{name}.pem"));
        std::fs::write(&ca, issuer.pem()).unwrap();
        Self {
            directory: directory.to_owned(),
            issuer,
            ca,
        }
    }

    /// Signs a certificate for loopback into `NAME.pem` and `NAME.key`, for servers and clients.
    pub fn sign(&self, name: &str, life: Life) -> Pair {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        if life == Life::Expired {
            params.not_before = date_time_ymd(2000, 1, 1);
            params.not_after = date_time_ymd(2001, 1, 1);
        }
        let key = KeyPair::generate().unwrap();
        let signed = params.signed_by(&key, &self.issuer).unwrap();
        let pair = Pair {
            cert: self.directory.join(format!("{name}.pem")),
            key: self.directory.join(format!("{name}.key")),
        };
        // Each file in one step: a reader sees the old one or the new one.
        for (path, text) in [(&pair.cert, signed.pem()), (&pair.key, key.serialize_pem())] {
            let partial = path.with_extension("partial");
            std::fs::write(&partial, text).unwrap();
            std::fs::rename(&partial, path).unwrap();
        }
        pair
    }

    /// A server with a new certificate that requires none of clients, and a client that presents none. Panics when
    /// they cannot be made.
    pub fn ends(&self) -> (ServerTls, ClientTls) {
        let server = self.sign("server", Life::Valid).server();
        let client = ClientTls::open(&self.client(None)).unwrap();
        (server, client.unwrap())
    }

    /// A client that trusts this authority, and presents `pair`.
    pub fn client(&self, pair: Option<&Pair>) -> ClientFiles {
        ClientFiles {
            ca: Some(self.ca.clone()),
            cert: pair.map(|pair| pair.cert.clone()),
            key: pair.map(|pair| pair.key.clone()),
            ..ClientFiles::default()
        }
    }
}
