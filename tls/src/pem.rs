//! Reads certificates and keys.

use crate::error::TlsError;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

fn read(file: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(file).map_err(|source| TlsError::Unreadable {
        file: file.to_owned(),
        source,
    })
}

fn bad(file: &Path, reason: impl Into<String>) -> TlsError {
    TlsError::BadFile {
        file: file.to_owned(),
        reason: reason.into(),
    }
}

/// The certificates of a PEM file, at least one.
pub(crate) fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = read(file)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| bad(file, format!("it is not PEM ({error})")))?;
    if found.is_empty() {
        return Err(bad(file, "it holds no certificate (PEM)"));
    }
    Ok(found)
}

/// When the certificate of a PEM file expires, in seconds since 1970. The intermediate ones behind it do not count:
/// some expire, and nobody needs them. `None` where its dates cannot be read.
pub(crate) fn expires_at(file: &Path) -> Result<Option<i64>, TlsError> {
    let chain = certificates(file)?;
    let dates = chain
        .first()
        .and_then(|own| X509Certificate::from_der(own).ok());
    Ok(dates.map(|(_, own)| own.validity().not_after.timestamp()))
}

/// The private key of a PEM file.
pub(crate) fn key(file: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let text = read(file)?;
    // The text of a key never appears in an error.
    PrivateKeyDer::from_pem_slice(&text).map_err(|_| bad(file, "it holds no private key (PEM)"))
}

/// Warns of a key that every user of the host can read.
pub(crate) fn warn_if_readable(file: &Path) {
    let mode = std::fs::metadata(file).map_or(0, |found| found.permissions().mode());
    if mode & 0o007 != 0 {
        tracing::warn!(
            key = %file.display(),
            "every user of this host can read or change the private key: run chmod o-rwx on it"
        );
    }
}

/// The authorities of a PEM file.
pub(crate) fn roots(file: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file)? {
        roots
            .add(certificate)
            .map_err(|error| bad(file, format!("a certificate is no authority ({error})")))?;
    }
    Ok(roots)
}
