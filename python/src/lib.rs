//! The native half of the Python package `kvpool`.
//!
//! ```text
//!  kvpool.Pool, kvpool.aio   mooncake.store            mooncake.engine    kvpool.handoff (Python)
//!        │                       │                         │                 │
//!  pool                     mooncake::store           mooncake::engine    handoff  (this crate)
//!        │                       │                         │                 │
//!        └──── kvpool-client ────┘ (+ kvpool-store-node)  kvpool-transport  kvpool-handoff
//! ```
//!
//! Every call that can wait releases the interpreter lock ([`pyo3::Python::detach`]) and has a deadline. While it
//! waits, Python's signal handlers run (`interrupts`). A caller's memory is lent for the length of one call
//! (`loan`). `mooncake` is the only module that knows Mooncake's names and codes.
//!
//! ADR 0016 says why there is one module and two wheels.

mod errors;
mod handoff;
mod home;
mod interrupts;
mod keys;
mod loan;
mod logs;
mod mapped;
mod memory;
mod mooncake;
mod places;
mod pool;
mod view;

use pyo3::prelude::*;

/// The module `kvpool._native`, the base of the package's own modules. Not for other callers.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::errors::MemoryUse;
    #[pymodule_export]
    use crate::handoff::{
        HandoffBootstrap, HandoffReceiving, HandoffSending, HandoffSession, handoff_aux_layout,
    };
    #[pymodule_export]
    use crate::keys::{Namespace, chain_keys};
    #[pymodule_export]
    use crate::memory::is_host_memory;
    #[pymodule_export]
    use crate::mooncake::engine::PeerEngine;
    #[pymodule_export]
    use crate::mooncake::store::{BufferHandle, ObjectStore};
    #[pymodule_export]
    use crate::pool::{
        Description, Lease, Limits, Listed, Listing, NamespaceInfo, Node, Pool, Prefix,
        Registration, Replica, ReplicaTask, Segment, Stats,
    };
    #[pymodule_export]
    use crate::view::View;
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::logs::start(module.py())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
