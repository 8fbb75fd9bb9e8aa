//! The memory that a caller registered, and loans from it.

use crate::loan::{GRACE, InUse, Loan, StillLent};
use crate::mapped::{Lookup, Use};
use kvpool_transport::Slice;
use kvpool_transport::gpu::{self, CopyEngine, DeviceRange, Side};
use kvpool_transport::rdma::RegisteredBuffer;
use kvpool_types::{Length, Offset};
use parking_lot::Mutex;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// The registered memory, by address. Calls borrow from it.
#[derive(Default)]
pub(crate) struct Memory {
    registered: Mutex<BTreeMap<usize, Registered>>,
    /// The GPU driver, which tells device memory from host memory. Set once the process uses GPUs.
    gpus: OnceLock<Arc<dyn CopyEngine>>,
}

/// The registration at one address.
struct Registered {
    /// `None` for a range of a GPU's memory: the driver knows the range.
    host: Option<Host>,
    /// Ranges that were registered at this address before and that transfers may still use.
    earlier: Vec<InUse>,
    /// Whether the registration has ended. It is kept while transfers may use its memory.
    is_over: bool,
}

/// A registered range of host memory.
struct Host {
    memory: Slice,
    /// Whether the processor may write the whole range.
    is_writable: bool,
    /// Keeps the range's pages registered with the RDMA ports of this host.
    with_ports: RegisteredBuffer,
    /// Tells when no transfer uses the range any more.
    loan: Loan,
}

impl Registered {
    /// Whether the registration and all use of its memory have ended.
    fn is_gone(&self) -> bool {
        self.is_over && self.earlier.iter().all(InUse::has_ended)
    }

    /// Ends the registration. Returns the memory that transfers may still use.
    fn end(self) -> Vec<InUse> {
        let Self {
            host, mut earlier, ..
        } = self;
        earlier.extend(host.map(|host| {
            drop((host.with_ports, host.memory));
            host.loan.end()
        }));
        earlier.retain(|memory| !memory.has_ended());
        earlier
    }
}

/// Waits until no transfer uses the memory, at the latest until `until`.
fn ended_by(until: Instant, memory: &[InUse]) -> Result<(), StillLent> {
    match memory.iter().find(|one| !one.has_ended_by(until)) {
        Some(used) => Err(StillLent(used.clone())),
        None => Ok(()),
    }
}

/// Why a range was not registered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegisterError {
    /// The range is empty, or some of it is not readable memory.
    #[error("{length} bytes at {address:#x} are not a valid memory range")]
    NoMemory {
        /// The address of the range.
        address: usize,
        /// Its length in bytes.
        length: u64,
    },
    /// The system refused, for example because of a limit on locked memory.
    #[error("cannot register memory: {0}")]
    Refused(#[from] std::io::Error),
}

impl Memory {
    /// Finds out whether the process uses GPUs. Call it at the start of a call that takes addresses: an address
    /// does not show that it is a GPU's.
    pub(crate) fn look_for_gpus(&self) {
        if self.gpus.get().is_none()
            && let Some(gpus) = gpu::in_use()
        {
            let _found_by_another_thread_too = self.gpus.set(gpus);
        }
    }

    /// The owner of a range: the host, a GPU or neither. Known only as far as [`Memory::look_for_gpus`] has
    /// found GPUs.
    pub(crate) fn side(&self, address: usize, length: u64) -> Side {
        let range = DeviceRange {
            address: address as u64,
            length: Length(length),
        };
        let gpus = self.gpus.get();
        gpus.map_or(Side::Host, |gpus| gpus.side_of(range))
    }

    /// Registers a range. `with_ports` registers it with the RDMA ports. The range replaces an earlier one with
    /// the same start. All pages of host memory are checked.
    ///
    /// # Safety
    ///
    /// The pages of the range must stay mapped, with the same rights, until [`Memory::unregister`] has returned
    /// or this value is dropped.
    #[allow(unsafe_code, reason = "passes the caller's promise on")]
    pub(crate) unsafe fn register(
        &self,
        address: usize,
        length: u64,
        with_ports: impl FnOnce(&Slice) -> std::io::Result<RegisteredBuffer>,
    ) -> Result<(), RegisterError> {
        self.look_for_gpus();
        let side = self.side(address, length);
        let host = if let Side::Gpu(_) = side {
            None
        } else {
            let loan = Loan::new();
            // SAFETY: the caller's promise covers the whole life of `loan`.
            let memory = unsafe { loan.lend(address, length) }
                .filter(|_| length > 0 && side == Side::Host)
                .ok_or(RegisterError::NoMemory { address, length })?;
            let lookup = Lookup::default();
            if !lookup.allows(address, length, Use::Read) {
                return Err(RegisterError::NoMemory { address, length });
            }
            Some(Host {
                is_writable: lookup.allows(address, length, Use::ReadWrite),
                with_ports: with_ports(&memory)?,
                memory,
                loan,
            })
        };
        let mut registered = self.registered.lock();
        let earlier = registered.remove(&address);
        let earlier = earlier.map(Registered::end).unwrap_or_default();
        registered.insert(
            address,
            Registered {
                host,
                earlier,
                is_over: false,
            },
        );
        Ok(())
    }

    /// Ends the registration of the range that begins at `address`, and waits until no transfer uses the range.
    /// Returns false without such a registration. Calls for one address wait together. Call it without the
    /// interpreter's lock.
    pub(crate) fn unregister(&self, address: usize) -> Result<bool, StillLent> {
        let used = {
            let mut registered = self.registered.lock();
            let Some(removed) = registered.remove(&address) else {
                return Ok(false);
            };
            let used = removed.end();
            if !used.is_empty() {
                // Later calls for this address must find the memory that they wait for.
                registered.insert(
                    address,
                    Registered {
                        host: None,
                        earlier: used.clone(),
                        is_over: true,
                    },
                );
            }
            used
        };
        ended_by(Instant::now() + GRACE, &used)?;
        let mut registered = self.registered.lock();
        // Another registration may have begun at this address meanwhile.
        if registered.get(&address).is_some_and(Registered::is_gone) {
            registered.remove(&address);
        }
        Ok(true)
    }

    /// Ends all registrations, and waits a limited time until no transfer uses the memory. Returns the
    /// addresses of the ranges that are still in use. Call it without the interpreter's lock.
    pub(crate) fn unregister_all(&self) -> Vec<usize> {
        let until = Instant::now() + GRACE;
        let removed = std::mem::take(&mut *self.registered.lock());
        removed
            .into_iter()
            .filter_map(|(address, range)| {
                ended_by(until, &range.end()).is_err().then_some(address)
            })
            .collect()
    }

    /// Lends a range of host memory for a call. Uses the registered range that contains it, if there is one.
    ///
    /// `check` is the access to check. It is `None` for memory that was checked already, or that an object's
    /// buffer keeps mapped.
    ///
    /// # Errors
    ///
    /// The range is not host memory: it is a GPU's, or neither's. Or some of it is not mapped for that access.
    ///
    /// # Safety
    ///
    /// As for [`Loan::lend`].
    #[allow(unsafe_code, reason = "passes the caller's promise on")]
    pub(crate) unsafe fn lend(
        &self,
        loan: &Loan,
        address: usize,
        length: u64,
        check: Option<(&Lookup, Use)>,
    ) -> Result<Slice, Side> {
        if let Some((part, is_writable)) = self.registered_part(address, length) {
            if !is_writable && matches!(check, Some((_, Use::ReadWrite))) {
                return Err(Side::Neither);
            }
            return Ok(loan.lend_part(part));
        }
        match self.side(address, length) {
            Side::Host if check.is_some_and(|(at, how)| !at.allows(address, length, how)) => {
                Err(Side::Neither)
            }
            // SAFETY: the caller's promise is this function's own.
            Side::Host => unsafe { loan.lend(address, length) }.ok_or(Side::Neither),
            other => Err(other),
        }
    }

    /// The range as a part of the registered range that contains it.
    pub(crate) fn part(&self, address: usize, length: u64) -> Option<Slice> {
        let found = self.registered_part(address, length);
        found.map(|(part, _is_writable)| part)
    }

    /// As [`Memory::part`], with whether the registered range is writable.
    fn registered_part(&self, address: usize, length: u64) -> Option<(Slice, bool)> {
        let registered = self.registered.lock();
        let (from, holder) = registered.range(..=address).next_back()?;
        let host = holder.host.as_ref()?;
        let offset = u64::try_from(address - from).ok()?;
        let part = host.memory.slice(Offset(offset), Length(length))?;
        Some((part, host.is_writable))
    }
}

/// Whether a range is host memory that Python can read or, with `write`, also write. Memory of a GPU is not.
#[pyfunction]
pub(crate) fn is_host_memory(address: u64, length: u64, write: bool) -> bool {
    let Ok(address) = usize::try_from(address) else {
        return false;
    };
    if length == 0 {
        return true;
    }
    let memory = Memory::default();
    memory.look_for_gpus();
    let how = if write { Use::ReadWrite } else { Use::Read };
    memory.side(address, length) == Side::Host && Lookup::default().allows(address, length, how)
}
