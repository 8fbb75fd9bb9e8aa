//! The memory that a caller registered, and lending from it.

use crate::loan::{Loan, StillLent};
use kvpool_transport::Slice;
use kvpool_transport::rdma::RegisteredBuffer;
use kvpool_types::{Length, Offset};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Memory by its address: what is registered for longer, and what is lent for a call.
#[derive(Default)]
pub(crate) struct Memory {
    registered: Mutex<BTreeMap<usize, Registered>>,
}

/// One registered range.
struct Registered {
    memory: Slice,
    /// Keeps its pages registered with the RDMA ports of this host.
    _with_ports: RegisteredBuffer,
    /// Says when no transfer uses the range any more.
    loan: Loan,
}

/// Why a range was not registered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegisterError {
    /// It is empty, or no memory can be there.
    #[error("{length} bytes at {address:#x} cannot be memory")]
    NoMemory {
        /// Where it would begin.
        address: usize,
        /// Its length in bytes.
        length: u64,
    },
    /// The system refused, for one because it cannot lock so much memory.
    #[error("memory cannot be registered: {0}")]
    Refused(#[from] std::io::Error),
}

impl Memory {
    /// Registers a range; `with_ports` registers it with the RDMA ports. A range that begins where another
    /// one does takes its place.
    ///
    /// # Safety
    ///
    /// The range must be readable and writable memory until [`Memory::unregister`] has returned or this
    /// value is gone.
    #[allow(unsafe_code, reason = "passes the caller's promise on")]
    pub(crate) unsafe fn register(
        &self,
        address: usize,
        length: u64,
        with_ports: impl FnOnce(&Slice) -> std::io::Result<RegisteredBuffer>,
    ) -> Result<(), RegisterError> {
        let loan = Loan::new();
        // SAFETY: the caller promises it for at least as long as `loan` is out.
        let memory = unsafe { loan.lend(address, length) }
            .filter(|_| length > 0)
            .ok_or(RegisterError::NoMemory { address, length })?;
        let registered = Registered {
            _with_ports: with_ports(&memory)?,
            memory,
            loan,
        };
        self.registered.lock().insert(address, registered);
        Ok(())
    }

    /// Ends the registration of the range that begins at `address`, and waits until no transfer uses it.
    /// False when there is none. To be called without the interpreter's lock.
    pub(crate) fn unregister(&self, address: usize) -> Result<bool, StillLent> {
        let Some(registered) = self.registered.lock().remove(&address) else {
            return Ok(false);
        };
        let Registered {
            memory,
            _with_ports: with_ports,
            loan,
        } = registered;
        drop((with_ports, memory));
        loan.returned()?;
        Ok(true)
    }

    /// Lends a range for a call: as part of a registered one where it lies in one. `None` when it cannot
    /// be memory.
    ///
    /// # Safety
    ///
    /// As for [`Loan::lend`].
    #[allow(unsafe_code, reason = "passes the caller's promise on")]
    pub(crate) unsafe fn lend(&self, loan: &Loan, address: usize, length: u64) -> Option<Slice> {
        if let Some(part) = self.part(address, length) {
            return Some(loan.lend_part(part));
        }
        // SAFETY: the caller's promise is this function's own.
        unsafe { loan.lend(address, length) }
    }

    /// The range as part of the registered one that holds it.
    pub(crate) fn part(&self, address: usize, length: u64) -> Option<Slice> {
        let registered = self.registered.lock();
        let (from, holder) = registered.range(..=address).next_back()?;
        let offset = u64::try_from(address - from).ok()?;
        holder.memory.slice(Offset(offset), Length(length))
    }
}
