//! Lets a thread stop polling a call for a while and continue later.
//!
//! The driver wakes only the reader of a channel. A reader that is not polled would withhold the answers of
//! all other calls.

use super::inbox::Inbox;
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    /// The inboxes on which the watched poll waits; `None` outside [`WaitedOn::watch`].
    static WATCHED: RefCell<Option<Vec<Arc<Inbox>>>> = const { RefCell::new(None) };
}

/// The channels on which a call waits.
#[derive(Debug, Default)]
pub struct WaitedOn(Vec<Arc<Inbox>>);

impl WaitedOn {
    /// Runs `poll`, which polls the call, and records the channels on which the call waits.
    pub fn watch<T>(&mut self, poll: impl FnOnce() -> T) -> T {
        WATCHED.set(Some(std::mem::take(&mut self.0)));
        let polled = poll();
        self.0 = WATCHED.take().unwrap_or_default();
        polled
    }

    /// Passes the reader's role to other calls. Call this before the thread turns to other work, and poll the
    /// call once when the thread returns.
    pub fn leave(&mut self) {
        for inbox in self.0.drain(..) {
            inbox.wake_all();
        }
    }
}

/// Records that the watched poll waits on `inbox`.
pub(super) fn note(inbox: &Arc<Inbox>) {
    WATCHED.with_borrow_mut(|watched| {
        if let Some(watched) = watched
            && !watched.iter().any(|one| Arc::ptr_eq(one, inbox))
        {
            watched.push(Arc::clone(inbox));
        }
    });
}
