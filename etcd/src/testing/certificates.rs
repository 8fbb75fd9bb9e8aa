//! An authority and its certificates, for one test.

use super::StartError;
use crate::client::Tls;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use std::path::{Path, PathBuf};

/// The files of a server and its clients.
#[derive(Clone, Debug)]
pub(super) struct Certificates {
    pub(super) ca: PathBuf,
    pub(super) server_cert: PathBuf,
    pub(super) server_key: PathBuf,
    client_cert: PathBuf,
    client_key: PathBuf,
}

impl Certificates {
    /// Makes them in a directory.
    pub(super) fn generate(directory: &Path) -> Result<Self, StartError> {
        let failed = |e: rcgen::Error| StartError::Certificates(e.to_string());
        let mut authority = CertificateParams::new(Vec::<String>::new()).map_err(failed)?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().map_err(failed)?;
        let authority = CertifiedIssuer::self_signed(authority, key).map_err(failed)?;
        let write = |name: &str, text: String| {
            let path = directory.join(name);
            std::fs::write(&path, text)?;
            Ok::<_, StartError>(path)
        };
        // etcd is a client of itself, too.
        let signed = |name: &str| {
            let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
            let mut params = CertificateParams::new(names).map_err(failed)?;
            params.extended_key_usages = vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ];
            let key = KeyPair::generate().map_err(failed)?;
            let signed = params.signed_by(&key, &authority).map_err(failed)?;
            let cert = write(&format!("{name}.pem"), signed.pem())?;
            let key = write(&format!("{name}.key"), key.serialize_pem())?;
            Ok::<_, StartError>((cert, key))
        };
        let (server_cert, server_key) = signed("server")?;
        let (client_cert, client_key) = signed("client")?;
        Ok(Self {
            ca: write("ca.pem", authority.pem())?,
            server_cert,
            server_key,
            client_cert,
            client_key,
        })
    }

    /// The files for a client.
    pub(super) fn client(&self) -> Tls {
        Tls {
            ca: self.ca.clone(),
            cert: Some(self.client_cert.clone()),
            key: Some(self.client_key.clone()),
        }
    }
}
