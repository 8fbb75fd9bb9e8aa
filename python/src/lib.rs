//! The native half of the Python package `kvpool`.
//!
//! ```text
//!  kvpool.Pool, kvpool.aio        mooncake.store          mooncake.engine      (Python)
//!        │                            │                        │
//!  kvpool._native: pool               store                    engine          (this crate)
//!        │                            │                        │
//!        └──────── kvpool-client ─────┘ (+ kvpool-store-node)  kvpool-transport
//! ```
//!
//! Every call that can wait lets other Python threads run meanwhile ([`pyo3::Python::detach`]), and has
//! a deadline; signals are heard meanwhile (`interrupts`). Memory that a caller names is lent for the length
//! of the call only (`loan`).
//!
//! ADR 0016 says why there is one module and two wheels.

mod engine;
mod errors;
mod home;
mod interrupts;
mod keys;
mod loan;
mod logs;
mod memory;
mod places;
mod pool;
mod store;
mod view;

use pyo3::prelude::*;

/// The module `kvpool._native`: what the package's own modules are made of, not for callers.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::engine::PeerEngine;
    #[pymodule_export]
    use crate::keys::{Namespace, chain_keys};
    #[pymodule_export]
    use crate::pool::{
        Description, Lease, Limits, Listed, Listing, Node, Pool, Prefix, Registration, Replica,
        Segment, Stats,
    };
    #[pymodule_export]
    use crate::store::{BufferHandle, ObjectStore};
    #[pymodule_export]
    use crate::view::View;
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::logs::start(module.py())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
