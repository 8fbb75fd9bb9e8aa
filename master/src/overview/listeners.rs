//! The listeners of `/v1/events`. Their number is bounded, and no listener waits for another.

use bytes::Bytes;
use parking_lot::Mutex;
use std::time::Duration;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::Instant;

/// The most listeners.
const MOST: usize = 64;
/// The most snapshots that wait for one listener. The socket's buffers hold more.
const WAITING: usize = 2;
/// How long one stream lasts. The HTTP port cuts connections at 30 s, and a browser reports a cut as an error.
const STREAM: Duration = Duration::from_secs(25);

#[derive(Debug)]
struct Listener {
    outbox: Sender<Bytes>,
    since: Instant,
}

#[derive(Debug, Default)]
struct State {
    listeners: Vec<Listener>,
    closed: bool,
}

/// Every listener.
#[derive(Debug, Default)]
pub struct Listeners(Mutex<State>);

impl Listeners {
    /// Adds a listener; `None` if there are too many, or if the master stops.
    pub fn add(&self) -> Option<Receiver<Bytes>> {
        let mut state = self.0.lock();
        state
            .listeners
            .retain(|listener| !listener.outbox.is_closed());
        if state.closed || state.listeners.len() >= MOST {
            return None;
        }
        let (outbox, inbox) = channel(WAITING);
        let since = Instant::now();
        state.listeners.push(Listener { outbox, since });
        Some(inbox)
    }

    /// True without listeners.
    pub fn is_empty(&self) -> bool {
        self.0.lock().listeners.is_empty()
    }

    /// Sends a snapshot to every listener. A listener that has not taken the last ones is dropped.
    /// Its stream then ends, and a browser reconnects by itself.
    pub fn publish(&self, snapshot: &Bytes) {
        let mut state = self.0.lock();
        state.listeners.retain(|listener| {
            listener.outbox.try_send(snapshot.clone()).is_ok() && listener.since.elapsed() < STREAM
        });
    }

    /// Ends every stream, and admits no more listeners.
    pub fn close(&self) {
        let mut state = self.0.lock();
        state.closed = true;
        state.listeners.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_bounded_and_the_place_of_one_that_left_is_free() {
        let listeners = Listeners::default();
        let mut inboxes: Vec<_> = (0..MOST).map(|_| listeners.add().unwrap()).collect();
        assert!(listeners.add().is_none());
        inboxes.pop();
        assert!(listeners.add().is_some());
        listeners.close();
        assert!(listeners.add().is_none(), "the master stops");
    }

    #[test]
    fn a_slow_listener_is_dropped_and_the_others_hear_everything() {
        let listeners = Listeners::default();
        let mut slow = listeners.add().unwrap();
        let mut quick = listeners.add().unwrap();
        for n in 0..5u8 {
            listeners.publish(&Bytes::from(vec![n]));
            assert_eq!(quick.try_recv().unwrap(), vec![n]);
        }
        assert_eq!(slow.try_recv().unwrap(), vec![0]);
        assert_eq!(slow.try_recv().unwrap(), vec![1]);
        let end = slow.try_recv().unwrap_err();
        assert_eq!(end, tokio::sync::mpsc::error::TryRecvError::Disconnected);
        assert_eq!(listeners.0.lock().listeners.len(), 1);
    }
}
