//! Removal by explicit request, and replicas with a wrong checksum.

use super::{FreedReplicas, Pool, snapshot};
use crate::clock::BootInstant;
use crate::directory::{BlockId, BlockRef, Removed, Replica, Verdict};
use crate::placement::quarantine::{Freed, Suspected};
use crate::store::journal::Ack;
use crate::store::record::{self, Places, Record};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Code, Key, KeyRef, SegmentId, Version};
use regex::Regex;
use std::sync::Arc;
use tokio::sync::oneshot;

/// The most blocks that one step of a full scan examines.
pub(super) const STEP: usize = 1024;

/// The blocks to remove.
#[derive(Clone, Debug)]
pub enum Removal {
    /// The keys of a namespace that match a pattern.
    Pattern(NamespaceId, Regex),
    /// A whole namespace.
    Namespace(NamespaceId),
    /// Every block of every namespace.
    Everything,
}

/// The result of a removal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoveReport {
    /// The number of removed blocks.
    pub removed: u64,
    /// The number of blocks that leases or pins protected.
    pub kept: u64,
    /// For a removal by key: one outcome for each key.
    pub codes: Vec<Code>,
}

/// A block to remove, as it was when the call decided to remove it.
struct Leaving {
    /// The key's index in the call.
    index: usize,
    /// The block's slot in memory; `None` for a block that lies on a medium only.
    id: Option<BlockId>,
    namespace: NamespaceId,
    key: Key,
    version: Version,
    /// Whether the pool has media.
    everywhere: bool,
}

impl Leaving {
    fn record(&self) -> Record {
        Record::Remove(record::Remove {
            namespace: self.namespace,
            key: self.key.clone(),
            version: self.version,
            // A reader may take a lease until the block leaves. See [`Pool::log_unleased`].
            unleased: false,
            everywhere: self.everywhere,
            places: Places::new(),
        })
    }
}

impl Pool {
    /// Removes blocks by key; leased and pinned blocks only with `force`.
    ///
    /// A reader must never see a removed block return after a crash. So a block stays visible until
    /// its removal is durable.
    ///
    /// # Errors
    ///
    /// The code with which the log refused a removal; [`Code::StoreFailed`] when the term lapses
    /// meanwhile. Some of the blocks may be removed.
    pub async fn remove(
        self: &Arc<Self>,
        namespace: NamespaceId,
        keys: &[KeyRef<'_>],
        force: bool,
    ) -> Result<RemoveReport, Code> {
        let mut codes = vec![Code::Ok; keys.len()];
        let mut left: Vec<usize> = (0..keys.len()).collect();
        // A block may be replaced or removed before its removal is durable. The loop then examines
        // the key again, so each answer was true at some time during the call.
        while !left.is_empty() {
            let leaving = self.leaving(namespace, keys, &left, force, &mut codes);
            let taken = self.submit_leaving(&leaving);
            let taken = tokio::select! {
                biased;
                taken = taken => taken?,
                () = self.lapsed() => return Err(Code::StoreFailed),
            };
            let again = leaving.iter().zip(taken).filter(|(_, taken)| !taken);
            left = again.map(|(block, _)| block.index).collect();
            if left.is_empty() {
                left = self.copied_meanwhile(namespace, keys, &codes).await?;
                for index in &left {
                    if let Some(code) = codes.get_mut(*index) {
                        *code = Code::Ok;
                    }
                }
            }
        }
        let count = |wanted: Code| codes.iter().filter(|code| **code == wanted).count() as u64;
        Ok(RemoveReport {
            removed: count(Code::Ok),
            kept: count(Code::Leased),
            codes,
        })
    }

    /// Removes many blocks in bounded steps. Each step is durable before the next one begins, and
    /// yields to other tasks. No block that had left earlier returns afterwards.
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::remove`]. Earlier steps stay removed.
    pub async fn remove_all(
        self: &Arc<Self>,
        what: &Removal,
        force: bool,
    ) -> Result<RemoveReport, Code> {
        let mut report = RemoveReport::default();
        let mut page = Vec::new();
        let mut in_memory = true;
        loop {
            let mut found: Vec<(NamespaceId, Key)> = Vec::new();
            let directory = match in_memory {
                true => &self.directory,
                false => self.tier.directory(),
            };
            let next = directory.scan(&page, STEP, |block| {
                let wanted = match what {
                    Removal::Everything => true,
                    Removal::Namespace(namespace) => block.namespace() == *namespace,
                    Removal::Pattern(namespace, pattern) => {
                        block.namespace() == *namespace
                            && pattern.is_match(&block.key().to_string())
                    }
                };
                if wanted {
                    found.push((block.namespace(), block.key()));
                }
            });
            page = next.map_err(|_| Code::Internal)?.unwrap_or_default();
            found.sort_by_key(|(namespace, _)| *namespace);
            for group in found.chunk_by(|a, b| a.0 == b.0) {
                let Some((namespace, _)) = group.first() else {
                    continue;
                };
                let keys: Vec<KeyRef<'_>> = group.iter().map(|(_, key)| key.as_ref()).collect();
                let step = self.remove(*namespace, &keys, force).await?;
                report.removed += step.removed;
                report.kept += step.kept;
            }
            if page.is_empty() {
                let goes_on = in_memory && self.has_media();
                self.pass_ended(goes_on).await?;
                if goes_on {
                    in_memory = false;
                    continue;
                }
                return Ok(report);
            }
            tokio::task::yield_now().await;
        }
    }

    /// Waits until no block returns that left before a pass of [`Pool::remove_all`] reached it. `goes_on`: the copies
    /// on media follow.
    async fn pass_ended(self: &Arc<Self>, goes_on: bool) -> Result<(), Code> {
        self.earlier_losses_are_submitted().await?;
        if goes_on {
            // A block that was evicted before this pass reached it is on a medium by now, or will never be.
            self.end_stores_of_evicted(None);
        }
        self.late_replicas_are_logged().await
    }

    /// The blocks to remove, for the indexes in `left`. The other keys get their codes.
    fn leaving(
        &self,
        namespace: NamespaceId,
        keys: &[KeyRef<'_>],
        wanted: &[usize],
        force: bool,
        codes: &mut [Code],
    ) -> Vec<Leaving> {
        let now = self.now();
        let asked: Vec<KeyRef<'_>> = wanted
            .iter()
            .filter_map(|at| keys.get(*at))
            .copied()
            .collect();
        let mut leaving = Vec::new();
        let mut missing = Vec::new();
        self.directory.visit(namespace, &asked[..], |at, block| {
            let Some(&index) = wanted.get(at) else { return };
            let Some(block) = block else {
                missing.push(index);
                return;
            };
            let block = block.view();
            let held = block.is_leased(now, self.lease_floor_of(block.version()));
            let pinned = block.is_hard_pinned() || block.soft_pin_until().is_some_and(|t| t > now);
            if force || !(held || pinned) {
                leaving.push(Leaving {
                    index,
                    id: Some(block.id()),
                    namespace,
                    key: block.key(),
                    version: block.version(),
                    everywhere: self.has_media(),
                });
            } else if let Some(code) = codes.get_mut(index) {
                *code = Code::Leased;
            }
        });
        if self.has_media() {
            missing.retain(|index| {
                let found = keys
                    .get(*index)
                    .and_then(|key| self.leaving_medium(namespace, *index, *key, force));
                match found {
                    None => true,
                    Some(Ok(block)) => {
                        leaving.push(block);
                        false
                    }
                    Some(Err(held)) => {
                        if let Some(code) = codes.get_mut(*index) {
                            *code = held;
                        }
                        false
                    }
                }
            });
        }
        let reservations = self.reservations.lock();
        for index in missing {
            if let (Some(key), Some(code)) = (keys.get(index), codes.get_mut(index)) {
                *code = if reservations.is_pending(namespace, *key) {
                    Code::InProgress
                } else {
                    Code::Missing
                };
            }
        }
        leaving
    }

    /// The removal of a block that is only on a medium; `None` without such a block.
    fn leaving_medium(
        &self,
        namespace: NamespaceId,
        index: usize,
        key: KeyRef<'_>,
        force: bool,
    ) -> Option<Result<Leaving, Code>> {
        let now = self.now();
        let mut found = None;
        self.tier.directory().visit(namespace, &[key], |_, block| {
            found = block.map(|block| {
                let held = block.is_leased(now, self.lease_floor_of(block.version()))
                    || block.view().is_hard_pinned();
                if !force && held {
                    return Err(Code::Leased);
                }
                Ok(Leaving {
                    index,
                    id: None,
                    namespace,
                    key: block.view().key(),
                    version: block.version(),
                    everywhere: true,
                })
            });
        });
        found
    }

    /// Logs the removal of blocks. After the durable append the blocks leave and their extents are
    /// freed, even if the caller no longer waits. The future returns for each block whether it was
    /// still present.
    fn submit_leaving(
        self: &Arc<Self>,
        leaving: &[Leaving],
    ) -> impl Future<Output = Result<Vec<bool>, Code>> + use<> {
        let (done, durable) = oneshot::channel();
        if leaving.is_empty() {
            // The send cannot fail, because the receiver is in this function.
            let _told = done.send(Ok(Vec::new()));
        } else {
            let records = leaving.iter().map(Leaving::record).collect();
            let place = |block: &Leaving| (block.namespace, block.key.clone());
            let keys: Vec<_> = match self.has_media() {
                true => leaving.iter().map(place).collect(),
                false => Vec::new(),
            };
            let blocks: Vec<_> = leaving.iter().map(|b| (b.id, b.version)).collect();
            let (pool, ended) = (Arc::clone(self), keys.clone());
            self.removing(keys.into_iter(), || {
                self.journal()
                    .submit_now(records, Ack::Durable, move |durable| {
                        let taken = match durable {
                            Ok(_) => Ok(pool.take_out(&blocks, &ended)),
                            Err(error) => Err(error.code()),
                        };
                        pool.removal_ended(ended.into_iter());
                        let _caller_left = done.send(taken);
                    });
            });
        }
        async move { durable.await.unwrap_or(Err(Code::StoreFailed)) }
    }

    /// Removes blocks from the directory after their removal is durable, and frees their extents.
    /// Returns false for a block that had already left.
    pub(super) fn take_out(
        self: &Arc<Self>,
        blocks: &[(Option<BlockId>, Version)],
        keys: &[(NamespaceId, Key)],
    ) -> Vec<bool> {
        let allow = |_: &BlockRef<'_>| Verdict::Remove;
        // A block that was only on a medium, or in lost memory, may be in another slot now. The
        // record of its load was submitted to the log before the removal's record.
        let come_back = |at: usize| {
            let (namespace, key) = keys.get(at)?;
            self.directory.find(*namespace, key.as_ref())
        };
        let removed: Vec<Option<Removed>> = blocks
            .iter()
            .enumerate()
            .map(|(at, (id, version))| {
                let take = |id: BlockId| self.directory.remove_by_id(id, *version, allow);
                id.and_then(take).or_else(|| take(come_back(at)?))
            })
            .collect();
        let left = removed.iter().flatten().map(|removed| self.left(removed));
        let freed = self.freed(left);
        self.log_unleased(&freed);
        self.free(freed);
        let mut taken: Vec<bool> = removed.iter().map(Option::is_some).collect();
        let copies = keys.iter().zip(blocks).zip(&mut taken);
        for (((namespace, key), (_, version)), taken) in copies {
            let is_it = |other| other == *version;
            *taken |= self.tier.remove(*namespace, key.as_ref(), is_it).is_some();
        }
        self.metrics
            .removed(taken.iter().filter(|taken| **taken).count());
        taken
    }

    /// Logs the freed extents without a lease before they are granted again. They were never
    /// leased, or their leases have ended. So the next term can use them at once. No call waits for
    /// this record: without it the next term keeps the extents in quarantine for one lease TTL,
    /// which is safe.
    pub(in crate::pool) fn log_unleased(&self, freed: &[Freed]) {
        let now = self.now();
        let unleased = freed.iter().filter(|item| item.not_before <= now);
        let records = snapshot::unleased_ranges(unleased.map(|item| item.extent).collect());
        if !records.is_empty() {
            self.journal().submit_now(records, Ack::Memory, |_| {});
        }
    }

    /// Waits until the absence of missing blocks is certain. Returns the indexes of blocks that are
    /// present after all: their stores on media ended after their evictions.
    async fn copied_meanwhile(
        self: &Arc<Self>,
        namespace: NamespaceId,
        keys: &[KeyRef<'_>],
        codes: &[Code],
    ) -> Result<Vec<usize>, Code> {
        let missing = || {
            let all = keys.iter().zip(codes).enumerate();
            all.filter(|(_, (_, code))| **code == Code::Missing)
        };
        if missing().next().is_none() {
            return Ok(Vec::new());
        }
        self.earlier_losses_are_submitted().await?;
        if !self.has_media() {
            self.late_replicas_are_logged().await?;
            return Ok(Vec::new());
        }
        self.end_stores_of_evicted(Some((namespace, &mut missing().map(|(_, (key, _))| *key))));
        self.late_replicas_are_logged().await?;
        let has_copy = |key: &KeyRef<'_>| self.has_copy(namespace, *key);
        let copied = missing().filter(|(_, (key, _))| has_copy(key));
        Ok(copied.map(|(index, _)| index).collect())
    }

    /// Waits until the records of earlier losses are submitted to the log. A missing block may have
    /// just been evicted, and a crash before the durable append would bring it back. So a remove
    /// reports a missing key only once the log is flushed too.
    async fn earlier_losses_are_submitted(self: &Arc<Self>) -> Result<(), Code> {
        // Eviction may hold the lock for a while, so a blocking thread waits for it, not a thread
        // of the runtime.
        if self.evicting.try_write().is_none() {
            let pool = Arc::clone(self);
            let waited = kvpool_seams::blocking(move || drop(pool.evicting.write()));
            waited.await.map_err(|_| Code::Internal)?;
        }
        Ok(())
    }

    /// Waits until the log holds all records about the missing blocks. The first flush may run
    /// callbacks that find a replica too late and log that. The second flush covers their records.
    async fn late_replicas_are_logged(&self) -> Result<(), Code> {
        self.flush_log().await?;
        self.flush_log().await
    }

    pub(super) async fn flush_log(&self) -> Result<(), Code> {
        tokio::select! {
            biased;
            flushed = self.journal().flush() => flushed.map(|_| ()).map_err(|error| error.code()),
            () = self.lapsed() => Err(Code::StoreFailed),
        }
    }

    /// Logs that blocks have left the directory, and frees their extents when that is durable.
    pub(super) fn submit_left(self: &Arc<Self>, left: &[Removed]) {
        let now = self.now();
        let records = left
            .iter()
            .map(|block| self.removal_record(block, now))
            .collect();
        let freed = self.freed(left.iter().map(|block| self.left(block)));
        self.free_once_logged(records, freed);
    }

    /// The record of a block's removal. It says whether the block had a lease. After a load, an
    /// extent without a lease is free at once, so the reserve serves the puts of a new term.
    fn removal_record(&self, block: &Removed, now: BootInstant) -> Record {
        Record::Remove(record::Remove {
            namespace: block.namespace,
            key: block.key.clone(),
            version: block.version,
            unleased: self.left(block).not_before <= now,
            everywhere: false,
            places: self.places_of(block),
        })
    }

    /// The extents that a block left, for its record. Empty in a pool without media, where no block
    /// is ever loaded from a medium.
    fn places_of(&self, block: &Removed) -> Places {
        if !self.has_media() {
            return Places::new();
        }
        let replicas = block.replicas.iter();
        replicas
            .map(|replica| (replica.segment, replica.offset))
            .collect()
    }

    /// Processes clients' reports about replicas. A wrong checksum hides the replica until its node
    /// has re-verified it. A replica that its node recently found intact stays visible. An
    /// unreachable node is judged by its heartbeats alone.
    pub fn report(
        &self,
        namespace: NamespaceId,
        reports: &[(KeyRef<'_>, Version, SegmentId, Code)],
    ) -> Vec<Code> {
        reports
            .iter()
            .map(|(key, version, segment, code)| {
                self.metrics.reported(*code);
                if *code != Code::ChecksumMismatch {
                    return Code::Ok;
                }
                let mut found = None;
                self.directory.visit(namespace, &[*key], |_, block| {
                    let Some(block) = block.filter(|block| block.version() == *version) else {
                        return;
                    };
                    let replica = block
                        .replicas()
                        .iter()
                        .find(|r| r.segment == *segment)
                        .copied();
                    found = replica.map(|r| (r, block.length(), block.checksum()));
                });
                let Some((replica, length, checksum)) = found else {
                    return Code::Missing;
                };
                self.check_again(namespace, key.to_key(), *version, replica, length, checksum);
                Code::Ok
            })
            .collect()
    }

    fn check_again(
        &self,
        namespace: NamespaceId,
        key: Key,
        version: Version,
        replica: Replica,
        length: kvpool_types::Length,
        checksum: kvpool_types::Checksum,
    ) {
        let Replica {
            segment, offset, ..
        } = replica;
        let hidden = (segment, offset, version);
        let is_right = (self.proven.lock()).has((segment, offset), version, self.now());
        if is_right || !self.hidden.write().insert(hidden) {
            return;
        }
        let node = self
            .placement
            .segments()
            .get(segment)
            .map(|s| Arc::clone(&s.node));
        let Some(node) = node else {
            self.hidden.write().remove(&hidden);
            return;
        };
        let node_name = &node.name;
        tracing::warn!(
            key = %key.shown(), %version, node = %node_name,
            "client reported a checksum mismatch, replica hidden"
        );
        let extent = kvpool_types::Extent {
            segment,
            offset,
            length,
        };
        let suspected = Suspected {
            namespace,
            key,
            version,
            extent,
            checksum,
        };
        if !self.quarantine.verify(&node, suspected) {
            // The node was dropped meanwhile. Lookups no longer return its replicas, so this one
            // need not be hidden.
            self.hidden.write().remove(&hidden);
        }
    }

    /// Processes a node's re-verification of a replica.
    pub fn verified(self: &Arc<Self>, suspected: Suspected, matches: bool) {
        let Suspected {
            namespace,
            key,
            version,
            extent,
            ..
        } = suspected;
        let place = (extent.segment, extent.offset);
        let hidden = (extent.segment, extent.offset, version);
        if matches {
            tracing::info!(key = %key.shown(), %version, "replica re-verified, its checksum matches");
            self.proven.lock().note(place, version, self.now());
            self.hidden.write().remove(&hidden);
            return;
        }
        let _until_submitted = self.evicting.read();
        // Another replica may keep the block. A reader of this replica must not renew its lease on
        // it.
        let moved = &self.quarantine.moved;
        let leaving = moved.leaves(version, self.latest_token());
        // The location may hold another block by now, and this block may have another replica on
        // the segment.
        let dropped = self
            .directory
            .drop_places(namespace, key.as_ref(), version, &[place])
            .pop();
        match &dropped {
            Some(dropped) => moved.left(leaving, dropped.lease_until),
            None => moved.stays(leaving),
        }
        // The replica leaves the directory before it leaves the hidden replicas, so no reader is
        // sent to it in between.
        self.hidden.write().remove(&hidden);
        let Some(dropped) = dropped else {
            tracing::info!(key = %key.shown(), %version, "reported replica left before its re-verification");
            return;
        };
        self.metrics.corrupt_replica();
        tracing::error!(key = %key.shown(), %version, %extent, "checksum mismatch on re-verification, replica dropped");
        match dropped.removed {
            Some(block) => {
                self.note_leased(version, block.lease_until);
                self.submit_left(&[block]);
            }
            None => {
                // The block may now be on a draining node only.
                self.doubt_drained();
                let not_before = dropped.lease_until.max(self.lease_floor_of(version));
                let freed = self.freed(std::iter::once(FreedReplicas {
                    replicas: &[dropped.replica],
                    version,
                    length: extent.length,
                    not_before,
                }));
                let record = Record::ReplicaGone(record::ReplicaGone {
                    namespace,
                    key,
                    version,
                    segment: extent.segment,
                    offset: Some(dropped.replica.offset),
                });
                self.free_once_logged(vec![record], freed);
            }
        }
    }
}
