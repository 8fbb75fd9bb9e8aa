//! The nodes and clients that contacted this master recently. A leader without contacts may be cut
//! off while a standby is called. The standby publishes these counts.

use crate::clock::{BootInstant, Clock};
use kvpool_types::{ClientId, NodeName};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

/// A contact within this time is recent.
pub(super) const RECENT: Duration = crate::pool::SILENCE;
/// The largest number of contacts kept by name. The count stops there.
const MOST: usize = 4096;

/// The nodes and clients that contacted this master recently.
pub struct RecentContacts {
    clock: Arc<dyn Clock>,
    nodes: Mutex<HashMap<NodeName, BootInstant>>,
    clients: Mutex<HashMap<ClientId, BootInstant>>,
}

impl RecentContacts {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            nodes: Mutex::default(),
            clients: Mutex::default(),
        }
    }

    /// Records a node's attempt to register. A name that no node may have does not count.
    pub fn node(&self, name: &str) {
        let name = NodeName(name.to_owned());
        if name.is_sound() {
            self.note(&self.nodes, name);
        }
    }

    /// Records a client's call.
    pub fn client(&self, id: ClientId) {
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

    fn note<T: Eq + Hash>(&self, who: &Mutex<HashMap<T, BootInstant>>, name: T) {
        let now = self.clock.now();
        let mut who = who.lock();
        if who.len() >= MOST {
            who.retain(|_, then| now.since(*then) < RECENT);
        }
        if who.len() < MOST || who.contains_key(&name) {
            who.insert(name, now);
        }
    }

    fn count<T>(&self, who: &Mutex<HashMap<T, BootInstant>>) -> usize {
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
        heard.client(ClientId(1));
        assert_eq!((heard.nodes(), heard.clients()), (1, 1));
        clock.advance(RECENT / 2);
        heard.node("b");
        clock.advance(RECENT / 2);
        assert_eq!((heard.nodes(), heard.clients()), (1, 0));
    }

    #[test]
    fn what_can_be_no_node_is_not_kept() {
        let clock = Arc::new(ManualClock::new(BootInstant(1000)));
        let heard = RecentContacts::new(clock);
        for name in ["", "a b", &"a".repeat(256)] {
            heard.node(name);
        }
        assert_eq!(heard.nodes(), 0);
    }
}
