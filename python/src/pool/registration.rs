//! Memory that is registered for longer than one call.

// UNSAFETY: registers memory by its address. The registration holds the buffer behind it. The caller promises
// that the memory of a tensor or an `(address, length)` pair stays.
#![allow(unsafe_code, reason = "memory is registered by its address")]

use crate::errors::Fault;
use crate::home::Home;
use crate::pool::buffers::{Named, Range, Taken, Use, device_slice, name};
use crate::pool::open::{Open, OpenHold};
use parking_lot::Mutex;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// Memory that is registered with the RDMA ports of this host, so that no call must register it again.
///
/// Without RDMA it has no effect. It ends with `unregister()`, at the end of a `with` statement, or when
/// it is garbage. The object that owns the memory stays alive until then.
#[pyclass(frozen, module = "kvpool")]
pub(crate) struct Registration {
    home: Home,
    range: Range,
    held: Mutex<Option<Held>>,
}

/// The objects that live as long as the registration.
struct Held {
    open: OpenHold,
    _buffer: Option<Taken>,
    _object: Py<PyAny>,
}

impl Registration {
    pub(crate) fn new(open: OpenHold, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let named = name(object, Use::Write)?.ok_or_else(|| {
            PyTypeError::new_err(
                "what is registered is an object with the buffer protocol, a tensor, or an \
                 (address, length) pair",
            )
        })?;
        let Named { range, taken } = named?;
        let inside = open.get()?;
        object.py().detach(|| register(inside, range))?;
        Ok(Self {
            home: open.home(),
            range,
            held: Mutex::new(Some(Held {
                open,
                _buffer: taken,
                _object: object.clone().unbind(),
            })),
        })
    }

    /// Ends the registration and waits until no transfer uses the memory, without the interpreter's lock. If a
    /// transfer still uses the memory, the registration stays, and the next call waits again.
    fn end(&self, py: Python<'_>) -> Result<(), Fault> {
        self.home.check()?;
        let ended = py.detach(|| -> Result<Option<Held>, Fault> {
            // The lock is held until the transfers have ended, so that no caller takes the memory for free
            // before.
            let mut held = self.held.lock();
            let Some(Held { open, .. }) = held.as_ref() else {
                return Ok(None);
            };
            let open = open.get()?;
            let address = self.range.address;
            open.memory.unregister(address).map_err(Fault::still_lent)?;
            open.registered.lock().remove(&address);
            Ok(held.take())
        });
        ended.map(drop)
    }

    /// Keeps the objects for ever, because a transfer still uses the memory.
    fn keep(&mut self) {
        let Some(held) = self.held.get_mut().take() else {
            return;
        };
        if let Ok(open) = held.open.get() {
            open.registered.lock().remove(&self.range.address);
        }
        std::mem::forget(held);
    }
}

fn register(open: &Open, range: Range) -> Result<(), Fault> {
    let Range {
        address, length, ..
    } = range;
    if range.is_device {
        // Without this GPU the address would be taken for host memory.
        device_slice(open, range)?;
    }
    if !open.registered.lock().insert(address) {
        return Err(Fault::invalid(format!(
            "memory at {address:#x} is already registered"
        )));
    }
    let with_ports = |memory: &_| open.client.register_buffer(memory);
    // SAFETY: the registration holds the owner of the memory, or the caller promises that the memory stays.
    let registered = unsafe { open.memory.register(address, length, with_ports) };
    registered.map_err(|error| {
        open.registered.lock().remove(&address);
        Fault::invalid(error.to_string())
    })
}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.home.is_here() {
            std::mem::forget(self.held.get_mut().take());
            return;
        }
        if let Err(fault) = Python::attach(|py| self.end(py)) {
            tracing::warn!(%fault, "cannot unregister memory");
            self.keep();
        }
    }
}

#[pymethods]
impl Registration {
    /// The address of the memory.
    #[getter]
    fn address(&self) -> usize {
        self.range.address
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.range.length)?)
    }

    /// Ends the registration when no transfer uses the memory any more, for every thread that calls it.
    /// Afterwards it has no effect.
    fn unregister(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.end(py)?)
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
        self.unregister(py)
    }

    fn __repr__(&self) -> String {
        let Range {
            address, length, ..
        } = self.range;
        format!("<kvpool.Registration of {length} bytes at {address:#x}>")
    }
}
