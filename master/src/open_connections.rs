//! The framed connections that are open, so that they can be ended.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// A connection that can be told to take no more requests.
pub(crate) trait EndRequests: std::fmt::Debug + Send + Sync {
    /// Takes no more requests. The request that the connection's thread works on is still answered.
    fn end_requests(&self);
}

/// The framed connections that are open.
#[derive(Debug, Default)]
pub struct OpenConnections(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    stopped: bool,
    next: u64,
    connections: HashMap<u64, Arc<dyn EndRequests>>,
}

/// A connection that counts as open until this is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection<'a> {
    open: &'a OpenConnections,
    number: u64,
}

impl OpenConnections {
    /// Counts a connection in; `None` when there are to be no more.
    pub(crate) fn add(&self, connection: Arc<dyn EndRequests>) -> Option<OpenConnection<'_>> {
        let mut state = self.0.lock();
        if state.stopped {
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.connections.insert(number, connection);
        Some(OpenConnection { open: self, number })
    }

    /// Lets no connection take another request. New ones may come.
    pub(crate) fn end_present(&self) {
        for connection in self.0.lock().connections.values() {
            connection.end_requests();
        }
    }

    /// Lets no connection take another request, nor a new one come.
    pub(crate) fn end_all(&self) {
        let mut state = self.0.lock();
        state.stopped = true;
        for connection in state.connections.values() {
            connection.end_requests();
        }
    }
}

impl Drop for OpenConnection<'_> {
    fn drop(&mut self) {
        self.open.0.lock().connections.remove(&self.number);
    }
}
