//! Why TLS cannot be used as configured.

use std::io;
use std::path::PathBuf;

/// See the module's documentation. The texts name the file and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A file has the wrong content.
    #[error("{} is not usable: {reason}", file.display())]
    BadFile {
        /// The file.
        file: PathBuf,
        /// Why the file cannot be used.
        reason: String,
    },
    /// The key does not belong to the certificate, or has an unsupported type.
    #[error("certificate and key cannot be used together: {0}")]
    BadPair(String),
    /// A setting is missing that another setting requires.
    #[error("{0}")]
    Incomplete(&'static str),
    /// A setting has an invalid value.
    #[error("{0}")]
    BadSetting(String),
    /// The name is neither a DNS name nor an IP address.
    #[error("`{0}` is not a server name: give a DNS name or an IP address")]
    BadName(String),
}

/// Whether a handshake failed because this side does not accept the peer's certificate.
#[must_use]
pub fn is_certificate_refusal(error: &io::Error) -> bool {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
    matches!(cause, Some(rustls::Error::InvalidCertificate(_)))
}
