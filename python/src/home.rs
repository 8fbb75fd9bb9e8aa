//! The process that an object belongs to.
//!
//! A child made by fork has no threads of its parent, shares its sockets, and lacks its mappings of nodes'
//! memory. So the parent's connections are useless there. A call would wait for ever, and a view would read
//! unmapped memory. Dropping either would send messages in the parent's name.

use crate::errors::Fault;
use pyo3::Python;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// The process in which an object was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Home(u32);

impl Home {
    /// This process.
    pub(crate) fn here() -> Self {
        Self(std::process::id())
    }

    /// Whether this process is still the object's process.
    pub(crate) fn is_here(self) -> bool {
        self.0 == std::process::id()
    }

    /// Fails unless this process is the object's process. Call it before taking any lock: in a child a missing
    /// thread may hold the lock.
    pub(crate) fn check(self) -> Result<(), Fault> {
        if self.is_here() {
            Ok(())
        } else {
            Err(Fault::forked())
        }
    }
}

/// The number of residents of the process, and the id of that process. A child made by fork inherits both
/// values.
static LIVING: AtomicUsize = AtomicUsize::new(0);
static OWNER: AtomicU32 = AtomicU32::new(0);

/// A token that every object with threads of its own holds. A child made by fork lacks these threads, but has
/// the queues of the locks that they waited on. Taking such a lock in the child may end the process. So a child
/// cannot have residents if its parent had some at the fork.
#[derive(Debug)]
pub(crate) struct Resident(Home);

impl Resident {
    /// Adds a resident. Fails in a child made by fork whose parent had residents. Create it before the first
    /// thread and lock.
    pub(crate) fn new() -> Result<Self, Fault> {
        let owner = OWNER.load(Ordering::Acquire);
        if owner != std::process::id() && LIVING.load(Ordering::Acquire) > 0 {
            return Err(Fault::fork_of(owner));
        }
        OWNER.store(std::process::id(), Ordering::Release);
        LIVING.fetch_add(1, Ordering::AcqRel);
        Ok(Self(Home::here()))
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        if self.0.is_here() {
            LIVING.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Drops a value without the interpreter's lock, because the drop may call the master, wait for threads, or
/// drain a segment.
pub(crate) fn drop_aside<T: Send>(value: T) {
    end_aside(|| drop(value));
}

/// Runs the last work of an object without the interpreter's lock, so that other Python threads continue.
pub(crate) fn end_aside(work: impl FnOnce() + Send) {
    let mut work = Some(work);
    let mut run = || work.take().map(|work| work());
    let ended = Python::try_attach(|py| py.detach(&mut run));
    if ended.is_none() {
        // After the end of the interpreter there is no lock to release.
        run();
    }
}

/// A value that only the process which made it may drop. A child made by fork leaves it alone.
#[derive(Debug)]
pub(crate) struct ForkGuarded<T> {
    home: Home,
    value: Option<T>,
}

impl<T> ForkGuarded<T> {
    /// A value of this process.
    pub(crate) fn new(value: T) -> Self {
        Self {
            home: Home::here(),
            value: Some(value),
        }
    }

    /// The process that made the value.
    pub(crate) const fn home(&self) -> Home {
        self.home
    }

    /// The value. Fails in another process.
    pub(crate) fn get(&self) -> Result<&T, Fault> {
        self.home.check()?;
        Ok(self
            .value
            .as_ref()
            .expect("invariant: the value is there until the drop"))
    }

    /// The value, for a caller that has called [`Home::check`].
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.value
            .as_mut()
            .expect("invariant: the value is there until the drop")
    }

    /// The value. `None` in another process, which leaves the value alone.
    pub(crate) fn into_inner(mut self) -> Option<T> {
        if self.home.is_here() {
            return self.value.take();
        }
        None
    }
}

impl<T> Drop for ForkGuarded<T> {
    fn drop(&mut self) {
        if !self.home.is_here() {
            std::mem::forget(self.value.take());
        }
    }
}
