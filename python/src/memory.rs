//! The memory that a caller registered, and lending from it.

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

/// Memory by its address: what is registered for longer, and what is lent for a call.
#[derive(Default)]
pub(crate) struct Memory {
    registered: Mutex<BTreeMap<usize, Registered>>,
    /// What knows device memory from host memory, once the process uses GPUs.
    gpus: OnceLock<Arc<dyn CopyEngine>>,
}

/// What is registered at one address.
struct Registered {
    /// `None` for a range of a GPU's memory, which the driver knows by itself.
    host: Option<Host>,
    /// The ranges that were registered at this address before, and that transfers may still use.
    earlier: Vec<InUse>,
    /// Whether the registration has ended. It is kept for what transfers may still use.
    is_over: bool,
}

/// A registered range of host memory.
struct Host {
    memory: Slice,
    /// Whether the processor may write all of it.
    is_writable: bool,
    /// Keeps its pages registered with the RDMA ports of this host.
    with_ports: RegisteredBuffer,
    /// Says when no transfer uses the range any more.
    loan: Loan,
}

impl Registered {
    /// Whether the registration has ended, and all use of its memory too.
    fn is_gone(&self) -> bool {
        self.is_over && self.earlier.iter().all(InUse::has_ended)
    }

    /// Ends the registration: what transfers may still use.
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

/// Waits until no transfer uses the memory, no longer than until then.
fn ended_by(until: Instant, memory: &[InUse]) -> Result<(), StillLent> {
    match memory.iter().find(|one| !one.has_ended_by(until)) {
        Some(used) => Err(StillLent(used.clone())),
        None => Ok(()),
    }
}

/// Why a range was not registered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegisterError {
    /// It is empty, or some of it is no memory that can be read.
    #[error("{length} bytes at {address:#x} are not a valid memory range")]
    NoMemory {
        /// Where it would begin.
        address: usize,
        /// Its length in bytes.
        length: u64,
    },
    /// The system refused, for one because it cannot lock so much memory.
    #[error("cannot register memory: {0}")]
    Refused(#[from] std::io::Error),
}

impl Memory {
    /// To be called at the beginning of a call that takes addresses: finds out whether the process uses
    /// GPUs, whose addresses look like any others.
    pub(crate) fn look_for_gpus(&self) {
        if self.gpus.get().is_none()
            && let Some(gpus) = gpu::in_use()
        {
            let _found_by_another_thread_too = self.gpus.set(gpus);
        }
    }

    /// Whose memory the range is, as far as [`Memory::look_for_gpus`] has found GPUs.
    pub(crate) fn side(&self, address: usize, length: u64) -> Side {
        let range = DeviceRange {
            address: address as u64,
            length: Length(length),
        };
        let gpus = self.gpus.get();
        gpus.map_or(Side::Host, |gpus| gpus.side_of(range))
    }

    /// Registers a range; `with_ports` registers it with the RDMA ports. A range that begins where another
    /// one does takes its place. All pages of host memory are looked up.
    ///
    /// # Safety
    ///
    /// What is mapped in the range must stay mapped, with the same rights, until [`Memory::unregister`] has
    /// returned or this value is gone.
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
            // SAFETY: the caller promises it for at least as long as `loan` is out.
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

    /// Ends the registration of the range that begins at `address`, and waits until no transfer uses it.
    /// False when there is none. A call that finds another one waiting for this waits too. To be called
    /// without the interpreter's lock.
    pub(crate) fn unregister(&self, address: usize) -> Result<bool, StillLent> {
        let used = {
            let mut registered = self.registered.lock();
            let Some(removed) = registered.remove(&address) else {
                return Ok(false);
            };
            let used = removed.end();
            if !used.is_empty() {
                // So that other calls for this address find what they must wait for.
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
        // Another registration may have begun here meanwhile.
        if registered.get(&address).is_some_and(Registered::is_gone) {
            registered.remove(&address);
        }
        Ok(true)
    }

    /// Ends all registrations, and waits until no transfer uses the memory, for a while; where that
    /// begins which is still used then. To be called without the interpreter's lock.
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

    /// Lends a range of host memory for a call: as part of a registered one where it lies in one.
    ///
    /// `check` is the use for which the memory is looked up. It is `None` for memory that was looked up already, or
    /// that an object's buffer keeps mapped.
    ///
    /// # Errors
    ///
    /// The range cannot be host memory: it is a GPU's, or neither's. Or not all of it is mapped for that use.
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

    /// The range as part of the registered one that holds it.
    pub(crate) fn part(&self, address: usize, length: u64) -> Option<Slice> {
        let found = self.registered_part(address, length);
        found.map(|(part, _is_writable)| part)
    }

    /// The same, and whether the registered range can be written.
    fn registered_part(&self, address: usize, length: u64) -> Option<(Slice, bool)> {
        let registered = self.registered.lock();
        let (from, holder) = registered.range(..=address).next_back()?;
        let host = holder.host.as_ref()?;
        let offset = u64::try_from(address - from).ok()?;
        let part = host.memory.slice(Offset(offset), Length(length))?;
        Some((part, host.is_writable))
    }
}

/// Whether a range is memory of the host that Python can read, or also write. Memory of a GPU is not.
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
