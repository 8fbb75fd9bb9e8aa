//! The memory of a caller's blocks, lent for one call. Python objects name it.

// UNSAFETY: takes and releases Python buffers, and lends their memory. A buffer stays in place until it is
// released, so `Buffers` holds it. CUDA streams are named by their handles.
#![allow(
    unsafe_code,
    reason = "the buffer protocol and tensors name memory by its address"
)]

use crate::errors::Fault;
use crate::loan::{Loan, deadline};
use crate::mapped::{self, Lookup};
use crate::places::Placed;
use crate::pool::open::Open;
use kvpool_client::{GpuSlice, Slice};
use kvpool_transport::gpu::{self, Side};
use kvpool_types::{Code, Length};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyBytes, PyInt, PyList, PyMemoryView, PyString, PyTuple};
use std::collections::BTreeSet;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

/// The access of a call to its memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// A put reads blocks from it.
    Read,
    /// A get writes blocks into it.
    Write,
}

/// The memory that one call lends, and its owners.
pub(crate) struct Buffers<'a, 'py> {
    py: Python<'py>,
    open: &'a Open,
    usage: Use,
    loan: Loan,
    lookup: Lookup,
    taken: Vec<Taken>,
    objects: Vec<Bound<'py, PyAny>>,
    /// The streams whose queued work must end first, each with its GPU.
    streams: BTreeSet<(u32, u64)>,
    /// The GPUs whose memory torch may still be working on.
    of_torch: BTreeSet<u32>,
}

/// A range of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) address: usize,
    pub(crate) length: u64,
    /// Whether the object that names the range reports a GPU. An address alone does not show that.
    pub(crate) is_device: bool,
    pub(crate) stream: Stream,
}

/// The stream on which the owner of a GPU's memory works.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    /// The default stream. Copies follow its work anyway.
    Default,
    /// The stream on which torch queues work at the time of the call.
    OfTorch,
    /// The CUDA stream with this handle.
    Named(u64),
}

/// The memory of one block.
pub(crate) type Block = Placed<Vec<Slice>, Vec<GpuSlice>>;

/// One buffer of a block.
type Piece = Placed<Slice, GpuSlice>;

/// A Python buffer. The drop releases it.
pub(crate) struct Taken(Box<ffi::Py_buffer>);

// SAFETY: a buffer is not bound to the thread that took it. Any thread may release it with the interpreter's
// lock held.
unsafe impl Send for Taken {}
// SAFETY: shared references only read the structure.
unsafe impl Sync for Taken {}

impl Taken {
    /// Takes an object's buffer as contiguous bytes. A fault if the object has no contiguous buffer.
    fn new(object: &Bound<'_, PyAny>, usage: Use) -> PyResult<Result<Self, Fault>> {
        let flags = match usage {
            Use::Read => ffi::PyBUF_SIMPLE,
            Use::Write => ffi::PyBUF_WRITABLE,
        };
        let mut buffer = Box::new(MaybeUninit::<ffi::Py_buffer>::uninit());
        // SAFETY: the object is alive, and the call fills the buffer or fails.
        let code = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), buffer.as_mut_ptr(), flags) };
        if code == 0 {
            // SAFETY: the call succeeded, so the buffer is filled.
            return Ok(Ok(Self(unsafe { buffer.assume_init() })));
        }
        let error = PyErr::fetch(object.py());
        let is_about_memory = error.is_instance_of::<PyBufferError>(object.py())
            || error.is_instance_of::<PyValueError>(object.py());
        if !is_about_memory {
            return Err(error);
        }
        let needed = match usage {
            Use::Read => "contiguous",
            Use::Write => "contiguous and writable",
        };
        Ok(Err(Fault::invalid(format!(
            "the memory must be {needed}: {}",
            error.value(object.py())
        ))))
    }

    fn range(&self) -> Range {
        Range {
            address: self.0.buf.expose_provenance(),
            length: u64::try_from(self.0.len).unwrap_or_default(),
            is_device: false,
            stream: Stream::Default,
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        Python::attach(|_| {
            // SAFETY: the buffer was filled by `PyObject_GetBuffer` and has not been given back.
            unsafe { ffi::PyBuffer_Release(&raw mut *self.0) }
        });
    }
}

/// Memory that an object names, with the buffer that keeps it in place.
pub(crate) struct Named {
    pub(crate) range: Range,
    pub(crate) taken: Option<Taken>,
}

/// The memory that an object names: its buffer, a tensor's storage, a GPU array, or an `(address, length)`
/// pair. `None` for any other object.
pub(crate) fn name(
    object: &Bound<'_, PyAny>,
    usage: Use,
) -> PyResult<Option<Result<Named, Fault>>> {
    if let Some(pair) = pair_of(object)? {
        return Ok(Some(pair.map(|range| Named { range, taken: None })));
    }
    // SAFETY: the object is alive.
    if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } != 0 {
        if holds_objects(object)? {
            return Ok(Some(Err(Fault::invalid(
                "an array of Python objects cannot be a block: object addresses are valid only in this process",
            ))));
        }
        let taken = match Taken::new(object, usage) {
            Ok(taken) => taken,
            // CuPy's arrays have the buffer protocol, but refuse to export a buffer.
            Err(refused) => {
                let Some(range) = cuda_array_of(object, usage)? else {
                    return Err(refused);
                };
                let named = range.map(|range| Named { range, taken: None });
                return Ok(Some(named));
            }
        };
        return Ok(Some(taken.map(|taken| Named {
            range: taken.range(),
            taken: Some(taken),
        })));
    }
    if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
        return Ok(None);
    }
    let range = match tensor_of(object)? {
        None => cuda_array_of(object, usage)?,
        tensor => tensor,
    };
    Ok(range.map(|range| range.map(|range| Named { range, taken: None })))
}

/// Whether the bytes are references to Python objects, which no get may overwrite. A numpy array of objects
/// exports its memory as bytes without an error.
fn holds_objects(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    if let Ok(view) = object.cast::<PyMemoryView>() {
        let format = view.getattr(pyo3::intern!(py, "format"))?;
        return Ok(format.cast::<PyString>()?.to_str()?.contains('O'));
    }
    if object.is_instance_of::<PyBytes>() || object.is_instance_of::<PyByteArray>() {
        return Ok(false);
    }
    let Some(dtype) = object.getattr_opt(pyo3::intern!(py, "dtype"))? else {
        return Ok(false);
    };
    match dtype.getattr_opt(pyo3::intern!(py, "hasobject"))? {
        Some(has) => has.is_truthy(),
        None => Ok(false),
    }
}

/// An `(address, length)` pair; `None` for an object that is no tuple of two integers.
fn pair_of(object: &Bound<'_, PyAny>) -> PyResult<Option<Result<Range, Fault>>> {
    let Ok(pair) = object.cast::<PyTuple>() else {
        return Ok(None);
    };
    if pair.len() != 2 {
        return Ok(None);
    }
    let (address, length) = (pair.get_item(0)?, pair.get_item(1)?);
    if !is_integer(&address)? || !is_integer(&length)? {
        return Ok(None);
    }
    let range = || {
        let (address, length) = (address.extract().ok()?, length.extract().ok()?);
        Some(Range {
            address,
            length,
            is_device: false,
            stream: Stream::Default,
        })
    };
    Ok(Some(range().ok_or_else(|| {
        Fault::invalid("an address and a length are ints from 0 to 2**64 - 1")
    })))
}

/// Whether an object is a number with `__index__`. Arrays and tensors have this method too, but are memory. A
/// numpy integer is a number, although it has the buffer protocol.
fn is_integer(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    static INTEGRAL: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if object.is_instance_of::<PyInt>() {
        return Ok(true);
    }
    // SAFETY: the object is alive.
    if unsafe { ffi::PyIndex_Check(object.as_ptr()) } == 0 {
        return Ok(false);
    }
    let py = object.py();
    if object.is_instance(INTEGRAL.import(py, "numbers", "Integral")?)? {
        return Ok(true);
    }
    // SAFETY: the object is alive.
    let has_buffer = unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } != 0;
    Ok(!has_buffer
        && !object.hasattr(pyo3::intern!(py, "data_ptr"))?
        && !object.hasattr(pyo3::intern!(py, "__cuda_array_interface__"))?)
}

/// The storage of a torch tensor. Attributes identify a tensor, so torch is not imported.
fn tensor_of(object: &Bound<'_, PyAny>) -> PyResult<Option<Result<Range, Fault>>> {
    let py = object.py();
    let Some(data_ptr) = object.getattr_opt(pyo3::intern!(py, "data_ptr"))? else {
        return Ok(None);
    };
    let mut is_device = false;
    if let Some(device) = object.getattr_opt(pyo3::intern!(py, "device"))? {
        let kind = device.getattr(pyo3::intern!(py, "type"))?;
        is_device = kind.eq("cuda")?;
        if !is_device && !kind.eq("cpu")? {
            return Ok(Some(Err(Fault::invalid(format!(
                "a tensor must be on the CPU or a CUDA device, this one is on {device}"
            )))));
        }
    }
    let is_contiguous = object.call_method0(pyo3::intern!(py, "is_contiguous"))?;
    if !is_contiguous.is_truthy()? {
        return Ok(Some(Err(Fault::invalid("a tensor must be contiguous"))));
    }
    for is_lazy in [pyo3::intern!(py, "is_conj"), pyo3::intern!(py, "is_neg")] {
        if let Some(is_lazy) = object.getattr_opt(is_lazy)?
            && is_lazy.call0()?.is_truthy()?
        {
            // The memory of such a tensor has other values than the tensor.
            return Ok(Some(Err(Fault::invalid(
                "a tensor must not be a lazy conjugate or negative; use resolve_conj() or resolve_neg()",
            ))));
        }
    }
    let length: u64 = match object.getattr_opt(pyo3::intern!(py, "nbytes"))? {
        Some(nbytes) => nbytes.extract()?,
        None => {
            let count: u64 = object.call_method0(pyo3::intern!(py, "numel"))?.extract()?;
            let size = object.call_method0(pyo3::intern!(py, "element_size"))?;
            count.saturating_mul(size.extract()?)
        }
    };
    let address = data_ptr.call0()?.extract()?;
    Ok(Some(Ok(Range {
        address,
        length,
        is_device,
        stream: Stream::OfTorch,
    })))
}

/// The handles of the streams on which torch queues work now, on these GPUs.
fn streams_of_torch(py: Python<'_>, gpus: &BTreeSet<u32>) -> PyResult<Vec<(u32, u64)>> {
    if gpus.is_empty() {
        return Ok(Vec::new());
    }
    let modules = py.import("sys")?.getattr("modules")?;
    let torch = modules.call_method1("get", ("torch",))?;
    if torch.is_none() {
        return Ok(Vec::new());
    }
    let cuda = torch.getattr("cuda")?;
    let current = |gpu: &u32| {
        let stream = cuda.call_method1("current_stream", (*gpu,))?;
        Ok((*gpu, stream.getattr("cuda_stream")?.extract()?))
    };
    gpus.iter().map(current).collect()
}

/// The memory of a GPU array, as CuPy, Numba and others describe it.
fn cuda_array_of(object: &Bound<'_, PyAny>, usage: Use) -> PyResult<Option<Result<Range, Fault>>> {
    let py = object.py();
    let name = pyo3::intern!(py, "__cuda_array_interface__");
    let Some(shown) = object.getattr_opt(name)? else {
        return Ok(None);
    };
    let (address, is_read_only): (usize, bool) = shown.get_item("data")?.extract()?;
    let shape: Vec<u64> = shown.get_item("shape")?.extract()?;
    let typestr: String = shown.get_item("typestr")?.extract()?;
    let item: Option<u64> = typestr.get(2..).and_then(|size| size.parse().ok());
    let Some(item) = item.filter(|_| !typestr.contains('O')) else {
        let message = format!("elements of type {typestr:?} cannot be bytes of a block");
        return Ok(Some(Err(Fault::invalid(message))));
    };
    let strides = shown.call_method1("get", ("strides",))?;
    // None means that no work must end first.
    let stream = shown.call_method1("get", ("stream",))?;
    let stream = stream
        .extract::<Option<u64>>()?
        .map_or(Stream::Default, Stream::Named);
    let mut length = item;
    let mut is_contiguous = true;
    let strides: Vec<i64> = match strides.is_none() {
        true => Vec::new(),
        false => strides.extract()?,
    };
    for (at, size) in shape.iter().enumerate().rev() {
        let stride = strides.get(at).copied();
        let fits = stride.is_none_or(|stride| u64::try_from(stride) == Ok(length));
        is_contiguous &= fits || *size == 1;
        length = length.saturating_mul(*size);
    }
    Ok(Some(if !is_contiguous {
        Err(Fault::invalid("an array on a GPU must be contiguous"))
    } else if is_read_only && usage == Use::Write {
        Err(Fault::invalid("the array on a GPU is read-only"))
    } else {
        Ok(Range {
            address,
            length,
            is_device: true,
            stream,
        })
    }))
}

impl<'a, 'py> Buffers<'a, 'py> {
    /// A loan of no memory yet.
    pub(crate) fn new(py: Python<'py>, open: &'a Open, usage: Use) -> Self {
        open.memory.look_for_gpus();
        Self {
            py,
            open,
            usage,
            loan: Loan::new(),
            lookup: Lookup::default(),
            taken: Vec::new(),
            objects: Vec::new(),
            streams: BTreeSet::new(),
            of_torch: BTreeSet::new(),
        }
    }

    /// Lends a block: one buffer or a sequence of buffers, all in host memory or all on a GPU. An object that
    /// names no memory raises an exception. Memory without the needed access is a fault of this block alone.
    pub(crate) fn lend(&mut self, block: &Bound<'py, PyAny>) -> PyResult<Result<Block, Fault>> {
        if let Some(named) = name(block, self.usage)? {
            return Ok(named.and_then(|named| {
                Ok(match self.lend_named(block, named)? {
                    Piece::Host(slice) => Block::Host(vec![slice]),
                    Piece::Device(slice) => Block::Device(vec![slice]),
                })
            }));
        }
        if block.is_instance_of::<PyString>() || block.try_iter().is_err() {
            return Err(no_memory(block));
        }
        let (mut on_host, mut on_device) = (Vec::new(), Vec::new());
        for part in block.try_iter()? {
            let part = part?;
            let named = name(&part, self.usage)?.ok_or_else(|| no_memory(&part))?;
            match named.and_then(|named| self.lend_named(&part, named)) {
                Ok(Piece::Host(slice)) => on_host.push(slice),
                Ok(Piece::Device(slice)) => on_device.push(slice),
                Err(fault) => return Ok(Err(fault)),
            }
        }
        Ok(match (on_host.is_empty(), on_device.is_empty()) {
            (_, true) => Ok(Block::Host(on_host)),
            (true, false) => Ok(Block::Device(on_device)),
            (false, false) => Err(Fault::invalid(
                "the buffers of one block are in host memory and in GPU memory; use one kind",
            )),
        })
    }

    fn lend_named(&mut self, object: &Bound<'py, PyAny>, named: Named) -> Result<Piece, Fault> {
        let Named { range, taken } = named;
        let Range {
            address, length, ..
        } = range;
        let memory = &self.open.memory;
        if !range.is_device {
            let how = match self.usage {
                Use::Read => mapped::Use::Read,
                Use::Write => mapped::Use::ReadWrite,
            };
            let check = taken.is_none().then_some((&self.lookup, how));
            // SAFETY: `self` holds a buffer until the loan is returned, and the buffer stays in place as long.
            // For a tensor or a pair the caller promises that the memory stays, and `self` holds the object as
            // long.
            match unsafe { memory.lend(&self.loan, address, length, check) } {
                Ok(slice) => {
                    match taken {
                        Some(taken) => self.taken.push(taken),
                        None => self.objects.push(object.clone()),
                    }
                    return Ok(Piece::Host(slice));
                }
                Err(Side::Gpu(_)) if taken.is_none() => {}
                Err(_) => {
                    let to_what = match self.usage {
                        Use::Read => "read",
                        Use::Write => "written",
                    };
                    return Err(Fault::invalid(format!(
                        "{length} bytes at {address:#x} are not host memory that can be {to_what}"
                    )));
                }
            }
        }
        self.objects.push(object.clone());
        let slice = device_slice(self.open, range)?;
        match range.stream {
            Stream::Default => {}
            Stream::OfTorch => {
                self.of_torch.insert(slice.device());
            }
            Stream::Named(stream) => {
                self.streams.insert((slice.device(), stream));
            }
        }
        Ok(Piece::Device(slice))
    }

    /// Waits for the queued work of the caller's streams, then runs `work` with its deadline, `timeout` from
    /// then. Returns when no transfer uses the memory any more. The interpreter's lock is released meanwhile.
    pub(crate) fn run<T: Send>(
        self,
        timeout: Option<Duration>,
        work: impl FnOnce(Instant) -> T + Send,
    ) -> Result<T, Fault> {
        let timeouts = self.open.client.timeouts();
        let timeout = timeout.unwrap_or(match self.usage {
            Use::Read => timeouts.put,
            Use::Write => timeouts.get,
        });
        let Self {
            py,
            loan,
            taken,
            objects,
            mut streams,
            of_torch,
            ..
        } = self;
        let of_torch = streams_of_torch(py, &of_torch);
        let of_torch = of_torch
            .map_err(|error| Fault::new(Code::Internal, format!("torch names no stream: {error}")));
        streams.extend(of_torch?);
        let (done, returned) = py.detach(|| {
            let waited = streams.into_iter().try_for_each(|(device, stream)| {
                // SAFETY: torch's streams live as long as the process. An object that names a stream in the
                // CUDA array interface promises that the stream exists.
                unsafe { gpu::wait_for_stream(gpu::Device(device), stream) }
            });
            let deadline = deadline(timeout);
            // A panic must not end the wait: the owner of the memory would free it while a transfer uses it.
            let done = waited.map(|()| catch_unwind(AssertUnwindSafe(|| work(deadline))));
            (done, loan.returned_after(deadline))
        });
        if let Err(still_lent) = returned {
            // The memory is never released, because bytes may still arrive there.
            std::mem::forget((taken, objects));
            return Err(Fault::still_lent(still_lent));
        }
        match done {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(panic)) => resume_unwind(panic),
            Err(error) => Err(Fault::new(
                Code::Internal,
                format!("the work queued on a block's stream did not end: {error}"),
            )),
        }
    }
}

/// A range of a GPU's memory, for one call. The driver knows the range, so this registers nothing.
pub(crate) fn device_slice(open: &Open, range: Range) -> Result<GpuSlice, Fault> {
    let Range {
        address, length, ..
    } = range;
    let buffer = open
        .client
        .register_gpu_buffer(address as u64, Length(length));
    let buffer = buffer.map_err(|error| {
        let message = format!("{length} bytes at {address:#x} are no memory of a GPU: {error}");
        Fault::invalid(message)
    })?;
    Ok(buffer.whole())
}

fn no_memory(object: &Bound<'_, PyAny>) -> PyErr {
    let kind = object.get_type();
    PyTypeError::new_err(format!(
        "memory is an object with the buffer protocol, a tensor, an (address, length) pair, or a \
         sequence of these, not {}",
        kind.name()
            .map_or_else(|_| "this".to_owned(), |name| name.to_string())
    ))
}

/// A bytes object without its bytes yet. No other code has it before it is returned.
pub(crate) struct Unwritten(Py<PyBytes>);

impl Unwritten {
    /// A new object of `length` bytes. Raises MemoryError if the memory cannot be allocated.
    pub(crate) fn new(py: Python<'_>, length: Length) -> PyResult<Self> {
        let size = ffi::Py_ssize_t::try_from(length.0).map_err(|_| {
            pyo3::exceptions::PyMemoryError::new_err(
                "cannot allocate memory for a block of this length",
            )
        })?;
        // SAFETY: without bytes to copy, the call makes an object of this length or fails.
        let object = unsafe { ffi::PyBytes_FromStringAndSize(std::ptr::null(), size) };
        // SAFETY: the object is new and owned, or null with an exception set.
        let object = unsafe { Bound::from_owned_ptr_or_err(py, object) }?;
        Ok(Self(object.cast_into::<PyBytes>()?.unbind()))
    }

    /// Lends the object's bytes.
    pub(crate) fn lend(&self, py: Python<'_>, loan: &Loan) -> Option<Slice> {
        let length = self.0.as_bytes(py).len() as u64;
        // SAFETY: the object is a bytes object and alive.
        let start = unsafe { ffi::PyBytes_AsString(self.0.as_ptr()) };
        // SAFETY: the object lives until the loan is returned: the caller waits for the loan before it returns
        // or drops the object. No other code has the object, so none reads the bytes meanwhile.
        unsafe { loan.lend(start.expose_provenance(), length) }
    }

    /// The object after a get of `length` bytes; a copy if the object is longer.
    pub(crate) fn written(self, py: Python<'_>, length: Length) -> Bound<'_, PyBytes> {
        let bytes = self.0.into_bound(py);
        match bytes.as_bytes().get(..length.as_usize()) {
            Some(part) if part.len() < bytes.as_bytes().len() => PyBytes::new(py, part),
            _ => bytes,
        }
    }
}
