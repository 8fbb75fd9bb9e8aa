//! Leases, and the prefixes under lease.

use crate::errors::Fault;
use crate::home::{ForkGuarded, Home, drop_aside};
use crate::loan::{deadline, left};
use crate::pool::open::Connection;
use kvpool_client::blocking;
use parking_lot::Mutex;
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A lease: while it runs, the master does not evict its blocks.
///
/// A `with` statement releases it at the end; otherwise it expires. `len()` is the number of its keys.
#[pyclass(frozen, module = "kvpool")]
pub(crate) struct Lease {
    home: Home,
    pool: Arc<Connection>,
    state: Mutex<State>,
}

/// The holder of the lease.
enum State {
    Held(ForkGuarded<blocking::Lease>),
    /// The lease is with the call that renews it. No lock is held while the master is asked.
    Renewing {
        /// The time at which its first block may be evicted, unless the renewal succeeds.
        until: Instant,
        /// The number of its keys before the renewal.
        len: usize,
    },
    /// The lease is released, or the call that renews it will release it.
    Released,
}

impl Lease {
    pub(crate) fn new(pool: Arc<Connection>, lease: blocking::Lease) -> Self {
        let lease = ForkGuarded::new(lease);
        Self {
            home: lease.home(),
            pool,
            state: Mutex::new(State::Held(lease)),
        }
    }

    /// Takes the lease out for its renewal.
    fn begin_renewal(&self) -> Result<ForkGuarded<blocking::Lease>, Fault> {
        self.home.check()?;
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, State::Released) {
            State::Held(lease) => {
                let held = lease.get()?.get();
                *state = State::Renewing {
                    until: deadline(held.left()),
                    len: held.len(),
                };
                Ok(lease)
            }
            other => {
                *state = other;
                Err(Fault::closed("the lease was released, or is being renewed"))
            }
        }
    }

    /// Puts the lease back after its renewal. Returns the lease if it was released meanwhile.
    fn end_renewal(
        &self,
        lease: ForkGuarded<blocking::Lease>,
    ) -> Option<ForkGuarded<blocking::Lease>> {
        let mut state = self.state.lock();
        if matches!(*state, State::Released) {
            return Some(lease);
        }
        *state = State::Held(lease);
        None
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let state = std::mem::replace(self.state.get_mut(), State::Released);
        if self.home.is_here() {
            drop_aside(state);
        } else {
            std::mem::forget(state);
        }
    }
}

#[pymethods]
impl Lease {
    /// Extends the lease by the master's full lease TTL. Returns the number of blocks that left the lease because
    /// their lease had expired. Raises ClosedError if the lease was released, if the pool is closed, or if another
    /// thread renews the lease. A release during the renewal raises ClosedError too. Raises an Error when the
    /// master cannot be asked; the lease then continues unchanged.
    fn renew(&self, py: Python<'_>) -> PyResult<usize> {
        self.home.check()?;
        self.pool.get()?;
        let mut lease = self.begin_renewal()?;
        let renewed = py.detach(move || {
            let renewed = lease.get_mut().renew().map_err(Fault::from);
            let Some(lease) = self.end_renewal(lease) else {
                return renewed;
            };
            let released = lease.into_inner().map(blocking::Lease::release);
            if let Some(Err(error)) = released {
                tracing::debug!(%error, "lease not released after its renewal, it expires by itself");
            }
            Err(Fault::closed("the lease was released during its renewal"))
        });
        Ok(renewed?)
    }

    /// Ends the lease, so that its blocks may be evicted. A second release has no effect. During a renewal in
    /// another thread, that thread releases the lease. Raises an Error when the master cannot be told, and
    /// ClosedError for a closed pool; the lease then expires.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        self.home.check()?;
        let before = std::mem::replace(&mut *self.state.lock(), State::Released);
        let State::Held(lease) = before else {
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
        self.home.check()?;
        let left = match &*self.state.lock() {
            State::Held(lease) => lease.get()?.get().left(),
            State::Renewing { until, .. } => left(*until),
            State::Released => Duration::ZERO,
        };
        Ok(left.as_secs_f64())
    }

    fn __len__(&self) -> PyResult<usize> {
        self.home.check()?;
        Ok(match &*self.state.lock() {
            State::Held(lease) => lease.get()?.get().len(),
            State::Renewing { len, .. } => *len,
            State::Released => 0,
        })
    }

    /// Always true: a lease on no block is a lease too, although its `len()` is 0.
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
