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
        /// What the system said.
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("{} is not usable: {reason}", file.display())]
    BadFile {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Certificate and key are no pair, or of no supported kind.
    #[error("certificate and key cannot be used together: {0}")]
    BadPair(String),
    /// Settings that go together were not given together.
    #[error("{0}")]
    Incomplete(&'static str),
    /// A setting has a value that is none.
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
