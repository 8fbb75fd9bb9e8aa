//! The refusal of a whole call.

use kvpool_types::Code;

/// The refusal of a whole call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// The stable code.
    pub(super) code: Code,
    /// The reason, for people.
    pub(super) message: String,
}

/// A refusal.
pub(super) fn refused(code: Code, message: impl Into<String>) -> Refused {
    Refused {
        code,
        message: message.into(),
    }
}
