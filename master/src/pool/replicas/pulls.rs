//! The pulls in progress, and the effects of their ends.

use super::super::tiering::{Moved, Put, range};
use super::super::{FreedReplicas, Pool};
use super::tasks::{Change, Outcome, Task};
use super::{Brought, Work};
use crate::clock::BootInstant;
use crate::directory::{Added, BlockRef, Tick};
use crate::membership::StoreNode;
use crate::replica::{BlockId, Replica};
use crate::store::journal::Ack;
use crate::store::record::{self, Record};
use kvpool_proto::{self as proto, master_message::Body};
use kvpool_types::{Code, Extent, GrantId, Incarnation, Length, ReadRight, Version};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// The most bytes that one target pulls at a time. A larger block is pulled alone.
const WINDOW: u64 = 64 << 20;
/// The most pulls of one target at a time.
const MOST_PULLS: usize = 4096;
/// A pull without an answer for this long is given up. Its node may have lost the order with a
/// session.
const LONGEST: Duration = Duration::from_secs(30);
/// The delay before a block whose pull failed is tried again.
const RETRY: Duration = Duration::from_millis(50);
/// The number of failed pulls after which a block is given up.
const MOST_FAILURES: u8 = 8;

/// One order that a node has not answered.
#[derive(Clone, Debug)]
pub(super) struct Pull {
    pub(super) task: Arc<Task>,
    pub(super) work: Work,
    pub(super) block: Moved,
    pub(super) source: Replica,
    pub(super) source_node: Arc<StoreNode>,
    /// The replica that a move drops.
    pub(super) dropped: Option<Replica>,
    /// The last use of the block when the pull was ordered.
    pub(super) used: Tick,
    pub(super) target: Arc<StoreNode>,
    /// The extent to write.
    pub(super) to: Replica,
    pub(super) grant: GrantId,
}

impl Pull {
    /// Whether eviction does not see the block: it leaves a node that takes no blocks, and is not on the target yet.
    /// A block of media does not count, because it may only pass through memory.
    fn is_unseen(&self) -> bool {
        !self.source_node.is_placeable() && !self.task.is_of_media()
    }
}

/// Every pull in progress.
#[derive(Debug, Default)]
pub(super) struct Open {
    last_ticket: u64,
    pulls: HashMap<u64, Sent>,
    /// The grants of the pulls of each block, until their replicas are published or given up.
    blocks: HashMap<BlockId, Vec<Changing>>,
    targets: HashMap<Incarnation, InProgress>,
    /// The bytes that each source node may send now.
    sources: HashMap<Incarnation, Allowance>,
    /// The most bytes per second that one source may send; 0 for no limit.
    bandwidth: u64,
}

#[derive(Debug)]
struct Sent {
    pull: Pull,
    session: u64,
    at: BootInstant,
}

/// One change of a block by a pull.
#[derive(Debug)]
struct Changing {
    grant: GrantId,
    target: Incarnation,
    dropped: Option<Replica>,
    /// The last use of the block, if eviction does not see it.
    unseen: Option<Tick>,
    source: Arc<StoreNode>,
    to: Replica,
    length: Length,
    version: Version,
}

#[derive(Debug, Default)]
struct InProgress {
    bytes: u64,
    pulls: usize,
}

/// A source's bytes for the time since `at`; negative after a large block.
#[derive(Debug)]
struct Allowance {
    bytes: i128,
    at: BootInstant,
}

impl Open {
    /// An empty set of pulls. `bandwidth` is the most bytes per second that one source may send; 0 for no limit.
    pub(super) fn new(bandwidth: u64) -> Self {
        Self {
            bandwidth,
            ..Self::default()
        }
    }

    /// True if the target takes another block now.
    pub(super) fn takes(&self, target: &StoreNode, length: Length) -> bool {
        self.targets.get(&target.incarnation).is_none_or(|open| {
            open.pulls < MOST_PULLS && (open.bytes == 0 || open.bytes + length.0 <= WINDOW)
        })
    }

    /// True if another pull copies the block to the same target, or drops the same replica. Two such pulls would
    /// leave the block with fewer or more replicas than either task asked for.
    pub(super) fn changes(
        &self,
        block: BlockId,
        target: &StoreNode,
        dropped: Option<Replica>,
    ) -> bool {
        self.blocks.get(&block).is_some_and(|pulls| {
            pulls.iter().any(|pull| {
                pull.target == target.incarnation || (dropped.is_some() && pull.dropped == dropped)
            })
        })
    }

    /// Calls `note` for each pull with its target extent, and with the length and version of its block.
    pub(super) fn each_target(&self, mut note: impl FnMut(&Replica, Length, Version)) {
        for pull in self.blocks.values().flatten() {
            note(&pull.to, pull.length, pull.version);
        }
    }

    /// The earliest last use of the blocks in progress that eviction does not see. A pull whose source has no session
    /// does not count: its block may never arrive.
    pub(super) fn oldest_unseen(&self) -> Option<Tick> {
        let pulls = self.blocks.values().flatten();
        let goes_on = pulls.filter(|pull| pull.source.is_connected());
        goes_on.filter_map(|pull| pull.unseen).min()
    }

    /// True if a pull copies a block to this node.
    pub(super) fn has_target(&self, node: &StoreNode) -> bool {
        let mut pulls = self.blocks.values().flatten();
        pulls.any(|pull| pull.target == node.incarnation)
    }

    /// Records that a pull no longer changes its block.
    fn has_changed(&mut self, pull: &Pull) {
        if let Some(pulls) = self.blocks.get_mut(&pull.work.block) {
            pulls.retain(|known| known.grant != pull.grant);
            if pulls.is_empty() {
                self.blocks.remove(&pull.work.block);
            }
        }
    }

    /// True if the source may send another block now.
    pub(super) fn lets_read(&mut self, source: &StoreNode, now: BootInstant) -> bool {
        if self.bandwidth == 0 {
            return true;
        }
        let rate = i128::from(self.bandwidth);
        let allowance = self
            .sources
            .entry(source.incarnation)
            .or_insert_with(|| Allowance { bytes: 0, at: now });
        let millis = i128::try_from(now.since(allowance.at).as_millis()).unwrap_or(0);
        let earned = rate * millis / 1000;
        // A source saves up at most a tenth of a second.
        allowance.bytes = (allowance.bytes + earned).min(rate / 10);
        allowance.at = now;
        allowance.bytes >= 0
    }

    /// Enters a pull and sends its order. Both happen under one lock, so the order belongs to the
    /// recorded session. Returns the pull if its target has no session. The two proofs sign the
    /// grant, and the permission to read the source.
    pub(super) fn enter(
        &mut self,
        pull: Pull,
        (mac, read): (&[u8], Option<&ReadRight>),
        now: BootInstant,
    ) -> Option<Pull> {
        let Some(session) = pull.target.session_number() else {
            return Some(pull);
        };
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let length = pull.block.length;
        let extent = |replica: Replica| {
            range(&Extent {
                segment: replica.segment,
                offset: replica.offset,
                length,
            })
        };
        let order = proto::Pull {
            ticket,
            from_address: pull.source_node.address().data,
            from_incarnation: bytes::Bytes::copy_from_slice(
                &pull.source_node.incarnation.to_bytes(),
            ),
            from: Some(extent(pull.source)),
            to: Some(extent(pull.to)),
            checksum: pull.block.checksum.0,
            grant: bytes::Bytes::copy_from_slice(mac),
            grant_id: pull.grant.0,
            version: pull.block.version.0,
            read_deadline_ms: read.map_or(0, |right| right.deadline_ms),
            read_proof: read.map_or_else(bytes::Bytes::new, |right| {
                bytes::Bytes::copy_from_slice(&right.mac)
            }),
        };
        let open = self.targets.entry(pull.target.incarnation).or_default();
        open.bytes += length.0;
        open.pulls += 1;
        if let Some(allowance) = self.sources.get_mut(&pull.source_node.incarnation) {
            allowance.bytes -= i128::from(length.0);
        }
        self.blocks
            .entry(pull.work.block)
            .or_default()
            .push(Changing {
                grant: pull.grant,
                target: pull.target.incarnation,
                dropped: pull.dropped,
                unseen: pull.is_unseen().then_some(pull.used),
                source: Arc::clone(&pull.source_node),
                to: pull.to,
                length,
                version: pull.work.version,
            });
        let target = Arc::clone(&pull.target);
        self.pulls.insert(
            ticket,
            Sent {
                pull,
                session,
                at: now,
            },
        );
        target.send(Body::Pulls(proto::Pulls { pulls: vec![order] }));
        None
    }

    fn end(&mut self, ticket: u64) -> Option<Pull> {
        let Sent { pull, .. } = self.pulls.remove(&ticket)?;
        let node = pull.target.incarnation;
        if let Some(open) = self.targets.get_mut(&node) {
            open.bytes = open.bytes.saturating_sub(pull.block.length.0);
            open.pulls = open.pulls.saturating_sub(1);
            if open.pulls == 0 {
                self.targets.remove(&node);
            }
        }
        Some(pull)
    }

    fn end_of(&mut self, node: &StoreNode, ticket: u64) -> Option<Pull> {
        let sent = self.pulls.get(&ticket)?;
        (sent.pull.target.incarnation == node.incarnation)
            .then(|| self.end(ticket))
            .flatten()
    }

    /// Removes and returns the pulls whose session has ended, or that have had no answer for [`LONGEST`].
    fn take_lost(&mut self, now: BootInstant) -> Vec<Pull> {
        let is_lost = |sent: &Sent| {
            sent.pull.target.session_number() != Some(sent.session) || now.since(sent.at) >= LONGEST
        };
        let lost = self.pulls.iter().filter(|(_, sent)| is_lost(sent));
        let lost: Vec<u64> = lost.map(|(ticket, _)| *ticket).collect();
        lost.into_iter()
            .filter_map(|ticket| self.end(ticket))
            .collect()
    }
}

impl Pool {
    /// Processes a node's answers.
    pub fn pulled(self: &Arc<Self>, node: &StoreNode, done: &[(u64, Code)]) {
        for (ticket, code) in done {
            let ended = self.replicas.pulls.lock().end_of(node, *ticket);
            let Some(pull) = ended else { continue };
            match code {
                Code::Ok => self.arrived(pull),
                code => {
                    if *code == Code::ChecksumMismatch {
                        self.suspect_source(&pull);
                    }
                    self.pull_failed(pull, *code);
                }
            }
        }
        self.replicas.wake();
    }

    /// Gives up pulls whose node lost them.
    pub(super) fn end_lost_pulls(self: &Arc<Self>) {
        let lost = self.replicas.pulls.lock().take_lost(self.now());
        for pull in lost {
            self.pull_failed(pull, Code::Unreachable);
        }
    }

    fn pull_failed(&self, pull: Pull, code: Code) {
        self.free_target(&pull);
        self.replicas.pulls.lock().has_changed(&pull);
        let Pull {
            task,
            work,
            block,
            source_node,
            target,
            ..
        } = pull;
        tracing::debug!(key = %block.key.shown(), node = %target.name, %code, "replica not pulled");
        let now = self.now();
        let why = || format!("node {} could not copy the block: {code}", target.name);
        // The source has probably died. The block waits for its next session, or is read from another replica.
        if code == Code::Unreachable && !source_node.is_connected() {
            return task.try_later(work, now.after(RETRY), (code, why()));
        }
        try_again(&task, work, now, code, why);
    }

    /// Frees the extent of a pull that leaves no replica. Its node fences it first.
    pub(super) fn free_target(&self, pull: &Pull) {
        let freed = self.freed(std::iter::once(FreedReplicas {
            replicas: &[pull.to],
            version: Version(pull.grant.0),
            length: pull.block.length,
            not_before: BootInstant(0),
        }));
        self.free(freed);
    }

    /// Asks the source to re-verify a replica that the block still has, because the pulled bytes
    /// were wrong.
    fn suspect_source(&self, pull: &Pull) {
        let Moved {
            namespace,
            ref key,
            version,
            ..
        } = pull.block;
        let reports = [(
            key.as_ref(),
            version,
            pull.source.segment,
            Code::ChecksumMismatch,
        )];
        self.report(namespace, &reports);
    }

    /// Records the replica of a pull that succeeded.
    fn arrived(self: &Arc<Self>, pull: Pull) {
        let Moved {
            namespace,
            ref key,
            version,
            ..
        } = pull.block;
        let is_there = self
            .directory
            .read_block(pull.work.block, version, |_| ())
            .is_some();
        if !is_there {
            self.free_target(&pull);
            self.replicas.pulls.lock().has_changed(&pull);
            return pull.task.end(pull.task.missing(version), self.now());
        }
        // This node's drain may have listed its blocks before the new replica came.
        if pull.dropped.is_some() && pull.target.drains() {
            return self.pull_failed(pull, Code::Draining);
        }
        // The drop of a move's old replica is logged once the new replica is in the directory. Its
        // node may be dropped before.
        let records = vec![Record::ReplicaAdded(record::ReplicaAdded {
            namespace,
            key: key.clone(),
            version,
            segment: pull.to.segment,
            offset: pull.to.offset,
        })];
        let pool = Arc::clone(self);
        self.journal()
            .submit_now(records, Ack::Durable, move |durable| match durable {
                Ok(_) => pool.publish_pulled(&pull),
                Err(error) if !error.is_outcome_unknown() => pool.pull_failed(pull, error.code()),
                // The journal has failed, and the next leader reads the log.
                Err(_) => {}
            });
    }

    /// Makes a durable replica visible, on the journal's thread, in the order of the log.
    fn publish_pulled(self: &Arc<Self>, pull: &Pull) {
        let Moved {
            namespace,
            ref key,
            version,
            length,
            ..
        } = pull.block;
        let now = self.now();
        let added = self
            .directory
            .add_replica(namespace, key.as_ref(), version, pull.to);
        let is_there = match added {
            Added::To(block) => self.replica_is_there(pull, block),
            // Another task brought the block here in the meantime. The source stays, since without
            // it the block would have a replica less than the tasks asked for. A later load of the
            // log also finds the replica present, and ignores this one.
            Added::There => {
                self.free_target(pull);
                false
            }
            Added::Missing => {
                self.replica_came_late(pull);
                false
            }
        };
        if let Some(dropped) = pull.dropped.filter(|_| is_there) {
            // The append may have been late, and the target may have died or begun to leave. If
            // `drains` is not set here, the drain will list this replica: it is in the directory
            // before the drain lists the blocks.
            if !pull.target.stays() {
                self.replicas.pulls.lock().has_changed(pull);
                self.replicas.wake();
                let work = Work {
                    brought: Some(Brought {
                        replica: pull.to,
                        given_up: dropped,
                    }),
                    ..pull.work.clone()
                };
                return try_again(&pull.task, work, now, Code::Draining, || {
                    let target = &pull.target.name;
                    format!("node {target} has the block, and cannot be read or leaves")
                });
            }
            // A move drops its source only once the new replica is in the directory. The mover
            // holds the lock `evicting` for a drop. The journal's thread must not wait for an
            // eviction, because the eviction waits for the journal.
            self.drop_spare_logged(&pull.block, &dropped);
        }
        let outcome = match added {
            Added::To(_) if is_there => Outcome::Changed(length),
            Added::To(_) => {
                let left = format!("node {} has left", pull.target.name);
                Outcome::Failed(Code::Unreachable, left)
            }
            Added::There => Outcome::Gone,
            Added::Missing => pull.task.missing(version),
        };
        match (pull.task.wish.change, &outcome) {
            (Change::Move, Outcome::Changed(_)) => self.metrics.replica_moved(length),
            (_, Outcome::Changed(_)) => self.metrics.replica_copied(length),
            _ => {}
        }
        self.replicas.pulls.lock().has_changed(pull);
        pull.task.end(outcome, now);
        self.replicas.wake();
    }

    /// Runs after the directory has the replica. Returns false if the replica's node has left
    /// meanwhile.
    fn replica_is_there(self: &Arc<Self>, pull: &Pull, block: BlockId) -> bool {
        let Moved {
            namespace,
            ref key,
            version,
            length,
            hard_pin,
            ..
        } = pull.block;
        let is_there = {
            let segments = self.placement.segments();
            segments.set_owners(std::iter::once((&pull.to, block)));
            segments.get(pull.to.segment).is_some()
        };
        if !is_there {
            // The node was dropped before the replica was published.
            self.sweep_late(namespace, key, version, pull.to.segment);
            return false;
        }
        // The replica takes room like a block that was put, so the blocks before it need their
        // copies sooner.
        let put = Put {
            namespace,
            key,
            parent: None,
            block,
            version,
            bytes: length.0,
            hard_pin,
            replicas: std::slice::from_ref(&pull.to),
        };
        if pull.task.is_of_media() {
            let used = |found: BlockRef<'_>| found.tick();
            if let Some(used) = self.directory.read_block(block, version, used) {
                self.queue_moved_for_media(&put, used);
            }
        }
        self.queue_for_media(std::iter::once(put));
        true
    }

    /// The block was evicted before its replica was published, and the eviction's record may follow
    /// the replica's record in the log. So the replica is removed in the log before its extent is
    /// free.
    fn replica_came_late(self: &Arc<Self>, pull: &Pull) {
        let gone = Record::ReplicaGone(record::ReplicaGone {
            namespace: pull.block.namespace,
            key: pull.block.key.clone(),
            version: pull.block.version,
            segment: pull.to.segment,
            offset: Some(pull.to.offset),
        });
        let freed = self.freed(std::iter::once(FreedReplicas {
            replicas: &[pull.to],
            version: Version(pull.grant.0),
            length: pull.block.length,
            not_before: BootInstant(0),
        }));
        self.free_once_logged(vec![gone], freed);
    }
}

/// Tries a block of a task again later, for a bounded number of times.
fn try_again(
    task: &Task,
    mut work: Work,
    now: BootInstant,
    code: Code,
    why: impl FnOnce() -> String,
) {
    work.failures += 1;
    match work.failures < MOST_FAILURES {
        true => task.try_later(work, now.after(RETRY), (code, why())),
        false => task.end(Outcome::Failed(code, why()), now),
    }
}
