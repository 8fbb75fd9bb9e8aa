//! The errors of a client, one type per operation. Every error has a stable code.

use kvpool_types::{Code, Length, Offset};

/// Why a client could not connect to the pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The options name no master.
    #[error("no master given: name at least one as host:port, or etcd://host:port/cluster")]
    NoMasters,
    /// The address of a master is malformed.
    #[error("invalid master address {address:?}: {reason}")]
    BadAddress {
        /// The address as it was given.
        address: String,
        /// The fault of the address.
        reason: String,
    },
    /// The certificate or key files for TLS cannot be used.
    #[error("cannot use TLS: {0}")]
    Tls(String),
    /// The machine's boot id cannot be read.
    #[error("cannot read this host's boot id: {0}")]
    NoHostId(String),
    /// The options require RDMA, and this host has none.
    #[error("the transport is set to RDMA only, and RDMA is not available: {0}")]
    NoRdma(String),
    /// A blocking client's runtime could not be started.
    #[error("cannot start the client's threads: {0}")]
    NoRuntime(String),
    /// No master accepted the client.
    #[error("cannot connect to {masters}: {source}")]
    Refused {
        /// The masters that were tried.
        masters: String,
        /// The last refusal.
        source: ControlError,
    },
}

/// Why a call to the master failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {message}")]
pub struct ControlError {
    /// The stable code.
    pub code: Code,
    /// A description for people.
    pub message: String,
}

/// Why a block was not put.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PutError {
    /// The block is empty. A block has at least one byte.
    #[error("a block has at least one byte")]
    Empty,
    /// The block is larger than the pool's limit.
    #[error("a block of {length} bytes exceeds the pool's limit of {limit} bytes")]
    TooLarge {
        /// The block's length.
        length: Length,
        /// The pool's limit.
        limit: Length,
    },
    /// The put was refused, or did not succeed within the timeout. It did not make the block visible.
    #[error("{code}: {message}")]
    Failed {
        /// The stable code of the last attempt.
        code: Code,
        /// A description for people.
        message: String,
    },
    /// All bytes were written, but the answer to the commit was lost, or does not tell whether the commit was
    /// carried out. The block may or may not be visible.
    /// Another put of the block settles this.
    #[error(
        "the outcome of the commit is not known ({code}: {message}): the block may be visible or not; put it again"
    )]
    OutcomeUnknown {
        /// The stable code of the last attempt.
        code: Code,
        /// A description for people.
        message: String,
    },
}

/// Why blocks were not removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoveError {
    /// The removal was refused, or did not succeed within the timeout. It removed nothing.
    #[error(transparent)]
    Failed(#[from] ControlError),
    /// The answer was lost, so the blocks may or may not be removed. The client does not repeat the
    /// removal: another client may have put new blocks under these keys meanwhile.
    #[error("the answer to the removal was lost ({0}): the blocks may be removed or not")]
    OutcomeUnknown(ControlError),
}

/// Why a get failed. A miss is not an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GetError {
    /// The buffers are shorter than the block.
    #[error("the buffers have {buffers} bytes, the block has {block}")]
    BufferTooSmall {
        /// The buffers' total length.
        buffers: Length,
        /// The block's length.
        block: Length,
    },
    /// The range exceeds the block.
    #[error("the range of {length} bytes at offset {from} exceeds the block of {block} bytes")]
    OutsideBlock {
        /// The first byte of the range.
        from: Offset,
        /// The length of the range.
        length: Length,
        /// The block's length.
        block: Length,
    },
    /// Shared memory of this host reaches no replica, so there can be no view.
    #[error("no view is possible from this host: {0}")]
    NotLocal(String),
    /// No replica could be read within the timeout, or the pool refused the call.
    #[error("{code}: {message}")]
    Failed {
        /// The stable code of the last attempt.
        code: Code,
        /// A description for people.
        message: String,
    },
}

impl ControlError {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// This error, with the message of a later error appended.
    pub(crate) fn then(self, later: &Self) -> Self {
        let message = format!("{}; then {}", self.message, later.message);
        Self { message, ..self }
    }

    /// Whether the same call, unchanged, may succeed later.
    pub const fn is_retryable(&self) -> bool {
        self.code.is_retryable()
    }
}

impl ConnectError {
    /// The stable code.
    pub const fn code(&self) -> Code {
        match self {
            Self::NoMasters | Self::BadAddress { .. } | Self::NoRdma(_) | Self::Tls(_) => {
                Code::InvalidArgument
            }
            Self::NoHostId(_) | Self::NoRuntime(_) => Code::Internal,
            Self::Refused { source, .. } => source.code,
        }
    }

    /// Whether the same call, unchanged, may succeed later.
    pub const fn is_retryable(&self) -> bool {
        self.code().is_retryable()
    }
}

impl PutError {
    /// The stable code.
    pub const fn code(&self) -> Code {
        match self {
            Self::Empty => Code::InvalidArgument,
            Self::TooLarge { .. } => Code::TooLarge,
            Self::Failed { code, .. } | Self::OutcomeUnknown { code, .. } => *code,
        }
    }

    /// Whether the same call, unchanged, may succeed later.
    pub const fn is_retryable(&self) -> bool {
        self.code().is_retryable()
    }
}

impl RemoveError {
    /// The stable code.
    pub const fn code(&self) -> Code {
        match self {
            Self::Failed(error) | Self::OutcomeUnknown(error) => error.code,
        }
    }

    /// Whether the same call, unchanged, may succeed later without harm to other clients.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Failed(error) => error.is_retryable(),
            Self::OutcomeUnknown(_) => false,
        }
    }
}

impl GetError {
    /// The buffers of one block share bytes.
    pub(crate) fn overlapping() -> Self {
        Self::Failed {
            code: Code::InvalidArgument,
            message: "the buffers of one block overlap".to_owned(),
        }
    }

    /// The stable code.
    pub const fn code(&self) -> Code {
        match self {
            Self::BufferTooSmall { .. } => Code::InvalidArgument,
            Self::OutsideBlock { .. } => Code::OutOfRange,
            Self::NotLocal(_) => Code::Unreachable,
            Self::Failed { code, .. } => *code,
        }
    }

    /// Whether the same call, unchanged, may succeed later.
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::NotLocal(_) => false,
            _ => self.code().is_retryable(),
        }
    }
}

impl From<ControlError> for PutError {
    fn from(error: ControlError) -> Self {
        Self::Failed {
            code: error.code,
            message: error.message,
        }
    }
}

impl From<ControlError> for GetError {
    fn from(error: ControlError) -> Self {
        Self::Failed {
            code: error.code,
            message: error.message,
        }
    }
}

/// Whether the token itself was refused. The refused call changed nothing.
pub(crate) const fn is_about_the_token(code: Code) -> bool {
    matches!(code, Code::Unauthenticated | Code::TokenExpired)
}
