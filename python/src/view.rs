//! Views: blocks read in place, as Python buffers.

// UNSAFETY: lends a view's memory through the buffer protocol. The view is kept until the last buffer is
// released, and its memory is never written while it is kept.
#![allow(unsafe_code, reason = "the buffer protocol is made of raw pointers")]

use crate::errors::Fault;
use crate::home::{ForkGuarded, Home, drop_aside};
use parking_lot::Mutex;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;

/// A block in place, read-only and without a copy: a buffer for `memoryview`, `bytes` and
/// `numpy.frombuffer`.
///
/// The node keeps the block's memory as long as the view exists, also after the block is removed or the
/// pool is closed. So release views soon. A view ends with `release()`, at the end of a `with` statement,
/// or when it is garbage. After a fork the memory is not mapped in the child: do not read buffers of the
/// view there.
#[pyclass(frozen, module = "kvpool")]
pub(crate) struct View {
    home: Home,
    length: usize,
    version: u64,
    state: Mutex<State>,
}

/// The view and its buffers. The view is `None` once it is released.
struct State {
    view: Option<ForkGuarded<kvpool_client::View>>,
    /// The number of buffers in use.
    lent: usize,
}

impl View {
    pub(crate) fn new(view: kvpool_client::View) -> Self {
        let (length, version) = (view.length().as_usize(), view.version().0);
        let view = ForkGuarded::new(view);
        Self {
            home: view.home(),
            length,
            version,
            state: Mutex::new(State {
                view: Some(view),
                lent: 0,
            }),
        }
    }
}

impl View {
    /// Counts one more buffer in use. Returns the address of the memory.
    fn lend(&self) -> Result<*mut u8, Fault> {
        self.home.check()?;
        // No exception is made while the lock is held: it would run Python code, and other threads with it.
        let mut state = self.state.lock();
        let view = state.view.as_ref();
        let view = view.ok_or_else(|| Fault::closed("the view is released"))?;
        let start = view.get()?.memory().as_ptr();
        state.lent += 1;
        Ok(start)
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let view = self.state.get_mut().view.take();
        if self.home.is_here() {
            drop_aside(view);
        } else {
            std::mem::forget(view);
        }
    }
}

#[pymethods]
impl View {
    /// The version of the block: it grows with each put of the key.
    #[getter]
    fn version(&self) -> u64 {
        self.version
    }

    /// Whether the view is released.
    #[getter]
    fn released(&self) -> PyResult<bool> {
        self.home.check()?;
        Ok(self.state.lock().view.is_none())
    }

    /// Releases the memory. A second call has no effect. Raises BufferError while a memoryview or an array
    /// of the view exists.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.home.check()?;
        let mut state = self.state.lock();
        if state.lent > 0 {
            return Err(PyBufferError::new_err(format!(
                "{} buffers of the view are in use",
                state.lent
            )));
        }
        let view = state.view.take();
        drop(state);
        py.detach(|| drop(view));
        Ok(())
    }

    fn __len__(&self) -> usize {
        self.length
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _exception: &Bound<'_, pyo3::types::PyTuple>,
    ) -> PyResult<()> {
        self.release(py)
    }

    /// # Safety
    ///
    /// Called only by the interpreter, with a buffer to fill in.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        buffer: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let start = this.lend()?;
        let filled = ffi::Py_ssize_t::try_from(this.length).map(|length| {
            // SAFETY: the interpreter passes a buffer to fill in. The memory stays until the view is dropped.
            // The drop waits for the buffers in use, because each buffer refers to `slf`.
            unsafe { ffi::PyBuffer_FillInfo(buffer, slf.as_ptr(), start.cast(), length, 1, flags) }
        });
        if matches!(filled, Ok(0)) {
            return Ok(());
        }
        this.state.lock().lent -= 1;
        filled?;
        Err(PyErr::fetch(slf.py()))
    }

    /// # Safety
    ///
    /// Called only by the interpreter, once for each filled buffer.
    unsafe fn __releasebuffer__(&self, _buffer: *mut ffi::Py_buffer) {
        // In a child made by fork a missing thread may hold the lock.
        if self.home.is_here() {
            self.state.lock().lent -= 1;
        }
    }

    fn __repr__(&self) -> String {
        format!("<kvpool.View of {} bytes>", self.length)
    }
}
