//! Loads whose records may not be durable yet.
//!
//! A loaded block is readable before the record of its extent is durable, because its readers wait.
//! If the master dies before that, the next master knows neither the extent nor the leases on it.
//! So each node names such extents when it registers. It stops when an answer to a heartbeat says
//! that their records are durable.

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
    /// By node: the loads from their order until the record is durable, or until the extent can no longer be
    /// read.
    by_node: HashMap<Incarnation, BTreeSet<GrantId>>,
    /// The loads whose records are in the journal.
    logged: Vec<(Incarnation, GrantId)>,
    /// Whether the journal is being asked if the records of `logged` are durable.
    is_asking: bool,
    /// The earliest time of the next question.
    ask_again: BootInstant,
}

/// The least interval of questions to the journal. A question ends the wait of a group that fills. So the
/// journal must not be asked at every heartbeat of many nodes.
const ASK: Duration = Duration::from_millis(100);

impl Unrecorded {
    pub(super) fn begin(&mut self, node: &StoreNode, grant: GrantId) {
        let loads = self.by_node.entry(node.incarnation).or_default();
        loads.insert(grant);
    }

    /// Records that the journal has the record of a load.
    pub(super) fn logged(&mut self, node: &StoreNode, grant: GrantId) {
        self.logged.push((node.incarnation, grant));
    }

    /// Ends a load: its record is durable, or its extent can no longer be read.
    pub(super) fn end(&mut self, node: Incarnation, grant: GrantId) {
        if let Some(loads) = self.by_node.get_mut(&node) {
            loads.remove(&grant);
            if loads.is_empty() {
                self.by_node.remove(&node);
            }
        }
    }

    /// The lowest grant id of a node's loads.
    fn lowest(&self, node: &StoreNode) -> Option<GrantId> {
        self.by_node.get(&node.incarnation)?.first().copied()
    }

    /// The loads to ask the journal about. Empty while a question is open or was asked a moment ago.
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
    /// Ends a question. If the records are not known to be durable, they are asked about again.
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
    /// The grant id below which a node need not name its loads of this term. Their records are durable, or
    /// their extents can no longer be read. Asks the journal about the other loads.
    pub fn loads_recorded_below(self: &Arc<Self>, node: &StoreNode) -> GrantId {
        // Loads get their grants under this lock, so a later load has this grant id or a higher
        // one.
        let mut traffic = self.tiering.traffic.lock();
        let next = GrantId(self.next_version.load(Ordering::Acquire));
        let below = traffic.unrecorded.lowest(node).unwrap_or(next);
        let asked = traffic.unrecorded.take_to_ask(self.now());
        drop(traffic);
        if !asked.is_empty() {
            let pool = Arc::clone(self);
            // Asks without appending a record. The answer comes once all earlier records are
            // durable, and delays no later record.
            self.journal()
                .insist(Vec::new(), Ack::Durable, move |durable| {
                    let mut traffic = pool.tiering.traffic.lock();
                    traffic.answered(asked, durable.is_ok());
                });
        }
        below
    }
}
