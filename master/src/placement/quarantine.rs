//! The quarantine: freed extents that may still be read or written.
//!
//! ```text
//!  block leaves the directory ─► record durable ─► leases over ─► node has fenced it ─► free
//!                                 (journal)        (delayed)      (tickets)
//! ```
//!
//! An extent is *stuck* once its node has been asked to fence it for `STUCK_AFTER`: a process holds
//! it, or the node is silent. An extent with a longer lease is stuck from the start, until the lease
//! ends. Eviction counts quarantined extents as future free space, except stuck ones. An extent
//! whose record is not durable yet counts as free too, however slow the log is.
//!
//! Small neighbours that are freed together are fenced together, as one range under the highest of
//! their grants. A later grant on them is given after all of these grants, so its number is higher.
//! A run is short, so that one reader delays few other extents.
//!
//! **Architecture Invariant:** within a term, a granted extent becomes free only through the
//! quarantine.
//!
//! ADR 0004 says why every extent is freed by one rule, ADR 0017 how neighbours are fenced
//! together.

use super::Segment;
use super::moved::MovedLeases;
use crate::clock::BootInstant;
use crate::membership::{NodeState, StoreNode};
use crate::placement::ExtentIndex;
use kvpool_proto as proto;
use kvpool_types::{Extent, GrantId, Incarnation, SegmentId};
use parking_lot::{Mutex, RwLock};
use smallvec::{SmallVec, smallvec};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The time within which a node usually fences an extent.
const STUCK_AFTER: Duration = Duration::from_millis(100);

/// The most bytes of neighbours that are fenced together.
const RUN_BYTES: u64 = 64 << 10;

/// An extent in quarantine.
#[derive(Clone, Debug)]
pub struct Freed {
    /// The segment with the extent.
    pub segment: Arc<Segment>,
    /// The extent's slot in the segment's table.
    pub index: ExtentIndex,
    /// The extent's range.
    pub extent: Extent,
    /// The grant of the last write; `None` for a grant of an older epoch.
    pub grant: Option<GrantId>,
    /// The number of the next grant when the extent was freed. Every later grant on the extent has
    /// this number or a higher one.
    pub before: GrantId,
    /// The end of the last lease on the extent.
    pub not_before: BootInstant,
    /// The time since which only the node's answer is missing. Before that: when the extent left the
    /// directory.
    pub since: BootInstant,
    /// True for a stuck extent, which eviction does not count as future free space.
    pub stuck: bool,
}

/// Extents that are fenced together.
pub type Run = SmallVec<[Freed; 1]>;

/// An unanswered request to a node.
#[derive(Debug)]
pub enum Ticket {
    /// Fence an extent, or a run of neighbours, lowest first.
    Fence(Run),
    /// Re-verify a block's bytes.
    Verify(Suspected),
}

/// A replica that a client reported with a wrong checksum.
#[derive(Clone, Debug)]
pub struct Suspected {
    /// Namespace of the block's key.
    pub namespace: kvpool_types::ids::NamespaceId,
    /// Key of the block.
    pub key: kvpool_types::Key,
    /// Version of the block.
    pub version: kvpool_types::Version,
    /// The range of the bytes.
    pub extent: Extent,
    /// The checksum that the bytes should have.
    pub checksum: kvpool_types::Checksum,
}

/// The extents in quarantine.
#[derive(Debug, Default)]
pub struct Quarantine {
    /// Leases on replicas that have left their blocks.
    pub moved: MovedLeases,
    delayed: Mutex<Delayed>,
    /// Extents that blocks left under leases, while their removal is on its way to the log. The key
    /// numbers each removal.
    leaving: Mutex<BTreeMap<u64, Vec<(Extent, BootInstant)>>>,
    next: AtomicU64,
    by_node: RwLock<HashMap<Incarnation, Arc<NodeTickets>>>,
}

/// The unanswered requests to one node.
#[derive(Debug, Default)]
struct NodeTickets {
    /// Requests by number. Numbers ascend with time.
    open: Mutex<BTreeMap<u64, Ticket>>,
    /// The last ticket that [`Quarantine::mark_stuck`] has looked at.
    stuck_through: Mutex<u64>,
}

/// Extents that wait for the ends of their leases.
#[derive(Debug, Default)]
struct Delayed {
    items: BTreeMap<(BootInstant, u64), Freed>,
    /// The bytes of this term's stuck extents, by segment and by the end of their leases in tenths
    /// of a second. Other extents count as free in [`Segment::used_after_quarantine`].
    coming: BTreeMap<(u64, SegmentId), u64>,
}

/// A time in tenths of a second.
fn tenth(moment: BootInstant) -> u64 {
    moment.0 / 100
}

/// The key under which an extent counts as future room. An extent of an earlier term has none: its
/// leases are only assumed. A put that waited for them all would stall after a restart.
fn coming_key(item: &Freed) -> Option<(u64, SegmentId)> {
    let counts = item.stuck && item.grant.is_some();
    counts.then(|| (tenth(item.not_before), item.segment.id))
}

impl Delayed {
    fn insert(&mut self, number: u64, item: Freed) {
        if let Some(key) = coming_key(&item) {
            *self.coming.entry(key).or_default() += item.extent.length.0;
        }
        self.items.insert((item.not_before, number), item);
    }

    /// Removes and returns the extents whose leases are over.
    fn take_over(&mut self, now: BootInstant) -> Vec<Freed> {
        let waiting = self.items.split_off(&(BootInstant(now.0 + 1), 0));
        let over = std::mem::replace(&mut self.items, waiting);
        let over: Vec<Freed> = over.into_values().collect();
        for item in &over {
            if let Some(key) = coming_key(item)
                && let Entry::Occupied(mut bytes) = self.coming.entry(key)
            {
                *bytes.get_mut() -= item.extent.length.0;
                if *bytes.get() == 0 {
                    bytes.remove();
                }
            }
        }
        over
    }
}

impl Quarantine {
    /// The bytes that only leases hold, on segments that take blocks, and whose leases end before
    /// `until`.
    pub fn coming(&self, until: BootInstant, takes: impl Fn(SegmentId) -> bool) -> u64 {
        let delayed = self.delayed.lock();
        let before = delayed.coming.range(..(tenth(until), SegmentId(0)));
        let taking = before.filter(|((_, segment), _)| takes(*segment));
        taking.map(|(_, bytes)| bytes).sum()
    }

    /// The extents whose leases run after `now`. Their removal need not be durable yet.
    pub fn leased(&self, now: BootInstant) -> Vec<Extent> {
        // The extents on their way are read first, so that an extent that arrives meanwhile is not
        // missed.
        let leaving = self.leaving.lock();
        let leaving = leaving.values().flatten().filter(|(_, end)| *end > now);
        let mut all: Vec<Extent> = leaving.map(|(extent, _)| *extent).collect();
        let delayed = self.delayed.lock();
        let leased = delayed.items.range((BootInstant(now.0 + 1), 0)..);
        all.extend(leased.map(|(_, item)| item.extent));
        all.sort_unstable_by_key(|extent| (extent.segment, extent.offset));
        all.dedup();
        all
    }

    /// Records that blocks leave extents, before the removal is durable. Returns the number for
    /// [`Quarantine::has_left`].
    pub(crate) fn leaves(&self, extents: Vec<(Extent, BootInstant)>) -> Option<u64> {
        if extents.is_empty() {
            return None;
        }
        let number = self.number();
        self.leaving.lock().insert(number, extents);
        Some(number)
    }

    /// Ends the record of [`Quarantine::leaves`]: the removal is durable and the quarantine has the
    /// extents, or the journal has ended.
    pub(crate) fn has_left(&self, number: Option<u64>) {
        if let Some(number) = number {
            self.leaving.lock().remove(&number);
        }
    }

    /// Passes every extent whose removal is durable to `note`.
    pub(crate) fn each(&self, mut note: impl FnMut(Extent)) {
        let leased = self.delayed.lock();
        leased.items.values().for_each(|item| note(item.extent));
        drop(leased);
        for tickets in self.by_node.read().values() {
            for ticket in tickets.open.lock().values() {
                if let Ticket::Fence(run) = ticket {
                    run.iter().for_each(|item| note(item.extent));
                }
            }
        }
    }

    /// The number of the next request.
    pub fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Takes extents whose removal is durable, and asks the nodes to fence the extents without
    /// leases.
    pub fn take(&self, freed: Vec<Freed>, now: BootInstant) {
        let mut ready = Vec::with_capacity(freed.len());
        let mut delayed = self.delayed.lock();
        for mut item in freed {
            if item.not_before > now.after(STUCK_AFTER) {
                item.segment.stick(item.index);
                item.stuck = true;
            }
            if item.not_before > now {
                delayed.insert(self.number(), item);
            } else {
                // The append may have taken long. A slow log says nothing about the node.
                item.since = now;
                ready.push(item);
            }
        }
        drop(delayed);
        self.ask(ready);
    }

    /// Asks the nodes to fence the extents whose leases are over. `log` gets these extents before
    /// any of them is granted again.
    pub fn tick(&self, now: BootInstant, log: impl FnOnce(&[Freed])) {
        let mut delayed = self.delayed.lock();
        let mut over = delayed.take_over(now);
        drop(delayed);
        self.moved.forget(now);
        log(&over);
        // From here on these extents wait only for the node's answer, so they count as free.
        for item in &mut over {
            item.since = now;
            if std::mem::take(&mut item.stuck) {
                item.segment.unstick(item.index);
            }
        }
        self.ask(over);
    }

    /// Marks extents that a node has not fenced in time. Requests are ordered by time, so this call
    /// examines only the due ones after the last examined one.
    pub fn mark_stuck(&self, node: &StoreNode, now: BootInstant) {
        let Some(tickets) = self.tickets(node) else {
            return;
        };
        let mut seen = tickets.stuck_through.lock();
        for (number, ticket) in tickets.open.lock().range_mut(*seen + 1..) {
            if let Ticket::Fence(run) = ticket {
                if run.iter().all(|item| now.since(item.since) < STUCK_AFTER) {
                    break;
                }
                for item in run.iter_mut().filter(|item| !item.stuck) {
                    item.segment.stick(item.index);
                    item.stuck = true;
                }
            }
            *seen = *number;
        }
    }

    /// Drops the requests to a node that is gone.
    pub(crate) fn forget(&self, node: &StoreNode) {
        let tickets = self.by_node.write().remove(&node.incarnation);
        if let Some(tickets) = tickets {
            tickets.open.lock().clear();
        }
    }

    fn tickets(&self, node: &StoreNode) -> Option<Arc<NodeTickets>> {
        self.by_node.read().get(&node.incarnation).map(Arc::clone)
    }

    fn tickets_or_new(&self, node: &StoreNode) -> Arc<NodeTickets> {
        if let Some(tickets) = self.tickets(node) {
            return tickets;
        }
        Arc::clone(self.by_node.write().entry(node.incarnation).or_default())
    }

    fn ask(&self, ready: Vec<Freed>) {
        let mut by_node: HashMap<Incarnation, Vec<Freed>> = HashMap::new();
        for item in ready {
            by_node
                .entry(item.segment.node.incarnation)
                .or_default()
                .push(item);
        }
        for items in by_node.into_values() {
            let Some(node) = items.first().map(|item| Arc::clone(&item.segment.node)) else {
                continue;
            };
            let runs = runs(items);
            // Numbers are given under the lock, so that a node's requests are ordered by time.
            let tickets = self.tickets_or_new(&node);
            let mut tickets = tickets.open.lock();
            // A dropped node would never answer, and its requests would keep the node's state in
            // memory.
            if node.state() == NodeState::Gone {
                drop(tickets);
                self.forget(&node);
                continue;
            }
            let mut message = Vec::with_capacity(runs.len());
            for run in runs {
                let number = self.number();
                message.push(fence_item(number, &run));
                let newest = tickets.last_key_value().map_or(0, |(newest, _)| *newest);
                debug_assert!(newest < number, "invariant: requests ascend with time");
                tickets.insert(number, Ticket::Fence(run));
            }
            drop(tickets);
            send_fences(&node, message);
        }
    }

    /// Repeats the unanswered requests over a node's new session.
    pub fn repeat(&self, node: &StoreNode) {
        let (mut fences, mut verifies) = (Vec::new(), Vec::new());
        let Some(tickets) = self.tickets(node) else {
            return;
        };
        for (number, ticket) in tickets.open.lock().iter() {
            match ticket {
                Ticket::Fence(run) => fences.push(fence_item(*number, run)),
                Ticket::Verify(suspected) => verifies.push(verify(*number, suspected)),
            }
        }
        send_fences(node, fences);
        for message in verifies {
            node.send(proto::master_message::Body::Verify(message));
        }
    }

    /// Frees the extents that a node has fenced, and returns their bytes.
    pub fn fenced(&self, node: &StoreNode, tickets: &[u64]) -> u64 {
        let fenced: Vec<Run> = {
            let Some(open) = self.tickets(node) else {
                return 0;
            };
            let mut waiting = open.open.lock();
            let taken = tickets.iter().filter_map(|ticket| waiting.remove(ticket));
            taken
                .filter_map(|ticket| match ticket {
                    Ticket::Fence(run) => Some(run),
                    Ticket::Verify(_) => None,
                })
                .collect()
        };
        let items: Vec<&Freed> = fenced.iter().flatten().collect();
        items
            .chunk_by(|one, next| Arc::ptr_eq(&one.segment, &next.segment))
            .filter_map(|items| {
                let indexes = items.iter().map(|item| (item.index, item.stuck));
                Some(items.first()?.segment.free_quarantined(indexes))
            })
            .sum()
    }

    /// Asks a node to re-verify bytes with a wrong checksum. False if the node is gone, and will not answer.
    pub fn verify(&self, node: &StoreNode, suspected: Suspected) -> bool {
        let tickets = self.tickets_or_new(node);
        let mut tickets = tickets.open.lock();
        if node.state() == NodeState::Gone {
            drop(tickets);
            self.forget(node);
            return false;
        }
        let number = self.number();
        let message = verify(number, &suspected);
        tickets.insert(number, Ticket::Verify(suspected));
        drop(tickets);
        node.send(proto::master_message::Body::Verify(message));
        true
    }

    /// Removes the request to re-verify that a node has answered.
    pub fn verified(&self, node: &StoreNode, ticket: u64) -> Option<Suspected> {
        match self.tickets(node)?.open.lock().remove(&ticket) {
            Some(Ticket::Verify(suspected)) => Some(suspected),
            _ => None,
        }
    }
}

/// Joins neighbours that can be fenced together.
fn runs(mut items: Vec<Freed>) -> Vec<Run> {
    items.sort_unstable_by_key(|item| (item.extent.segment, item.extent.offset));
    let mut runs: Vec<Run> = Vec::with_capacity(items.len());
    for item in items {
        match runs.last_mut() {
            Some(run) if joins(run, &item) => run.push(item),
            _ => runs.push(smallvec![item]),
        }
    }
    runs
}

/// True when an extent continues a run and the run stays short. A fence covers the bytes between
/// two extents too, so the extents must be adjacent.
fn joins(run: &Run, item: &Freed) -> bool {
    let (Some(first), Some(last)) = (run.first(), run.last()) else {
        return false;
    };
    let (Some(begins), Some(ends)) = (last.extent.end(), item.extent.end()) else {
        return false;
    };
    last.extent.segment == item.extent.segment
        && begins == item.extent.offset
        && ends.0 - first.extent.offset.0 <= RUN_BYTES
        && last.grant.is_some() == item.grant.is_some()
}

/// Sends fences in several messages. The extents that are freed at once, or that wait for a node's
/// return, may exceed one message.
fn send_fences(node: &StoreNode, mut fences: Vec<proto::FenceItem>) {
    while !fences.is_empty() {
        let later = fences.split_off(fences.len().min(proto::MAX_TICKETS));
        node.send(proto::master_message::Body::Fence(proto::Fence {
            items: std::mem::replace(&mut fences, later),
        }));
    }
}

fn range(extent: &Extent) -> proto::ExtentRange {
    proto::ExtentRange {
        segment: extent.segment.0,
        offset: extent.offset.0,
        length: extent.length.0,
    }
}

fn fence_item(ticket: u64, run: &Run) -> proto::FenceItem {
    let whole = run.first().map(|first| proto::ExtentRange {
        length: run.iter().map(|item| item.extent.length.0).sum(),
        ..range(&first.extent)
    });
    debug_assert!(
        run.windows(2).all(|pair| matches!(
            pair, [one, next] if one.extent.end() == Some(next.extent.offset)
        )),
        "invariant: a run has no gaps"
    );
    let highest = run.iter().filter_map(|item| item.grant).max();
    // The whole run is freed at once, so no part of it is granted before that.
    let before = run.iter().map(|item| item.before).max();
    proto::FenceItem {
        ticket,
        grant: highest.map_or(0, |grant| grant.0),
        extent: whole,
        before: before.map_or(0, |before| before.0),
    }
}

fn verify(ticket: u64, suspected: &Suspected) -> proto::Verify {
    proto::Verify {
        ticket,
        extent: Some(range(&suspected.extent)),
        checksum: suspected.checksum.0,
    }
}

#[cfg(test)]
mod tests;
