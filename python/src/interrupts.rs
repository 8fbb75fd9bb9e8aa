//! Signals while a call waits. Python runs their handlers on its main thread only, so the waiting call must run
//! them.
//!
//! ```text
//!  call waits ──50 ms──► is_cancelled? ─ handlers run ─┬─ nothing raised: the call waits on
//!                                                      └─ KeyboardInterrupt: kept here, the call is cancelled
//!  the call's end ─┬─ raises a Fault: the kept exception takes its place
//!                  └─ answers:        the interpreter raises the kept one at its next step
//! ```
//!
//! ADR 0031 says why a call leaves the runtime for signals.

// UNSAFETY: asks the interpreter to run a function of this module at its next step.
#![allow(
    unsafe_code,
    reason = "the interpreter's list of pending calls is a C interface"
)]

use kvpool_client::blocking::CancelCheck;
use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// The exception that a signal handler raised in a call. It stays here until a call or the interpreter raises
/// it.
static RAISED: Mutex<Option<PyErr>> = Mutex::new(None);

/// Cancels calls of the main thread when a signal's handler raises.
#[derive(Debug)]
struct Signals;

/// The check that clients of this module ask while a call waits.
pub(crate) fn cancel_check() -> Option<Arc<dyn CancelCheck>> {
    Some(Arc::new(Signals))
}

/// The exception that a handler raised while a call of this thread waited. The caller must raise it.
pub(crate) fn raised() -> Option<PyErr> {
    is_main_thread().then(|| RAISED.lock().take()).flatten()
}

impl CancelCheck for Signals {
    fn applies_here(&self) -> bool {
        is_main_thread()
    }

    fn is_cancelled(&self) -> bool {
        if RAISED.lock().is_some() {
            // One native call may make several client calls, and none of them may wait after the exception.
            return true;
        }
        let raised = Python::try_attach(|py| {
            let raised = py.check_signals().err()?;
            // SAFETY: the interpreter is attached, and the function takes no argument.
            unsafe { ffi::Py_AddPendingCall(Some(raise), std::ptr::null_mut()) };
            Some(raised)
        });
        let Some(raised) = raised.flatten() else {
            return false;
        };
        *RAISED.lock() = Some(raised);
        true
    }
}

/// Raises the kept exception, unless a call has raised it. The interpreter calls this on its main thread,
/// attached.
extern "C" fn raise(_nothing: *mut c_void) -> c_int {
    let Some(raised) = RAISED.lock().take() else {
        return 0;
    };
    Python::attach(|py| raised.restore(py));
    -1
}

/// Whether this thread is the first thread of the process, which is Python's main thread.
fn is_main_thread() -> bool {
    thread_local! {
        /// Each thread asks the kernel once, because the two system calls cost as much as a get from this host.
        static IS_MAIN: bool = rustix::thread::gettid() == rustix::process::getpid();
    }
    IS_MAIN.try_with(|is_main| *is_main).unwrap_or(false)
}
