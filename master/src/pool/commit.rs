//! Commits: records are made durable, then the blocks are published.

use super::tiering::Put;
use super::{FreedReplicas, Pool};
use crate::clock::BootInstant;
use crate::directory::{Copies, Holders, NewBlock, Published, Replica, Tick};
use crate::placement::quarantine::Freed;
use crate::reservations::PutId;
use crate::store::journal::Ack;
use crate::store::record::{self, Record};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, Code, Key, KeyRef, Length, SegmentId, Version};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// The segments of a block's written replicas.
pub type Written = SmallVec<[SegmentId; 2]>;

/// One written block.
#[derive(Clone, Debug)]
pub struct CommitItem {
    /// Key of the block.
    pub key: Key,
    /// The id of the grants under which the block was written.
    pub version: Version,
    /// Length in bytes.
    pub length: Length,
    /// Checksum of the block's bytes.
    pub checksum: Checksum,
    /// The segments whose replicas were written, at least one.
    pub segments: Written,
    /// Key of the block before this one in the chain.
    pub parent: Option<Key>,
}

/// An accepted commit that is not durable yet.
struct Accepted {
    index: usize,
    put: PutId,
    version: Version,
    length: Length,
    soft_pin: Option<Duration>,
    /// Whether the key had another block when the put began.
    had_block: bool,
    /// Replicas that were granted but not written.
    unwritten: Copies,
}

/// The accepted commits of one call and their blocks, in the same order.
#[derive(Default)]
struct Batch {
    accepted: Vec<Accepted>,
    blocks: Vec<NewBlock>,
}

impl Pool {
    /// Makes written blocks visible. Answers after the durable append, unless the pool acknowledges
    /// from memory.
    pub async fn commit(
        self: &Arc<Self>,
        namespace: NamespaceId,
        items: Vec<CommitItem>,
    ) -> Vec<Code> {
        let mut codes = vec![Code::Ok; items.len()];
        let batch = self.accept(namespace, items, &mut codes);
        if batch.accepted.is_empty() {
            return codes;
        }
        let records = batch.blocks.iter().map(record_of).collect();
        let indexes: Vec<usize> = batch.accepted.iter().map(|a| a.index).collect();
        let (done, published) = oneshot::channel();
        let pool = Arc::clone(self);
        let submitting = self.journal().submit(records, self.ack(), move |durable| {
            let outcome = match durable {
                Ok(_) => pool.publish(namespace, batch),
                Err(error) => {
                    let outcome = vec![error.code(); batch.accepted.len()];
                    // While durability is unknown, the puts stay open: their blocks are neither
                    // visible nor given up. The journal is unhealthy from then on, and the next
                    // start reads the log.
                    if !error.is_outcome_unknown() {
                        pool.give_up(&batch.accepted);
                    }
                    outcome
                }
            };
            let _caller_left = done.send(outcome);
        });
        let answered = async {
            if let Err(error) = submitting.await {
                tracing::error!(%error, "commit not logged");
            }
            published.await.ok()
        };
        let outcome = tokio::select! {
            biased;
            outcome = answered => outcome,
            // The append may still succeed. The client learns the outcome when it repeats the
            // commit at the next leader.
            () = self.lapsed() => None,
        };
        let outcome = outcome.unwrap_or_else(|| vec![Code::StoreFailed; indexes.len()]);
        for (index, code) in indexes.into_iter().zip(outcome) {
            if let Some(slot) = codes.get_mut(index) {
                *slot = code;
            }
        }
        codes
    }

    fn accept(&self, namespace: NamespaceId, items: Vec<CommitItem>, codes: &mut [Code]) -> Batch {
        let now = self.now();
        let mut batch = Batch {
            accepted: Vec::with_capacity(items.len()),
            blocks: Vec::with_capacity(items.len()),
        };
        let mut reservations = self.reservations.lock();
        // A deletion closes the account first and then ends the puts under this lock.
        let is_closed = self.directory.accounts().of(namespace).is_closed();
        reservations.prefetch(namespace, items.iter().map(|item| item.key.as_ref()));
        for ((index, item), code) in items.into_iter().enumerate().zip(codes) {
            if item.segments.is_empty() {
                *code = Code::InvalidArgument;
                continue;
            }
            if is_closed {
                *code = Code::UnknownNamespace;
                continue;
            }
            let begun = reservations.begin_commit(
                namespace,
                item.key.as_ref(),
                item.version,
                item.length,
                &item.segments,
                now,
            );
            match begun {
                Ok((put, pending)) => {
                    let is_written = |r: &Replica| item.segments.contains(&r.segment);
                    let (replicas, unwritten) =
                        pending.replicas.iter().copied().partition(is_written);
                    batch.accepted.push(Accepted {
                        index,
                        put,
                        version: item.version,
                        length: item.length,
                        soft_pin: pending.soft_pin,
                        had_block: pending.had_block,
                        unwritten,
                    });
                    batch.blocks.push(NewBlock {
                        namespace,
                        key: item.key,
                        version: item.version,
                        length: item.length,
                        checksum: item.checksum,
                        replicas,
                        parent: item.parent,
                        soft_pin_until: None,
                        hard_pin: pending.hard_pin,
                        tick: Tick::default(),
                        leased_until: None,
                    });
                }
                Err(Code::GrantEnded) if self.holds_version(namespace, &item) => {}
                Err(refused) => *code = refused,
            }
        }
        batch
    }

    /// True when an earlier attempt of the same commit succeeded, and memory or a medium has the block still.
    fn holds_version(&self, namespace: NamespaceId, item: &CommitItem) -> bool {
        let mut held = false;
        self.directory
            .visit(namespace, &[item.key.as_ref()], |_, block| {
                held = block.is_some_and(|block| block.version() == item.version);
            });
        held || self.is_on_medium(namespace, &item.key, item.version)
    }

    /// Publishes durable blocks, on the journal's thread, in the order of the log.
    fn publish(self: &Arc<Self>, namespace: NamespaceId, batch: Batch) -> Vec<Code> {
        let Batch {
            accepted,
            mut blocks,
        } = batch;
        let now = self.now();
        let queueing = self.has_media().then(|| self.tiering.queueing.lock());
        let ticks = self.directory.ticks(accepted.len());
        for (at, (block, accepted)) in blocks.iter_mut().zip(&accepted).enumerate() {
            block.tick = ticks.of(at);
            block.soft_pin_until = accepted.soft_pin.map(|ttl| now.after(ttl));
            block.leased_until = accepted.had_block.then(|| self.latest_token());
        }
        // The copies of earlier versions leave. The holder of a lease on a copy releases it at the
        // new block.
        let mut leased = Vec::new();
        for block in blocks.iter().filter(|_| self.has_media()) {
            let older = |version| version < block.version;
            let copy = self.tier.remove(namespace, block.key.as_ref(), older);
            if copy.is_some_and(|copy| copy.lease_until > now) {
                leased.push(block.version);
            }
        }
        let published = match leased.is_empty() {
            true => self.directory.publish(&blocks),
            false => self.publish_leased(namespace, &blocks, &leased),
        };
        let queued = published
            .iter()
            .zip(&blocks)
            .filter_map(|(published, block)| {
                Some(Put {
                    namespace,
                    key: &block.key,
                    parent: block.parent.as_ref(),
                    block: published.id?,
                    version: block.version,
                    bytes: block.length.0,
                    hard_pin: block.hard_pin,
                    replicas: &block.replicas,
                })
            });
        self.queue_for_media(queued);
        drop(queueing);
        if now < self.lease_floor {
            let ids = published.iter().zip(&blocks);
            self.recent_puts
                .put(ids.filter_map(|(published, block)| Some((published.id?, block.version))));
        }
        let mut codes = vec![Code::Ok; accepted.len()];
        {
            let segments = self.placement.segments();
            let owned = published
                .iter()
                .zip(&blocks)
                .flat_map(|(published, block)| {
                    let id = published.id;
                    block.replicas.iter().filter_map(move |r| Some((r, id?)))
                });
            segments.set_owners(owned);
            for (code, block) in codes.iter_mut().zip(&blocks) {
                let is_gone = |r: &&Replica| segments.get(r.segment).is_none();
                for lost in block.replicas.iter().filter(is_gone) {
                    self.settle_lost_node(namespace, block, lost.segment, code);
                }
            }
        }
        let freed = self.freed(published.iter().zip(&accepted).flat_map(|(published, a)| {
            let replaced = published.replaced.as_deref().map(|old| self.left(old));
            let unwritten = (!a.unwritten.is_empty()).then_some(FreedReplicas {
                replicas: &a.unwritten,
                version: a.version,
                length: a.length,
                not_before: BootInstant(0),
            });
            replaced.into_iter().chain(unwritten)
        }));
        {
            let mut reservations = self.reservations.lock();
            reservations.prefetch_committing(accepted.iter().map(|a| a.put));
            for a in &accepted {
                reservations.finish(a.put, a.version);
            }
        }
        self.metrics.committed(accepted.iter().map(|a| a.length));
        self.free_replaced(freed);
        codes
    }

    /// Publishes blocks. The blocks with a version in `leased` have lease holders that no counter
    /// includes.
    fn publish_leased(
        &self,
        namespace: NamespaceId,
        blocks: &[NewBlock],
        leased: &[Version],
    ) -> Vec<Published> {
        let until = self.latest_token();
        let published = self.directory.publish_held(blocks, until, self.now());
        let keys: Vec<KeyRef<'_>> = blocks.iter().map(|block| block.key.as_ref()).collect();
        self.directory.visit(namespace, &keys[..], |index, block| {
            let version = blocks.get(index).map(|block| block.version);
            if let Some(mut block) = block.filter(|block| Some(block.version()) == version) {
                block.settle(match leased.contains(&block.version()) {
                    true => Holders::unknown(),
                    false => Holders::default(),
                });
            }
        });
        published
    }

    /// Frees the extents that committed blocks replaced, once the log holds the commits. A commit
    /// that was acknowledged from memory is not in the log yet. After a crash, recovery may restore
    /// the old version.
    fn free_replaced(self: &Arc<Self>, freed: Vec<Freed>) {
        if freed.is_empty() || self.ack() == Ack::Durable {
            self.free(freed);
        } else {
            self.free_once_logged(Vec::new(), freed);
        }
    }

    /// Ends puts whose records are certainly not in the log.
    fn give_up(&self, accepted: &[Accepted]) {
        let ended = {
            let mut reservations = self.reservations.lock();
            accepted
                .iter()
                .filter_map(|a| reservations.finish(a.put, a.version))
                .collect()
        };
        self.end_reservations(ended);
    }

    /// Drops a block's replica on a node that was dropped while the commit became durable. The drop
    /// of the node covered only the blocks in the directory at that time. If it was the only
    /// replica, the writer may put the block again, but the key's earlier block is gone all the same.
    fn settle_lost_node(
        &self,
        namespace: NamespaceId,
        block: &NewBlock,
        segment: SegmentId,
        code: &mut Code,
    ) {
        let dropped =
            self.directory
                .drop_replica(namespace, block.key.as_ref(), block.version, segment);
        if dropped.is_some_and(|dropped| dropped.removed.is_some()) {
            *code = Code::Unreachable;
        }
    }
}

fn record_of(block: &NewBlock) -> Record {
    Record::Commit(record::Commit {
        namespace: block.namespace,
        key: block.key.clone(),
        version: block.version,
        length: block.length,
        checksum: block.checksum,
        replicas: block
            .replicas
            .iter()
            .map(|r| (r.segment, r.offset))
            .collect(),
        parent: block.parent.clone(),
        hard_pin: block.hard_pin,
    })
}
