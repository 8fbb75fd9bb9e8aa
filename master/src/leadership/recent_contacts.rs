//! Who has turned to a master lately. A leader that hears nobody while a standby is called may be cut
//! off; this is what the standby tells of it.

use crate::clock::{BootInstant, Clock};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// What counts as lately.
pub(super) const RECENT: Duration = Duration::from_secs(2);
/// The most that are remembered by name: more are as good as so many.
const MOST: usize = 4096;

/// See the module's documentation.
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

    /// A node has knocked.
    pub fn node(&self, name: &str) {
        self.note(&self.nodes, name.as_bytes());
    }

    /// A client has called.
    pub fn client(&self, id: &[u8]) {
        self.note(&self.clients, id);
    }

    /// How many nodes have knocked lately.
    pub fn nodes(&self) -> usize {
        self.count(&self.nodes)
    }

    /// How many clients have called lately.
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
    fn each_is_counted_once_and_not_for_ever() {
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
