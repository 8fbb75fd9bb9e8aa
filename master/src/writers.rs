//! The clients with framed connections. The puts of a dead client end.
//!
//! ```text
//!            first connection         last one closed          GRACE passed
//!  (nothing) ────────────────► here ─────────────────► leaving ────────────► its puts end
//!                               ▲                        │ a new connection
//!                               └────────────────────────┘
//! ```
//!
//! The kernel closes a killed process's connections at once. A client that only lost its connection
//! may return within the grace period. After that period the client's commits are refused, so it
//! puts its blocks again. A put over gRPC belongs to no connection here, so it ends with its
//! grants.
//!
//! ADR 0024 says which puts still wait for the end of their grants.

use crate::clock::BootInstant;
use kvpool_seams::maps::HashMap;
use kvpool_types::ClientId;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a client may have no connection before its puts end.
pub const GRACE: Duration = Duration::from_millis(300);

/// The clients that have framed connections, or had them a moment ago.
#[derive(Debug, Default)]
pub struct Writers {
    clients: Mutex<HashMap<ClientId, Writer>>,
    /// True while a client is leaving, which is rare.
    leaving: AtomicBool,
}

#[derive(Debug, Default)]
struct Writer {
    connections: usize,
    /// The time at which the last connection closed.
    left: Option<BootInstant>,
}

impl Writers {
    /// Counts a new connection of a client.
    pub fn enter(&self, client: ClientId) {
        let mut clients = self.clients.lock();
        let writer = clients.entry(client).or_default();
        writer.connections += 1;
        writer.left = None;
    }

    /// Counts a closed connection of a client.
    pub fn leave(&self, client: ClientId, now: BootInstant) {
        let mut clients = self.clients.lock();
        if let Some(writer) = clients.get_mut(&client) {
            writer.connections -= 1;
            if writer.connections == 0 {
                writer.left = Some(now);
                self.leaving.store(true, Ordering::Release);
            }
        }
    }

    /// The number of clients with a connection.
    pub fn count(&self) -> usize {
        let clients = self.clients.lock();
        let present = clients.values().filter(|writer| writer.connections > 0);
        present.count()
    }

    /// Removes the clients that had no connection for the grace period.
    pub fn take_gone(&self, now: BootInstant) -> Vec<ClientId> {
        if !self.leaving.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut clients = self.clients.lock();
        let is_gone = |writer: &Writer| writer.left.is_some_and(|left| left.after(GRACE) <= now);
        let gone: Vec<_> = clients
            .extract_if(|_, writer| is_gone(writer))
            .map(|(client, _)| client)
            .collect();
        let leaves = clients.values().any(|writer| writer.left.is_some());
        self.leaving.store(leaves, Ordering::Release);
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_gone_after_a_grace_period_without_connections() {
        let writers = Writers::default();
        let (one, other) = (ClientId(1), ClientId(2));
        let begun = BootInstant(1000);
        for client in [one, one, other] {
            writers.enter(client);
        }
        writers.leave(one, begun);
        assert_eq!(writers.take_gone(begun.after(GRACE * 9)), []);
        let later = begun.after(GRACE * 9);
        writers.leave(one, later);
        writers.leave(other, later);
        assert_eq!(writers.take_gone(later.after(GRACE / 2)), []);
        // The client returned in time.
        writers.enter(other);
        assert_eq!(writers.take_gone(later.after(GRACE)), [one]);
        assert_eq!(writers.take_gone(later.after(GRACE * 9)), []);
        writers.leave(other, later);
        assert_eq!(writers.take_gone(later.after(GRACE)), [other]);
    }
}
