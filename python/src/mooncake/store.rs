//! The base of `mooncake.store`: a store whose methods return Mooncake's codes.
//!
//! ```text
//!  mooncake.store.MooncakeDistributedStore        names, defaults, shapes                (Python)
//!        │
//!  ObjectStore ── args, lent ── the arguments, and the memory lent for one call
//!        │
//!  Pool ┬ Client      put, get, exist, remove            (kvpool-client)
//!       ├ Memory      registered ranges
//!       ├ Segments    segments of this process           (kvpool-store-node)
//!       ├ GetSessions keys leased from start to end
//!       └ PutSessions blocks written range by range
//! ```
//!
//! No method raises an exception for the outcome of a key. A wrong type raises one, and so does the use of a store
//! in a child made by fork. A store that is not set up, or is closed, returns the code of bad parameters.

mod args;
mod codes;
mod get_sessions;
mod handle;
mod lent;
mod pool;
mod put_sessions;
mod queries;
mod ranges;
mod replica_tasks;
mod segments;
mod session_calls;
mod setup;
mod transfers;

pub(crate) use handle::BufferHandle;

use crate::home::drop_aside;
use parking_lot::RwLock;
use pool::Pool;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A store. It is not set up at first, then connected to a pool, then closed.
#[pyclass(frozen, module = "kvpool._native")]
#[derive(Default)]
pub(crate) struct ObjectStore {
    pool: RwLock<Option<Arc<Pool>>>,
    /// The id of the process that set the store up; 0 before. It is read before any lock: in a child made by
    /// fork a missing thread could hold the lock.
    process: AtomicU32,
}

thread_local! {
    /// The reason of the last failed call of this thread, where its code does not tell it. Threads share a
    /// store, so the reason is kept for each thread.
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

impl ObjectStore {
    /// The pool; `None` while the store is not set up. Fails in a child made by fork. Every call begins here,
    /// so this forgets the reason of an earlier failure.
    fn pool(&self) -> PyResult<Option<Arc<Pool>>> {
        LAST_ERROR.with_borrow_mut(String::clear);
        match self.process.load(Ordering::Acquire) {
            0 => {
                self.remember(Some("the store is not set up, or is closed".into()));
                Ok(None)
            }
            process if process == std::process::id() => Ok(self.pool.read().clone()),
            process => Err(PyRuntimeError::new_err(format!(
                "process {process} set up this store, and this process is its fork; \
                 start processes by spawn, or create stores after the fork"
            ))),
        }
    }

    /// Keeps the reason of a failure for [`ObjectStore::last_error`] in the same thread.
    #[allow(
        clippy::unused_self,
        reason = "the reason is the last of a call of a store"
    )]
    fn remember(&self, why: Option<String>) {
        if let Some(why) = why {
            LAST_ERROR.set(why);
        }
    }
}

impl Drop for ObjectStore {
    fn drop(&mut self) {
        // A store that was not closed ends here as in `close`. In a child made by fork its pool leaves the
        // parts alone.
        drop_aside(self.pool.get_mut().take());
    }
}

/// Runs `work` without the interpreter's lock, so that other Python threads run.
fn aside<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    py.detach(work)
}

/// Runs `work` with lent memory and without the interpreter's lock. Waits until no transfer uses the memory.
fn aside_with<T: Send>(py: Python<'_>, lent: lent::Lent<'_>, work: impl FnOnce() -> T + Send) -> T {
    py.detach(|| {
        // A panic must not end the wait: the owner of the memory would free it while a transfer uses it.
        let done = catch_unwind(AssertUnwindSafe(work));
        lent.returned();
        done.unwrap_or_else(|panic| resume_unwind(panic))
    })
}
