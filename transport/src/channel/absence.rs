//! For a thread that stops polling a call for a while, and goes on with it later.
//!
//! The driver wakes the reader of a channel and nobody else. So a reader that is not polled would keep the answers
//! of all other calls from them.

use super::inbox::Inbox;
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    /// While a poll is watched: the inboxes that it waits on.
    static WATCHED: RefCell<Option<Vec<Arc<Inbox>>>> = const { RefCell::new(None) };
}

/// The channels on which a call waits.
#[derive(Debug, Default)]
pub struct WaitedOn(Vec<Arc<Inbox>>);

impl WaitedOn {
    /// Runs `poll`, a poll of the call, and notes the channels on which it waits.
    pub fn watch<T>(&mut self, poll: impl FnOnce() -> T) -> T {
        WATCHED.set(Some(std::mem::take(&mut self.0)));
        let polled = poll();
        self.0 = WATCHED.take().unwrap_or_default();
        polled
    }

    /// To be called before the thread turns to something else: from here on other calls read. The call has to be
    /// polled once when the thread is back.
    pub fn leave(&mut self) {
        for inbox in self.0.drain(..) {
            inbox.wake_all();
        }
    }
}

/// Notes that the present poll waits on `inbox`.
pub(super) fn note(inbox: &Arc<Inbox>) {
    WATCHED.with_borrow_mut(|watched| {
        if let Some(watched) = watched
            && !watched.iter().any(|one| Arc::ptr_eq(one, inbox))
        {
            watched.push(Arc::clone(inbox));
        }
    });
}
