//! What went wrong, on its way to the exceptions of `kvpool.errors`.

use crate::loan::{InUse, StillLent, deadline};
use crate::pool::seconds;
use kvpool_client::{ConnectError, ControlError, GetError, PutError, RemoveError};
use kvpool_types::Code;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Something that went wrong, before it is an exception.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    code: &'static str,
    is_retryable: bool,
    is_connecting: bool,
    /// Memory that a transfer may still use. The caller must learn of it, whatever a signal's handler raised.
    in_use: Option<InUse>,
    message: String,
}

impl Fault {
    /// A fault with one of the pool's codes.
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code: code.label(),
            is_retryable: code.is_retryable(),
            is_connecting: false,
            in_use: None,
            message: message.into(),
        }
    }

    /// A value of the caller's that cannot be.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// The object was closed or released before. The code is not one of those that cross a wire.
    pub(crate) fn closed(message: &str) -> Self {
        Self {
            code: "closed",
            is_retryable: false,
            is_connecting: false,
            in_use: None,
            message: message.to_owned(),
        }
    }

    /// The object belongs to the process that this one was forked from.
    pub(crate) fn forked() -> Self {
        Self {
            code: "forked",
            is_retryable: false,
            is_connecting: false,
            in_use: None,
            message: "the parent process of this fork connected the pool".to_owned(),
        }
    }

    /// This process was forked from one that had connections, and so can make none.
    pub(crate) fn fork_of(parent: u32) -> Self {
        Self {
            message: format!(
                "this process is a fork of process {parent}, which had connections when it forked; connect \
                 after the fork alone, or start processes by spawn"
            ),
            ..Self::forked()
        }
    }

    /// A transfer may still write the call's memory, or read it. The code is not one of those that cross a wire.
    pub(crate) fn still_lent(why: StillLent) -> Self {
        Self {
            code: "memory_in_use",
            is_retryable: false,
            is_connecting: false,
            message: why.to_string(),
            in_use: Some(why.0),
        }
    }

    /// What went wrong, for people.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The same, saying which of several arguments it is about.
    pub(crate) fn at(self, place: &str) -> Self {
        Self {
            message: format!("{place}: {}", self.message),
            ..self
        }
    }

    /// The exception, to be handed out as a value: the answer for one key among others.
    pub(crate) fn into_value(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let make = MAKE.import(py, "kvpool.errors", "_of")?;
        make.call1((
            self.code,
            self.message,
            self.is_retryable,
            self.is_connecting,
            self.in_use.map(MemoryUse),
        ))
    }
}

/// Memory of a call that has ended, and that a transfer may still use.
#[pyclass(frozen, module = "kvpool._native")]
#[derive(Debug)]
pub(crate) struct MemoryUse(InUse);

#[pymethods]
impl MemoryUse {
    /// Whether no transfer uses the memory any more. Waits for it, for `timeout` seconds at most.
    fn has_ended(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let until = deadline(seconds("timeout", timeout)?);
        Ok(py.detach(|| self.0.has_ended_by(until)))
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

/// The exception to raise. An exception of a signal handler that ran in the call goes first, or is the cause
/// of a fault that the caller must learn.
///
/// The caller holds the interpreter lock and no other.
impl From<Fault> for PyErr {
    fn from(fault: Fault) -> Self {
        let goes_first = fault.in_use.is_some();
        let raised = match crate::interrupts::raised() {
            Some(raised) if !goes_first => return raised,
            raised => raised,
        };
        Python::attach(|py| match fault.into_value(py) {
            Ok(exception) => {
                let error = PyErr::from_value(exception);
                if raised.is_some() {
                    error.set_cause(py, raised);
                }
                error
            }
            Err(error) => error,
        })
    }
}

impl From<ControlError> for Fault {
    fn from(error: ControlError) -> Self {
        Self::new(error.code, error.message)
    }
}

impl From<RemoveError> for Fault {
    fn from(error: RemoveError) -> Self {
        Self {
            is_retryable: error.is_retryable(),
            ..Self::new(error.code(), error.to_string())
        }
    }
}

impl From<GetError> for Fault {
    fn from(error: GetError) -> Self {
        Self {
            is_retryable: error.is_retryable(),
            ..Self::new(error.code(), error.to_string())
        }
    }
}

impl From<PutError> for Fault {
    fn from(error: PutError) -> Self {
        Self {
            is_retryable: error.is_retryable(),
            ..Self::new(error.code(), error.to_string())
        }
    }
}

impl From<ConnectError> for Fault {
    fn from(error: ConnectError) -> Self {
        Self {
            is_connecting: true,
            ..Self::new(error.code(), error.to_string())
        }
    }
}
