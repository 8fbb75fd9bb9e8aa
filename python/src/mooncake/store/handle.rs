//! A block's bytes through Python's buffer protocol: in place on the node, or a copy.

// UNSAFETY: fills in the structure of the buffer protocol. The exporting object keeps the memory, and the
// structure holds a reference to that object.
#![allow(unsafe_code, reason = "the buffer protocol is a C structure")]

use crate::home::drop_aside;
use kvpool_transport::Slice;
use kvpool_types::Length;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::c_int;

/// The bytes of one block, read-only. They stay as long as this object or a memoryview of it lives.
#[pyclass(frozen, module = "mooncake.store")]
pub(crate) struct BufferHandle {
    /// `Some` until the drop.
    memory: Option<Slice>,
    length: u64,
    in_place: bool,
    /// The process that made the handle. A child made by fork does not have memory that is in place.
    process: u32,
}

impl BufferHandle {
    pub(super) fn new(memory: Slice, in_place: bool) -> Self {
        Self {
            length: memory.length().0,
            memory: Some(memory),
            in_place,
            process: std::process::id(),
        }
    }

    /// Whether this process has the memory.
    fn is_here(&self) -> bool {
        !self.in_place || self.process == std::process::id()
    }

    /// The address of the first byte; null where the memory is not mapped.
    fn start(&self) -> *mut u8 {
        match &self.memory {
            Some(memory) if self.is_here() => memory.as_ptr(),
            _ => std::ptr::null_mut(),
        }
    }
}

impl Drop for BufferHandle {
    fn drop(&mut self) {
        let memory = self.memory.take();
        if !self.is_here() {
            // A child made by fork must not release a view that its parent reads.
            std::mem::forget(memory);
        } else if self.in_place {
            // The release tells the node, so it runs without the interpreter's lock.
            drop_aside(memory);
        }
    }
}

#[pymethods]
impl BufferHandle {
    /// The address of the first byte; 0 in a child made by fork, which does not have the memory.
    fn ptr(&self) -> usize {
        self.start().expose_provenance()
    }

    /// The length in bytes.
    fn size(&self) -> u64 {
        self.length
    }

    /// Whether the bytes are read in place, in a store node's memory. False for a copy.
    #[getter]
    fn in_place(&self) -> bool {
        self.in_place
    }

    fn __len__(&self) -> usize {
        Length(self.length).as_usize()
    }

    fn __repr__(&self) -> String {
        let how = if self.in_place { "in place" } else { "copied" };
        format!("<BufferHandle of {} bytes, {how}>", self.length)
    }

    /// # Safety
    ///
    /// Called by the interpreter, with a structure to fill in.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let handle = slf.get();
        if !handle.is_here() {
            return Err(PyBufferError::new_err(
                "the buffer is in memory that a forked child does not have",
            ));
        }
        let length = ffi::Py_ssize_t::try_from(handle.length)
            .map_err(|_| PyBufferError::new_err("the block exceeds the addressable memory"))?;
        const READ_ONLY: c_int = 1;
        // SAFETY: the memory is `length` bytes that live as long as this object, and the structure holds a
        // reference to the object. The buffer is read-only, as views are.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                handle.start().cast(),
                length,
                READ_ONLY,
                flags,
            )
        };
        if filled == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(slf.py()))
        }
    }
}
