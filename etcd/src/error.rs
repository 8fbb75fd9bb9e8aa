//! Errors of calls to etcd.

use tonic::{Code, Status};

/// Why a call to etcd failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No answer in time, or an answer that leaves the outcome unknown. A write may have taken effect, or may take
    /// effect later.
    #[error("etcd is unavailable: {reason}")]
    Unavailable {
        /// The error of the last endpoint.
        reason: String,
    },
    /// etcd has used up its space quota and accepts only deletions. A transaction may have been applied
    /// nevertheless: etcd checks its quota again afterwards.
    #[error(
        "etcd has used up its space quota: raise --quota-backend-bytes, or compact, defragment and disarm"
    )]
    NoSpace,
    /// The requested revision has been compacted.
    #[error("the requested revision has been compacted")]
    Compacted,
    /// The lease does not exist or has expired. Nothing was changed.
    #[error("the etcd lease has expired or was revoked")]
    LeaseNotFound,
    /// The user lacks the permission, or the password is wrong. Nothing was changed.
    #[error("etcd denied access: {reason}")]
    PermissionDenied {
        /// etcd's message.
        reason: String,
    },
    /// The request exceeds the limit of etcd (`--max-request-bytes`). Nothing was changed.
    #[error("the request exceeds the size limit of etcd: {reason}")]
    TooLarge {
        /// etcd's message.
        reason: String,
    },
    /// Anything else. Nothing was changed.
    #[error("etcd refused the request: {reason}")]
    Other {
        /// etcd's message.
        reason: String,
    },
}

impl Error {
    pub(crate) fn unavailable(reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self::Unavailable { reason }
    }

    /// Whether the same call may succeed later without a change by the caller.
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::NoSpace)
    }
}

/// Many refusals of etcd differ in their text only. The texts have not changed since version 3.0.
impl From<Status> for Error {
    fn from(status: Status) -> Self {
        let text = status.message();
        let reason = || match std::error::Error::source(&status) {
            Some(source) => format!("{text} ({})", root_of(source)),
            None => text.to_owned(),
        };
        match status.code() {
            Code::ResourceExhausted if text.contains("database space exceeded") => Self::NoSpace,
            Code::ResourceExhausted if text.contains("larger than max") => {
                Self::TooLarge { reason: reason() }
            }
            Code::InvalidArgument if text.contains("request is too large") => {
                Self::TooLarge { reason: reason() }
            }
            Code::OutOfRange if text.contains("compacted") => Self::Compacted,
            Code::NotFound if text.contains("lease not found") => Self::LeaseNotFound,
            Code::PermissionDenied | Code::Unauthenticated => {
                Self::PermissionDenied { reason: reason() }
            }
            Code::InvalidArgument if is_about_user(text) => {
                Self::PermissionDenied { reason: reason() }
            }
            Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::OutOfRange
            | Code::FailedPrecondition
            | Code::Unimplemented
            | Code::DataLoss => Self::Other { reason: reason() },
            _ => Self::Unavailable { reason: reason() },
        }
    }
}

/// Whether etcd refused the token before it did anything, so that a new token may help.
pub(crate) fn wants_new_token(status: &Status) -> bool {
    let text = status.message();
    match status.code() {
        Code::Unauthenticated => true,
        Code::InvalidArgument => {
            text.contains("user name is empty") || text.contains("revision of auth store is old")
        }
        _ => false,
    }
}

fn is_about_user(text: &str) -> bool {
    [
        "authentication failed",
        "user name is empty",
        "revision of auth store is old",
        "authentication is not enabled",
    ]
    .iter()
    .any(|known| text.contains(known))
}

fn root_of(mut error: &dyn std::error::Error) -> String {
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_apart_from_unknown_outcomes() {
        let of = |code, text: &str| Error::from(Status::new(code, text));
        assert_eq!(
            of(
                Code::ResourceExhausted,
                "etcdserver: mvcc: database space exceeded"
            ),
            Error::NoSpace
        );
        assert!(matches!(
            of(Code::ResourceExhausted, "etcdserver: too many requests"),
            Error::Unavailable { .. }
        ));
        assert!(matches!(
            of(Code::Unavailable, "etcdserver: request timed out"),
            Error::Unavailable { .. }
        ));
        assert!(matches!(
            of(Code::Unknown, "transport error"),
            Error::Unavailable { .. }
        ));
        assert!(matches!(
            of(
                Code::InvalidArgument,
                "etcdserver: authentication failed, invalid user ID or password"
            ),
            Error::PermissionDenied { .. }
        ));
        assert!(matches!(
            of(
                Code::InvalidArgument,
                "etcdserver: duplicate key given in txn request"
            ),
            Error::Other { .. }
        ));
    }
}
