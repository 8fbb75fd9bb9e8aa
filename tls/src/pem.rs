//! Reads certificates and keys.

use crate::error::TlsError;
use parking_lot::Mutex;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
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

/// When the certificate of a PEM file expires, in seconds since 1970. The intermediate certificates after it do not
/// count: some expire without effect. `None` where its dates cannot be read.
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

/// The keys that this process has warned of. Settings name them, so they are few.
static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Warns of a key that every user of the host can read. A process that opens many connections warns once of a file.
pub(crate) fn warn_if_readable(file: &Path) {
    let mode = std::fs::metadata(file).map_or(0, |found| found.permissions().mode());
    if mode & 0o007 != 0 && WARNED.lock().insert(file.to_owned()) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    /// Counts events.
    struct Count(Arc<AtomicUsize>);

    impl Subscriber for Count {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn a_process_warns_once_of_a_key_that_others_can_read() {
        let directory = tempfile::tempdir().unwrap();
        let files = ["own.key", "open.key", "other.key"].map(|name| directory.path().join(name));
        for (file, mode) in files.iter().zip([0o600, 0o644, 0o604]) {
            std::fs::write(file, "a key").unwrap();
            std::fs::set_permissions(file, Permissions::from_mode(mode)).unwrap();
        }
        let warnings = Arc::new(AtomicUsize::new(0));
        tracing::subscriber::with_default(Count(Arc::clone(&warnings)), || {
            for _ in 0..3 {
                for file in &files {
                    warn_if_readable(file);
                }
            }
        });
        assert_eq!(warnings.load(Ordering::Relaxed), 2);
    }
}
