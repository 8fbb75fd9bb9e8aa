//! The table of open framed connections, so that a master can end them.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// A connection whose requests can be ended.
pub(crate) trait EndRequests: std::fmt::Debug + Send + Sync {
    /// Takes no more requests. The request that the connection's thread works on is still answered.
    fn end_requests(&self);
}

/// The open framed connections.
#[derive(Debug, Default)]
pub struct OpenConnections(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    stopped: bool,
    next: u64,
    connections: HashMap<u64, Arc<dyn EndRequests>>,
}

/// The entry of one connection, removed on drop.
#[derive(Debug)]
pub(crate) struct OpenConnection<'a> {
    open: &'a OpenConnections,
    number: u64,
}

impl OpenConnections {
    /// Adds a connection; `None` after [`OpenConnections::end_all`].
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

    /// Ends the requests of every open connection. New connections may come.
    pub(crate) fn end_present(&self) {
        for connection in self.0.lock().connections.values() {
            connection.end_requests();
        }
    }

    /// Ends the requests of every open connection, and admits no new one.
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
