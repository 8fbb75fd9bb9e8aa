//! The nodes and clients that contacted this master recently. A leader without contacts may be cut
//! off while a standby is called. The standby publishes these counts.

use crate::clock::{BootInstant, Clock};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// A contact within this time is recent.
pub(super) const RECENT: Duration = crate::pool::SILENCE;
/// The most contacts kept by name; the count stops there.
const MOST: usize = 4096;

/// The nodes and clients that contacted this master recently.
pub struct RecentContacts {
    clock: Arc<dyn Clock>,
    nodes: Mutex<HashMap<Vec<u8>, BootInstant>>,
    clients: Mutex<HashMap<Vec<u8>, BootInstant>>,
}

impl RecentContacts {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            nodes: Mutex::default(),
            clients: Mutex::default(),
        }
    }

    /// Records a node's attempt to register.
    pub fn node(&self, name: &str) {
        self.note(&self.nodes, name.as_bytes());
    }

    /// Records a client's call.
    pub fn client(&self, id: &[u8]) {
        self.note(&self.clients, id);
    }

    /// The number of nodes with a recent attempt.
    pub fn nodes(&self) -> usize {
        self.count(&self.nodes)
    }

    /// The number of clients with a recent call.
    pub fn clients(&self) -> usize {
        self.count(&self.clients)
    }

    fn note(&self, who: &Mutex<HashMap<Vec<u8>, BootInstant>>, name: &[u8]) {
        let now = self.clock.now();
        let mut who = who.lock();
        if who.len() >= MOST {
            who.retain(|_, then| now.since(*then) < RECENT);
        }
        if who.len() < MOST || who.contains_key(name) {
            who.insert(name.to_vec(), now);
        }
    }

    fn count(&self, who: &Mutex<HashMap<Vec<u8>, BootInstant>>) -> usize {
        let now = self.clock.now();
        let mut who = who.lock();
        who.retain(|_, then| now.since(*then) < RECENT);
        who.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    #[test]
    fn each_recent_contact_counts_once() {
        let clock = Arc::new(ManualClock::new(BootInstant(1000)));
        let heard = RecentContacts::new(Arc::clone(&clock) as Arc<dyn Clock>);
        heard.node("a");
        heard.node("a");
        heard.client(&[1]);
        assert_eq!((heard.nodes(), heard.clients()), (1, 1));
        clock.advance(RECENT / 2);
        heard.node("b");
        clock.advance(RECENT / 2);
        assert_eq!((heard.nodes(), heard.clients()), (1, 0));
    }
}
