//! The log lines and spans of the native half.

use kvpool_daemon::telemetry::{FILTER_VARIABLE, LogFormat, init_with_export};
use kvpool_trace::Export;
use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use std::ffi::CString;

/// The export of spans. It lives until the interpreter ends.
static EXPORT: Mutex<Option<Export>> = Mutex::new(None);

/// Sends the remaining spans to the collector. For `atexit`: Rust does not drop statics.
#[pyfunction]
pub(crate) fn end_export(py: Python<'_>) {
    py.detach(|| drop(EXPORT.lock().take()));
}

/// Exports spans if `KVPOOL_OTLP_ENDPOINT` names a collector, and logs to standard error if `RUST_LOG` is set.
///
/// Without these variables the package prints nothing: standard error belongs to the process that imported it.
/// An invalid filter gives a warning.
pub(crate) fn start(py: Python<'_>) -> PyResult<()> {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if !is_set(FILTER_VARIABLE) && !is_set(kvpool_trace::ENDPOINT_VARIABLE) {
        return Ok(());
    }
    let error = match init_with_export(LogFormat::Text, "off", "kvpool-python", None) {
        Ok(None) => return Ok(()),
        Ok(export) => {
            *EXPORT.lock() = export;
            let end = wrap_pyfunction!(end_export, py)?;
            py.import("atexit")?.call_method1("register", (end,))?;
            return Ok(());
        }
        Err(error) => error,
    };
    let message = CString::new(format!("kvpool logs nothing: {error}"))?;
    PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 1)
}
