//! Leases, and the prefixes that they are on.

use crate::errors::Fault;
use crate::home::{ForkGuarded, Home, drop_aside};
use crate::pool::open::Connection;
use kvpool_client::blocking;
use parking_lot::Mutex;
use pyo3::prelude::*;
use std::sync::Arc;

/// A lease: the master does not evict its blocks while it runs.
///
/// A `with` statement releases it at the end; otherwise it expires. `len()` is the number of its keys.
#[pyclass(frozen, module = "kvpool")]
pub(crate) struct Lease {
    home: Home,
    pool: Arc<Connection>,
    lease: Mutex<Option<ForkGuarded<blocking::Lease>>>,
}

impl Lease {
    pub(crate) fn new(pool: Arc<Connection>, lease: blocking::Lease) -> Self {
        let lease = ForkGuarded::new(lease);
        Self {
            home: lease.home(),
            pool,
            lease: Mutex::new(Some(lease)),
        }
    }

    /// Looks at the lease; `None` when it is released, or being renewed.
    fn look<T>(&self, at: impl FnOnce(&kvpool_client::Lease) -> T) -> Result<Option<T>, Fault> {
        self.home.check()?;
        let lease = self.lease.lock();
        let held = lease.as_ref().map(ForkGuarded::get).transpose()?;
        Ok(held.map(|lease| at(lease.get())))
    }

    /// Takes the lease out, so that no lock is held while the master is asked.
    fn take(&self) -> Result<Option<ForkGuarded<blocking::Lease>>, Fault> {
        self.home.check()?;
        Ok(self.lease.lock().take())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let lease = self.lease.get_mut().take();
        if self.home.is_here() {
            drop_aside(lease);
        } else {
            std::mem::forget(lease);
        }
    }
}

#[pymethods]
impl Lease {
    /// Extends the lease by the master's full lease TTL. Returns how many blocks left the lease, because their
    /// lease had expired. Raises ClosedError if the lease is released or the pool closed. Raises an Error when
    /// the master cannot be asked; the lease then runs on unchanged.
    fn renew(&self, py: Python<'_>) -> PyResult<usize> {
        self.home.check()?;
        self.pool.get()?;
        let Some(mut lease) = self.take()? else {
            return Err(Fault::closed("the lease was released, or is being renewed").into());
        };
        let (lease, renewed) = py.detach(|| {
            let renewed = lease.get_mut().renew();
            (lease, renewed)
        });
        *self.lease.lock() = Some(lease);
        Ok(renewed.map_err(Fault::from)?)
    }

    /// Ends the lease, so that its blocks may be evicted. A second release has no effect. Raises an Error when
    /// the master cannot be told; the lease then expires.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let Some(lease) = self.take()? else {
            return Ok(());
        };
        self.pool.get()?;
        let released = py.detach(|| lease.into_inner().map(blocking::Lease::release));
        if let Some(released) = released {
            released.map_err(Fault::from)?;
        }
        Ok(())
    }

    /// Seconds until the first of the lease's blocks may be evicted; 0 after that.
    #[getter]
    fn left(&self) -> PyResult<f64> {
        let left = self.look(|lease| lease.left().as_secs_f64())?;
        Ok(left.unwrap_or_default())
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.look(kvpool_client::Lease::len)?.unwrap_or_default())
    }

    /// Always true: a lease on no block is a lease too.
    fn __bool__(&self) -> bool {
        true
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

    fn __repr__(&self) -> PyResult<String> {
        Ok(format!(
            "<kvpool.Lease on {} blocks, {:.1} s left>",
            self.__len__()?,
            self.left()?
        ))
    }
}

/// The leading blocks of a chain that are present: their number `blocks`, and the `lease` on them.
///
/// A `with` statement releases the lease at the end.
#[pyclass(frozen, get_all, module = "kvpool")]
pub(crate) struct Prefix {
    blocks: usize,
    lease: Py<Lease>,
}

impl Prefix {
    pub(crate) fn new(
        py: Python<'_>,
        pool: Arc<Connection>,
        prefix: blocking::Prefix,
    ) -> PyResult<Self> {
        Ok(Self {
            blocks: prefix.blocks,
            lease: Py::new(py, Lease::new(pool, prefix.lease))?,
        })
    }
}

#[pymethods]
impl Prefix {
    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _exception: &Bound<'_, pyo3::types::PyTuple>,
    ) -> PyResult<()> {
        self.lease.get().release(py)
    }

    fn __repr__(&self) -> String {
        format!("<kvpool.Prefix of {} blocks>", self.blocks)
    }
}
