//! Extents that have been freed and may still be touched.
//!
//! ```text
//!  block leaves the directory ─► record durable ─► leases over ─► node has fenced it ─► free
//!                                 (journal)        (delayed)      (tickets)
//! ```
//!
//! What has been here for longer than `PATIENCE` is *stuck*: a process holds it, a lease runs, or its
//! node is silent. Eviction counts on the rest as free room to come, and on what is stuck no more.
//!
//! Small neighbours that are freed together are fenced together, as one range under the highest of their
//! grants: no later grant for any of them can have a lower number, for it is given after all of them
//! were. A run is short, so that whoever still looks at one of them holds back little else.
//!
//! **Architecture Invariant:** this is the only way by which an extent that was ever granted becomes
//! free again.
//!
//! ADR 0004 says why every extent is freed by one rule, ADR 0017 how neighbours are fenced together.

use super::Segment;
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

/// How long freeing usually takes at most.
const PATIENCE: Duration = Duration::from_millis(100);

/// The most bytes of neighbours that are fenced together.
const RUN_BYTES: u64 = 64 << 10;

/// An extent on its way to being free.
#[derive(Clone, Debug)]
pub struct Freed {
    /// The segment that it lies in.
    pub segment: Arc<Segment>,
    /// Its place in the segment's table.
    pub index: ExtentIndex,
    /// Its range.
    pub extent: Extent,
    /// The grant that it was last written under; `None` when that is of an older epoch.
    pub grant: Option<GrantId>,
    /// When the last lease on it ends.
    pub not_before: BootInstant,
    /// When it left the directory.
    pub since: BootInstant,
    /// Whether it is taking so long that eviction no longer counts on it.
    pub stuck: bool,
}

/// Extents that are fenced together.
pub type Run = SmallVec<[Freed; 1]>;

/// What a node has been asked and has not answered.
#[derive(Debug)]
pub enum Ticket {
    /// To fence extents: one, or a run of neighbours, lowest first.
    Fence(Run),
    /// To check a block's bytes again.
    Verify(Suspected),
}

/// A replica that a client found wrong.
#[derive(Clone, Debug)]
pub struct Suspected {
    /// The block's namespace.
    pub namespace: kvpool_types::ids::NamespaceId,
    /// The block's key.
    pub key: kvpool_types::Key,
    /// The block's version.
    pub version: kvpool_types::Version,
    /// Where the bytes lie.
    pub extent: Extent,
    /// What they should sum to.
    pub checksum: kvpool_types::Checksum,
}

/// The extents between freed and free.
#[derive(Debug, Default)]
pub struct Quarantine {
    delayed: Mutex<Delayed>,
    next: AtomicU64,
    by_node: RwLock<HashMap<Incarnation, Arc<NodeTickets>>>,
}

/// The questions that one node has not answered.
#[derive(Debug, Default)]
struct NodeTickets {
    /// Numbers ascend with time.
    open: Mutex<BTreeMap<u64, Ticket>>,
    /// The last ticket that [`Quarantine::mark_stuck`] has looked at.
    stuck_through: Mutex<u64>,
}

/// What leases hold shut, by the end of these.
#[derive(Debug, Default)]
struct Delayed {
    items: BTreeMap<(BootInstant, u64), Freed>,
    /// The bytes of this term's stuck extents, by the tenth of a second in which their leases end and by segment.
    /// What is not stuck counts as free in [`Segment::used_after_quarantine`].
    coming: BTreeMap<(u64, SegmentId), u64>,
}

/// The tenth of a second that a moment lies in.
fn tenth(moment: BootInstant) -> u64 {
    moment.0 / 100
}

/// Under which key an extent counts as room to come. Leases of the term before are a guess: a put that waited for
/// all of them would stall after a restart.
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

    /// Takes out what waited for leases that are over now.
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
    /// The bytes that leases alone hold shut on segments that take blocks, and that become free when these end,
    /// before `until`.
    pub fn coming(&self, until: BootInstant, takes: impl Fn(SegmentId) -> bool) -> u64 {
        let delayed = self.delayed.lock();
        let before = delayed.coming.range(..(tenth(until), SegmentId(0)));
        let taking = before.filter(|((_, segment), _)| takes(*segment));
        taking.map(|(_, bytes)| bytes).sum()
    }

    /// A number for the next ticket.
    pub fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Takes extents whose freeing is durable; asks the nodes to fence those without leases.
    pub fn take(&self, freed: Vec<Freed>, now: BootInstant) {
        let mut ready = Vec::with_capacity(freed.len());
        let mut delayed = self.delayed.lock();
        for mut item in freed {
            if item.not_before > now.after(PATIENCE) {
                item.segment.stick(item.index);
                item.stuck = true;
            }
            if item.not_before > now {
                delayed.insert(self.number(), item);
            } else {
                ready.push(item);
            }
        }
        drop(delayed);
        self.ask(ready);
    }

    /// Asks the nodes to fence what waited for leases that are over now.
    pub fn tick(&self, now: BootInstant) {
        let mut delayed = self.delayed.lock();
        let mut over = delayed.take_over(now);
        drop(delayed);
        // From here on nothing but the node's answer is waited for.
        for item in &mut over {
            item.since = now;
            if std::mem::take(&mut item.stuck) {
                item.segment.unstick(item.index);
            }
        }
        self.ask(over);
    }

    /// Marks what a node has not fenced in good time. Tickets are in order of time, so this looks at
    /// those that are due and no others: `seen` is the last ticket that it has looked at.
    pub fn mark_stuck(&self, node: &StoreNode, now: BootInstant) {
        let Some(tickets) = self.tickets(node) else {
            return;
        };
        let mut seen = tickets.stuck_through.lock();
        for (number, ticket) in tickets.open.lock().range_mut(*seen + 1..) {
            if let Ticket::Fence(run) = ticket {
                if run.iter().all(|item| now.since(item.since) < PATIENCE) {
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

    /// Drops the tickets of a node that is gone.
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
        let mut by_node: HashMap<*const StoreNode, Vec<Freed>> = HashMap::new();
        for item in ready {
            by_node
                .entry(Arc::as_ptr(&item.segment.node))
                .or_default()
                .push(item);
        }
        for items in by_node.into_values() {
            let Some(node) = items.first().map(|item| Arc::clone(&item.segment.node)) else {
                continue;
            };
            let runs = runs(items);
            // Numbered under the lock, so that the tickets of a node are in order of time.
            let tickets = self.tickets_or_new(&node);
            let mut tickets = tickets.open.lock();
            // A dropped node's memory is gone. It would never answer, and the tickets would keep the node alive.
            if node.state() == NodeState::Gone {
                drop(tickets);
                self.forget(&node);
                continue;
            }
            let mut message = Vec::with_capacity(runs.len());
            for run in runs {
                let number = self.number();
                message.push(fence_item(number, &run));
                tickets.insert(number, Ticket::Fence(run));
            }
            drop(tickets);
            send_fences(&node, message);
        }
    }

    /// Repeats to a node whose session is new all that it has not answered.
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

    /// Frees what a node says that nothing can touch any more; returns the bytes.
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

    /// Asks a node to check bytes that a client found wrong.
    pub fn verify(&self, node: &StoreNode, suspected: Suspected) {
        let tickets = self.tickets_or_new(node);
        let mut tickets = tickets.open.lock();
        let number = self.number();
        let message = verify(number, &suspected);
        tickets.insert(number, Ticket::Verify(suspected));
        drop(tickets);
        node.send(proto::master_message::Body::Verify(message));
    }

    /// Takes back the question that a node has answered.
    pub fn verified(&self, node: &StoreNode, ticket: u64) -> Option<Suspected> {
        match self.tickets(node)?.open.lock().remove(&ticket) {
            Some(Ticket::Verify(suspected)) => Some(suspected),
            _ => None,
        }
    }
}

/// Puts neighbours together that can be fenced as one.
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

/// Whether an extent continues a run that stays short with it. What lies between two extents is no part
/// of either, so they must meet.
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

/// Asks for any number of fences: what is freed at once, or waits for a node that comes back, may be
/// more than one message takes.
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
    let highest = run.iter().filter_map(|item| item.grant).max();
    proto::FenceItem {
        ticket,
        grant: highest.map_or(0, |grant| grant.0),
        extent: whole,
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
