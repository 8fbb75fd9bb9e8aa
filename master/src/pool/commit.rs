//! From written to visible: records made durable, then published.

use super::Pool;
use crate::directory::{NewBlock, Removed, Replica};
use crate::reservations::Pending;
use crate::store::record::{self, Record};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, Code, Key, Length, SegmentId, Version};
use std::sync::Arc;
use tokio::sync::oneshot;

/// One written block.
#[derive(Clone, Debug)]
pub struct CommitItem {
    /// Its key.
    pub key: Key,
    /// The id of the grants that it was written under.
    pub version: Version,
    /// Its bytes.
    pub length: Length,
    /// Their checksum.
    pub checksum: Checksum,
    /// The segments whose replicas were written; at least one.
    pub segments: Vec<SegmentId>,
    /// The block before it in its chain.
    pub parent: Option<Key>,
}

/// A commit that has been accepted and waits to be durable.
struct Accepted {
    index: usize,
    item: CommitItem,
    pending: Pending,
    written: Vec<Replica>,
}

impl Pool {
    /// Makes written blocks visible. It answers once that is durable, unless the pool is set to
    /// acknowledge from memory.
    pub async fn commit(
        self: &Arc<Self>,
        namespace: NamespaceId,
        items: Vec<CommitItem>,
    ) -> Vec<Code> {
        let mut codes = vec![Code::Ok; items.len()];
        let accepted = self.accept(namespace, items, &mut codes);
        if accepted.is_empty() {
            return codes;
        }
        let records = accepted.iter().map(|a| record_of(namespace, a)).collect();
        let indexes: Vec<usize> = accepted.iter().map(|a| a.index).collect();
        let (done, published) = oneshot::channel();
        let pool = Arc::clone(self);
        let submitted = self
            .journal()
            .submit(records, self.ack(), move |durable| {
                let outcome = match durable {
                    Ok(_) => pool.publish(namespace, accepted),
                    Err(error) => {
                        let outcome = vec![error.code(); accepted.len()];
                        // When durability is unknown the puts stay committing: neither visible
                        // nor given up. The journal is unhealthy from then on, and the next
                        // start finds out.
                        if !error.is_outcome_unknown() {
                            pool.give_up(namespace, &accepted);
                        }
                        outcome
                    }
                };
                let _caller_left = done.send(outcome);
            })
            .await;
        if let Err(error) = submitted {
            tracing::error!(%error, "a commit was not logged");
        }
        let outcome = published
            .await
            .unwrap_or_else(|_| vec![Code::StoreFailed; indexes.len()]);
        for (index, code) in indexes.into_iter().zip(outcome) {
            if let Some(slot) = codes.get_mut(index) {
                *slot = code;
            }
        }
        codes
    }

    fn accept(
        &self,
        namespace: NamespaceId,
        items: Vec<CommitItem>,
        codes: &mut [Code],
    ) -> Vec<Accepted> {
        let now = self.now();
        let mut accepted = Vec::with_capacity(items.len());
        let mut reservations = self.reservations.lock();
        for ((index, item), code) in items.into_iter().enumerate().zip(codes) {
            if item.segments.is_empty() {
                *code = Code::InvalidArgument;
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
                Ok(pending) => {
                    let written: Vec<Replica> = pending
                        .replicas
                        .iter()
                        .filter(|r| item.segments.contains(&r.segment))
                        .copied()
                        .collect();
                    accepted.push(Accepted {
                        index,
                        item,
                        pending,
                        written,
                    });
                }
                Err(Code::GrantEnded) if self.holds_version(namespace, &item) => {}
                Err(refused) => *code = refused,
            }
        }
        accepted
    }

    /// Whether an earlier try of the same commit has succeeded.
    fn holds_version(&self, namespace: NamespaceId, item: &CommitItem) -> bool {
        let mut held = false;
        self.directory
            .visit(namespace, &[item.key.as_ref()], |_, block| {
                held = block.is_some_and(|block| block.version() == item.version);
            });
        held
    }

    /// Makes durable blocks visible. Runs on the journal's thread, in the order of the log.
    fn publish(&self, namespace: NamespaceId, accepted: Vec<Accepted>) -> Vec<Code> {
        let now = self.now();
        let ticks = self.directory.ticks(accepted.len());
        let blocks = accepted.iter().enumerate().map(|(at, a)| NewBlock {
            namespace,
            key: a.item.key.clone(),
            version: a.item.version,
            length: a.item.length,
            checksum: a.item.checksum,
            replicas: a.written.clone(),
            parent: a.item.parent.clone(),
            soft_pin_until: a.pending.soft_pin.map(|ttl| now.after(ttl)),
            hard_pin: a.pending.hard_pin,
            tick: ticks.of(at),
        });
        let published = self.directory.publish(blocks.collect());
        let mut freed = Vec::new();
        let mut codes = Vec::with_capacity(accepted.len());
        for (published, accepted) in published.into_iter().zip(&accepted) {
            if let Some(id) = published.id {
                self.placement.set_owner(&accepted.written, id);
            }
            if let Some(replaced) = &published.replaced {
                freed.extend(self.freed(replaced));
            }
            freed.extend(self.unwritten(accepted));
            codes.push(self.settle_lost_nodes(namespace, accepted));
        }
        {
            let mut reservations = self.reservations.lock();
            for a in &accepted {
                reservations.take(namespace, a.item.key.as_ref(), a.item.version, true);
            }
        }
        self.metrics
            .committed(accepted.iter().map(|a| a.item.length));
        self.free(freed);
        self.changed.notify_waiters();
        codes
    }

    /// Ends puts whose records were certainly not logged.
    fn give_up(&self, namespace: NamespaceId, accepted: &[Accepted]) {
        let ended = {
            let mut reservations = self.reservations.lock();
            accepted
                .iter()
                .filter_map(|a| {
                    reservations.take(namespace, a.item.key.as_ref(), a.item.version, true)
                })
                .collect()
        };
        self.end_reservations(ended);
    }

    fn unwritten(&self, accepted: &Accepted) -> Vec<crate::placement::quarantine::Freed> {
        let unwritten: Vec<Replica> = accepted
            .pending
            .replicas
            .iter()
            .filter(|r| !accepted.written.iter().any(|w| w.segment == r.segment))
            .copied()
            .collect();
        let Accepted { item, .. } = accepted;
        self.freed_replicas(
            &unwritten,
            item.version,
            item.length,
            crate::clock::Millis(0),
        )
    }

    /// A node may have been dropped while its block became durable: the drop took what the directory
    /// held then, this takes what came after.
    fn settle_lost_nodes(&self, namespace: NamespaceId, accepted: &Accepted) -> Code {
        let lost: Vec<SegmentId> = {
            let segments = self.placement.segments();
            let gone = |r: &&Replica| segments.get(r.segment).is_none();
            accepted
                .written
                .iter()
                .filter(gone)
                .map(|r| r.segment)
                .collect()
        };
        let mut outcome = Code::Ok;
        for segment in lost {
            let item = &accepted.item;
            let dropped =
                self.directory
                    .drop_replica(namespace, item.key.as_ref(), item.version, segment);
            if let Some(Removed { .. }) = dropped.and_then(|dropped| dropped.removed) {
                outcome = Code::GrantEnded;
            }
        }
        outcome
    }
}

fn record_of(namespace: NamespaceId, accepted: &Accepted) -> Record {
    let Accepted {
        item,
        pending,
        written,
        ..
    } = accepted;
    Record::Commit(record::Commit {
        namespace,
        key: item.key.clone(),
        version: item.version,
        length: item.length,
        checksum: item.checksum,
        replicas: written.iter().map(|r| (r.segment, r.offset)).collect(),
        parent: item.parent.clone(),
        hard_pin: pending.hard_pin,
    })
}
