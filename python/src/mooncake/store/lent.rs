//! The memory that a Python caller lends for one call: ranges by their addresses, objects with a buffer, and
//! new `bytes`.

// UNSAFETY: lends memory that Python callers name. The caller promises that an address is its own, as
// everywhere in this module's interface. This module keeps objects alive for long enough.
#![allow(
    unsafe_code,
    reason = "Python callers name memory by its address, or by objects"
)]

use super::args::Number;
use super::pool::{Buffers, Parts};
use crate::loan::Loan;
use crate::mapped::{Lookup, Use};
use crate::memory::Memory;
use kvpool_client::GpuSlice;
use kvpool_transport::Slice;
use kvpool_transport::gpu::Side;
use kvpool_types::Length;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::cell::Cell;

/// The memory of one call. Drop every lent slice before you call [`Lent::returned`], which waits for them.
pub(super) struct Lent<'m> {
    pool: &'m Parts,
    loan: Loan,
    /// The access of the call to ranges.
    how: Use,
    lookup: Lookup,
    /// The reason of the first range that could not be lent.
    refused: Cell<Option<String>>,
    /// Objects whose memory is lent, kept until no transfer uses it.
    objects: Vec<PyUntypedBuffer>,
}

impl<'m> Lent<'m> {
    /// A loan of no memory yet.
    pub(super) fn new(pool: &'m Parts, how: Use) -> Self {
        pool.memory.look_for_gpus();
        Self {
            pool,
            loan: Loan::new(),
            how,
            lookup: Lookup::default(),
            refused: Cell::new(None),
            objects: Vec::new(),
        }
    }

    /// The `length` bytes at `address`; `None` if they are not host memory with the needed access.
    pub(super) fn range(&self, address: Number, length: Number) -> Option<Slice> {
        let (address, length) = (usize::try_from(address.value()?).ok()?, length.value()?);
        let memory = &self.pool.memory;
        let check = Some((&self.lookup, self.how));
        // SAFETY: the Python caller promises that the memory stays until the call returns, and each call waits
        // for `returned`. `lend` refuses memory that is not mapped.
        let lent = unsafe { memory.lend(&self.loan, address, length, check) };
        if lent.is_err() {
            let to_what = match self.how {
                Use::Read => "read",
                Use::ReadWrite => "written",
            };
            self.refuse(format!(
                "{length} bytes at {address:#x} are not host memory that can be {to_what}"
            ));
        }
        lent.ok()
    }

    /// Keeps the reason of the first range that could not be lent.
    fn refuse(&self, reason: String) {
        let first = self.refused.take().unwrap_or(reason);
        self.refused.set(Some(first));
    }

    /// The reason of the first range that could not be lent; `None` if all ranges were lent.
    pub(super) fn refusal(&self) -> Option<String> {
        self.refused.take()
    }

    /// The ranges in order, all of host memory or all of one GPU's memory. Returns `None` if the lists differ
    /// in length or a range is invalid. Skips empty ranges.
    pub(super) fn ranges(&self, addresses: &[Number], lengths: &[Number]) -> Option<Buffers> {
        if addresses.len() != lengths.len() {
            return None;
        }
        let mut ranges = Vec::with_capacity(addresses.len());
        for (address, length) in addresses.iter().zip(lengths) {
            if length.value()? > 0 {
                ranges.push((*address, *length));
            }
        }
        let is_on_device = ranges.first().is_some_and(|(address, length)| {
            let at = address.value().and_then(|at| usize::try_from(at).ok());
            at.zip(length.value()).is_some_and(|(at, length)| {
                matches!(self.pool.memory.side(at, length), Side::Gpu(_))
            })
        });
        let ranges = ranges.into_iter();
        if is_on_device {
            let slices = ranges.map(|(address, length)| self.device_range(address, length));
            return slices.collect::<Option<_>>().map(Buffers::Device);
        }
        let slices = ranges.map(|(address, length)| self.range(address, length));
        slices.collect::<Option<_>>().map(Buffers::Host)
    }

    /// The `length` bytes of a GPU's memory at `address`; `None` if they are not a GPU's memory.
    fn device_range(&self, address: Number, length: Number) -> Option<GpuSlice> {
        let length = Length(length.value()?);
        let buffer = self
            .pool
            .client
            .register_gpu_buffer(address.value()?, length);
        buffer.ok().map(|buffer| buffer.whole())
    }

    /// The bytes of an object. The call must only read them.
    pub(super) fn object(&mut self, object: &Bound<'_, PyAny>) -> PyResult<Slice> {
        let buffer = PyUntypedBuffer::get(object).map_err(|_| {
            let kind = object.get_type();
            PyTypeError::new_err(format!("a value must be bytes-like, not {kind}"))
        })?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err(
                "the bytes of a value must be contiguous",
            ));
        }
        let address = buffer.buf_ptr().expose_provenance();
        let length = u64::try_from(buffer.len_bytes()).unwrap_or(u64::MAX);
        // SAFETY: the exported buffer keeps the memory in place, and `objects` keeps it exported until
        // `returned`. A put only reads the memory.
        let slice = unsafe { self.loan.lend(address, length) };
        self.objects.push(buffer);
        slice.ok_or_else(|| PyBufferError::new_err("the value has no bytes in memory"))
    }

    /// A new `bytes` object of `length` bytes, and its memory. Fill the memory before Python code sees the
    /// object.
    pub(super) fn fresh<'py>(
        &self,
        py: Python<'py>,
        length: u64,
    ) -> PyResult<(Bound<'py, PyBytes>, Slice)> {
        let size = pyo3::ffi::Py_ssize_t::try_from(length)
            .map_err(|_| PyBufferError::new_err("the value exceeds the addressable memory"))?;
        // SAFETY: without a source this makes an object with uninitialized bytes, which the caller may fill.
        let made = unsafe { pyo3::ffi::PyBytes_FromStringAndSize(std::ptr::null(), size) };
        // SAFETY: the object is new, so this holds its only reference. Null with an error set becomes an `Err`.
        let object = unsafe { Bound::from_owned_ptr_or_err(py, made) }?;
        let bytes = object.cast_into::<PyBytes>()?;
        // SAFETY: the object is a bytes object, whose bytes stay at this address while it lives. The caller
        // keeps it until `returned`, and no other code has it.
        let address = unsafe { pyo3::ffi::PyBytes_AsString(bytes.as_ptr()) }.expose_provenance();
        // SAFETY: the same reason holds for the memory.
        let slice = unsafe { self.loan.lend(address, length) }
            .ok_or_else(|| PyBufferError::new_err("the value has no bytes in memory"))?;
        Ok((bytes, slice))
    }

    /// Waits until no transfer uses lent memory, without a limit. Call it without the interpreter's lock.
    ///
    /// Callers of Mooncake's interface use the memory again after any answer and any exception.
    pub(super) fn returned(self) {
        let Self { loan, objects, .. } = self;
        loan.returned_at_last();
        drop(objects);
    }
}

/// Registers a range of the caller's memory.
///
/// The Python caller promises that the range stays mapped until it is unregistered or the store is closed.
pub(super) fn register(
    memory: &Memory,
    address: usize,
    length: u64,
    with_ports: impl FnOnce(&Slice) -> std::io::Result<kvpool_transport::rdma::RegisteredBuffer>,
) -> Result<(), crate::memory::RegisterError> {
    // SAFETY: the caller's promise, above.
    unsafe { memory.register(address, length, with_ports) }
}
