//! The process that an object belongs to.
//!
//! A child made by fork has none of its parent's threads, shares its sockets, and lacks its mappings of
//! nodes' memory. What was connected in the parent is of no use there: a call would wait for ever, a
//! view would read what is not mapped, and dropping either would speak to nodes in the parent's name.

use crate::errors::Fault;

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

/// A value that is dropped where it was made, and left alone in a child made by fork.
#[derive(Debug)]
pub(crate) struct Homely<T> {
    home: Home,
    value: Option<T>,
}

impl<T> Homely<T> {
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

impl<T> Drop for Homely<T> {
    fn drop(&mut self) {
        if !self.home.is_here() {
            std::mem::forget(self.value.take());
        }
    }
}
