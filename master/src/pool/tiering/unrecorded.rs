//! Loads whose records are not known to be durable.
//!
//! A block that came back from a medium is readable before the record of its place is durable, because its readers
//! wait. If the master dies before the record is durable, the next master knows neither the place nor the leases on
//! it. So each node names such places when it registers, until an answer to a heartbeat says that it need not.

use super::super::Pool;
use super::Traffic;
use crate::clock::BootInstant;
use crate::membership::StoreNode;
use crate::store::journal::Ack;
use kvpool_types::{GrantId, Incarnation};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The loads of all nodes.
#[derive(Debug, Default)]
pub(super) struct Unrecorded {
    /// By node, from the order until the record is durable or nobody will ever read the place.
    by_node: HashMap<Incarnation, BTreeSet<GrantId>>,
    /// Those whose records the journal has.
    logged: Vec<(Incarnation, GrantId)>,
    /// True while the journal is asked whether `logged` is durable.
    is_asking: bool,
    /// When it may be asked again.
    ask_again: BootInstant,
}

/// How often the journal is asked. A question ends the wait of a group that fills, so it must not be asked at the
/// heartbeat of each of many nodes.
const ASK: Duration = Duration::from_millis(100);

impl Unrecorded {
    pub(super) fn begin(&mut self, node: &StoreNode, grant: GrantId) {
        let loads = self.by_node.entry(node.incarnation).or_default();
        loads.insert(grant);
    }

    /// The journal has the record.
    pub(super) fn logged(&mut self, node: &StoreNode, grant: GrantId) {
        self.logged.push((node.incarnation, grant));
    }

    /// The record is durable, or nobody will ever read the place.
    pub(super) fn end(&mut self, node: Incarnation, grant: GrantId) {
        if let Some(loads) = self.by_node.get_mut(&node) {
            loads.remove(&grant);
            if loads.is_empty() {
                self.by_node.remove(&node);
            }
        }
    }

    /// The lowest grant of a node's loads.
    fn lowest(&self, node: &StoreNode) -> Option<GrantId> {
        self.by_node.get(&node.incarnation)?.first().copied()
    }

    /// What to ask the journal about, unless it is being asked or was asked a moment ago.
    fn take_to_ask(&mut self, now: BootInstant) -> Vec<(Incarnation, GrantId)> {
        if self.is_asking || self.logged.is_empty() || now < self.ask_again {
            return Vec::new();
        }
        self.is_asking = true;
        self.ask_again = now.after(ASK);
        std::mem::take(&mut self.logged)
    }
}

impl Traffic {
    /// Ends what was asked: the records are durable, or that is not known and is asked again.
    fn answered(&mut self, asked: Vec<(Incarnation, GrantId)>, are_durable: bool) {
        let unrecorded = &mut self.unrecorded;
        unrecorded.is_asking = false;
        if !are_durable {
            unrecorded.logged.extend(asked);
            return;
        }
        for (node, grant) in asked {
            unrecorded.end(node, grant);
        }
    }
}

impl Pool {
    /// The grant below which a node need not name its loads of this term. Their records are durable, or nobody will
    /// ever read their places. Asks the journal about the others.
    pub fn loads_recorded_below(self: &Arc<Self>, node: &StoreNode) -> GrantId {
        // Loads get their grants under this lock: one that comes later has this one or a higher one.
        let mut traffic = self.tiering.traffic.lock();
        let next = GrantId(self.next_version.load(Ordering::Acquire));
        let below = traffic.unrecorded.lowest(node).unwrap_or(next);
        let asked = traffic.unrecorded.take_to_ask(self.now());
        drop(traffic);
        if !asked.is_empty() {
            let pool = Arc::clone(self);
            // Nothing to log: it is durable when all before it is. As a past event it holds up nothing behind it.
            self.journal()
                .insist(Vec::new(), Ack::Durable, move |durable| {
                    let mut traffic = pool.tiering.traffic.lock();
                    traffic.answered(asked, durable.is_ok());
                });
        }
        below
    }
}
