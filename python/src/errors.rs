//! Faults of calls, on their way to the exceptions of `kvpool.errors`.

use crate::loan::{InUse, StillLent, deadline};
use crate::pool::seconds;
use kvpool_client::{ConnectError, ControlError, GetError, PutError, RemoveError};
use kvpool_types::Code;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// A failure that is not an exception yet.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    code: &'static str,
    is_retryable: bool,
    is_connecting: bool,
    /// Memory that a transfer may still use. The caller must learn of it, even if a signal handler raised an
    /// exception.
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

    /// The caller passed an invalid value.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// The object was closed or released before. The code stays in this package and crosses no wire.
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

    /// The parent process had connections at the fork, so this process can make none.
    pub(crate) fn fork_of(parent: u32) -> Self {
        Self {
            message: format!(
                "this process is a fork of process {parent}, which had connections when it forked; connect \
                 after the fork alone, or start processes by spawn"
            ),
            ..Self::forked()
        }
    }

    /// A transfer may still read or write the call's memory. The code stays in this package and crosses no
    /// wire.
    pub(crate) fn still_lent(why: StillLent) -> Self {
        Self {
            code: "memory_in_use",
            is_retryable: false,
            is_connecting: false,
            message: why.to_string(),
            in_use: Some(why.0),
        }
    }

    /// The message for people.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The same fault, with the argument that it concerns at the start of its message.
    pub(crate) fn at(self, place: &str) -> Self {
        Self {
            message: format!("{place}: {}", self.message),
            ..self
        }
    }

    /// The exception as a value, for the result of one key of a batch.
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

/// The exception to raise. An exception that a signal handler raised during the call takes its place. If the
/// caller must learn of the fault, the handler's exception becomes its cause.
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
