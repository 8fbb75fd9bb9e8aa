//! The process that an object belongs to.
//!
//! A child made by fork has none of its parent's threads, shares its sockets, and lacks its mappings of
//! nodes' memory. So the parent's connections are of no use there. A call would wait for ever, a view
//! would read unmapped memory, and dropping either would send messages in the parent's name.

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

    /// Whether this is still the process.
    pub(crate) fn is_here(self) -> bool {
        self.0 == std::process::id()
    }

    /// A fault unless this is still the process. To be asked before any lock is taken: a thread that
    /// the fork left behind may hold it.
    pub(crate) fn check(self) -> Result<(), Fault> {
        if self.is_here() {
            Ok(())
        } else {
            Err(Fault::forked())
        }
    }
}

/// How many residents the process has, and which process that is. A child made by fork finds both as they
/// were.
static LIVING: AtomicUsize = AtomicUsize::new(0);
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Held by every object that has threads of its own. A child made by fork lacks these threads but has
/// the queues of the locks that they waited on. Taking such a lock in the child may end the process. So
/// while a process has residents, its children can have none.
#[derive(Debug)]
pub(crate) struct Resident(Home);

impl Resident {
    /// One more of this process; a fault in the fork of a process that had some at the time. To be made
    /// before the first thread and lock.
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

/// Drops a value without the interpreter's lock, which the thread may hold when the object ends. The drop
/// may call the master, wait for threads, or drain a segment.
pub(crate) fn drop_aside<T: Send>(value: T) {
    end_aside(|| drop(value));
}

/// Does the work of an object's end without the interpreter's lock: other threads of Python go on.
pub(crate) fn end_aside(work: impl FnOnce() + Send) {
    let mut work = Some(work);
    let mut run = || work.take().map(|work| work());
    let ended = Python::try_attach(|py| py.detach(&mut run));
    if ended.is_none() {
        // Without an interpreter there is no lock.
        run();
    }
}

/// A value that is dropped where it was made, and left alone in a child made by fork.
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

    /// The process that it belongs to.
    pub(crate) const fn home(&self) -> Home {
        self.home
    }

    /// The value; a fault in another process.
    pub(crate) fn get(&self) -> Result<&T, Fault> {
        self.home.check()?;
        Ok(self
            .value
            .as_ref()
            .expect("invariant: the value is there until the drop"))
    }

    /// The value, for who has asked [`Home::check`].
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.value
            .as_mut()
            .expect("invariant: the value is there until the drop")
    }

    /// The value; `None` in another process, where it is left alone.
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
