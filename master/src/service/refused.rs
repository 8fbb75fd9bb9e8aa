//! Why a call failed as a whole.

use kvpool_types::Code;

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// The stable code.
    pub(super) code: Code,
    /// The same for people.
    pub(super) message: String,
}

/// A refusal.
pub(super) fn refused(code: Code, message: impl Into<String>) -> Refused {
    Refused {
        code,
        message: message.into(),
    }
}
