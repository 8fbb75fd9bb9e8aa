//! Callers of a port: connections whose hello or first request has not been accepted yet.
//!
//! Any host that reaches a port can be a caller. So callers have bounds of their own, on their number and on their
//! bytes. At a bound the table displaces a caller, never an accepted connection. At the bound on their number it
//! displaces the oldest caller. At the bound on bytes it displaces the caller that sent the most.
//!
//! ADR 0027 has the bounds on callers.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::Notify;

/// The callers of one port.
#[derive(Debug)]
pub struct Callers {
    most: usize,
    most_bytes: u64,
    present: Mutex<Present>,
}

#[derive(Debug, Default)]
struct Present {
    next: u64,
    bytes: u64,
    /// In order of arrival.
    callers: BTreeMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    displaced: Arc<Notify>,
}

/// One caller. It counts as a caller until it is settled or dropped.
#[derive(Debug)]
pub struct Caller {
    callers: Arc<Callers>,
    number: u64,
    displaced: Arc<Notify>,
}

impl Callers {
    /// A table of at most `most` callers that hold at most `most_bytes` together.
    pub fn new(most: usize, most_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            most,
            most_bytes,
            present: Mutex::default(),
        })
    }

    /// Admits a caller. A full table displaces its oldest caller.
    pub fn admit(self: &Arc<Self>) -> Caller {
        let displaced = Arc::new(Notify::new());
        let mut present = self.present.lock();
        while present.callers.len() >= self.most {
            let Some((&oldest, _)) = present.callers.first_key_value() else {
                break;
            };
            present.displace(oldest, "too many callers before hello, closing the oldest");
        }
        let number = present.next;
        present.next += 1;
        let entry = Entry {
            bytes: 0,
            displaced: Arc::clone(&displaced),
        };
        present.callers.insert(number, entry);
        Caller {
            callers: Arc::clone(self),
            number,
            displaced,
        }
    }

    /// Displaces the oldest caller, to free its descriptor. Returns whether there was a caller.
    pub fn displace_oldest(&self) -> bool {
        let mut present = self.present.lock();
        let oldest = present.callers.first_key_value().map(|(number, _)| *number);
        oldest.is_some_and(|oldest| {
            present.displace(oldest, "no descriptor is free, closing the oldest caller");
            true
        })
    }

    /// Displaces all callers: the port is being closed.
    pub fn displace_all(&self) {
        let mut present = self.present.lock();
        while let Some((&oldest, _)) = present.callers.first_key_value() {
            present.displace(oldest, "the port is being closed, and a caller with it");
        }
    }

    /// How many callers there are.
    pub fn count(&self) -> usize {
        self.present.lock().callers.len()
    }
}

impl Present {
    fn remove(&mut self, number: u64) -> Option<Entry> {
        let entry = self.callers.remove(&number)?;
        self.bytes -= entry.bytes;
        Some(entry)
    }

    fn displace(&mut self, number: u64, why: &'static str) {
        if let Some(entry) = self.remove(number) {
            tracing::debug!("{why}");
            entry.displaced.notify_one();
        }
    }
}

impl Caller {
    /// Completes when this caller is displaced.
    pub async fn displaced(&self) {
        self.displaced.notified().await;
    }

    /// Like [`Caller::displaced`], as a future that does not borrow the caller.
    pub fn displacement(&self) -> impl Future<Output = ()> + Send + Sync + 'static {
        Arc::clone(&self.displaced).notified_owned()
    }

    /// Displaces this caller.
    pub fn displace(&self) {
        let mut present = self.callers.present.lock();
        present.displace(self.number, "its calls were refused");
    }

    /// Counts `bytes` that arrived from this caller and are held.
    pub fn received(&self, bytes: u64) {
        let mut present = self.callers.present.lock();
        let Some(entry) = present.callers.get_mut(&self.number) else {
            return;
        };
        entry.bytes += bytes;
        present.bytes += bytes;
        while present.bytes > self.callers.most_bytes {
            let heaviest = present.callers.iter().max_by_key(|(_, entry)| entry.bytes);
            let Some((&heaviest, _)) = heaviest else {
                break;
            };
            present.displace(
                heaviest,
                "callers before hello hold too many bytes, closing the one with the most",
            );
        }
    }

    /// Removes this connection from the callers: its hello or request was accepted. It can no
    /// longer be displaced.
    pub fn settle(&self) {
        self.callers.present.lock().remove(self.number);
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the first poll of a future completes it.
    fn is_ready(future: impl Future<Output = ()>) -> bool {
        let mut future = std::pin::pin!(future);
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        future.as_mut().poll(&mut context).is_ready()
    }

    #[test]
    fn the_oldest_caller_makes_room_and_who_is_settled_never_does() {
        let callers = Callers::new(2, 100);
        let settled = callers.admit();
        settled.settle();
        let first = callers.admit();
        let second = callers.admit();
        assert!(!is_ready(first.displaced()));
        let third = callers.admit();
        assert!(is_ready(first.displaced()));
        assert!(!is_ready(second.displaced()) && !is_ready(third.displaced()));
        assert_eq!(callers.count(), 2);
        drop(third);
        let _fourth = callers.admit();
        assert!(!is_ready(second.displaced()));
        callers.displace_all();
        assert!(is_ready(second.displaced()));
        assert!(!is_ready(settled.displaced()));
    }

    #[test]
    fn who_holds_the_most_is_displaced_when_callers_hold_too_much() {
        let callers = Callers::new(10, 100);
        let (small, large) = (callers.admit(), callers.admit());
        small.received(30);
        large.received(70);
        assert!(!is_ready(large.displaced()));
        small.received(1);
        assert!(is_ready(large.displaced()) && !is_ready(small.displaced()));
        // The bytes of this caller no longer count.
        large.received(1000);
        small.received(60);
        assert!(!is_ready(small.displaced()));
    }
}
