//! What the native half says to the process that it is part of.

use kvpool_daemon::telemetry::{FILTER_VARIABLE, LogFormat, init};
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use std::ffi::CString;

/// Starts logging to standard error if `RUST_LOG` asks for it. Else nothing is said: what the process
/// prints is not this package's to decide. A filter that cannot be read is a warning and no more.
pub(crate) fn start(py: Python<'_>) -> PyResult<()> {
    if std::env::var_os(FILTER_VARIABLE).is_none_or(|filter| filter.is_empty()) {
        return Ok(());
    }
    let Err(error) = init(LogFormat::Text, "off") else {
        return Ok(());
    };
    let message = CString::new(format!("kvpool logs nothing: {error}"))?;
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 1)
}
