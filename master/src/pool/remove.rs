//! Removal at an operator's or a client's word, and replicas that were found wrong.

use super::Pool;
use crate::directory::{self, Removed, Replica, Verdict};
use crate::placement::quarantine::{Freed, Suspected};
use crate::store::record::{self, Record};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Code, Key, KeyRef, SegmentId, Version};
use regex::Regex;
use std::sync::Arc;
use tokio::sync::oneshot;

/// How many blocks one step of a removal by pattern looks at.
const STEP: usize = 1024;

/// What is to be removed.
#[derive(Clone, Debug)]
pub enum Removal {
    /// The keys of a namespace that match a pattern.
    Pattern(NamespaceId, Regex),
    /// A whole namespace.
    Namespace(NamespaceId),
    /// Every block of every namespace.
    Everything,
}

/// What a removal did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoveReport {
    /// Blocks removed.
    pub removed: u64,
    /// Blocks that leases or pins protected.
    pub kept: u64,
    /// For a removal by key, one outcome a key.
    pub codes: Vec<Code>,
}

impl Pool {
    /// Removes blocks by key. Leased and pinned ones only with `force`.
    pub async fn remove(
        self: &Arc<Self>,
        namespace: NamespaceId,
        keys: &[KeyRef<'_>],
        force: bool,
    ) -> Result<RemoveReport, Code> {
        let (report, durable) = {
            let _until_submitted = self.removing.read();
            let (removed, codes) = self.take_out(namespace, keys, force);
            let count = |wanted: Code| codes.iter().filter(|code| **code == wanted).count() as u64;
            let report = RemoveReport {
                removed: count(Code::Ok),
                kept: count(Code::Leased),
                codes,
            };
            (report, self.submit_removed(removed))
        };
        tokio::select! {
            biased;
            durable = durable => durable?,
            () = self.lapsed() => return Err(Code::StoreFailed),
        }
        if report.codes.contains(&Code::Missing) {
            self.earlier_removals_are_durable().await?;
        }
        Ok(report)
    }

    /// Removes many blocks in bounded steps. Each step is durable before the next begins.
    pub async fn remove_all(
        self: &Arc<Self>,
        what: &Removal,
        force: bool,
    ) -> Result<RemoveReport, Code> {
        let mut report = RemoveReport::default();
        let mut page = Vec::new();
        loop {
            let mut found: Vec<(NamespaceId, Key)> = Vec::new();
            let next = self.directory.scan(&page, STEP, |block| {
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
                return Ok(report);
            }
        }
    }

    fn take_out(
        &self,
        namespace: NamespaceId,
        keys: &[KeyRef<'_>],
        force: bool,
    ) -> (Vec<Removed>, Vec<Code>) {
        let now = self.now();
        let outcomes = self.directory.remove(namespace, keys, |block| {
            let held = block.is_leased(now, self.lease_floor_of(block.version()));
            let pinned = block.is_hard_pinned() || block.soft_pin_until().is_some_and(|t| t > now);
            if !force && (held || pinned) {
                Verdict::Keep
            } else {
                Verdict::Remove
            }
        });
        let reservations = self.reservations.lock();
        let mut removed = Vec::new();
        let codes = outcomes
            .into_iter()
            .zip(keys)
            .map(|(outcome, key)| match outcome {
                directory::Removal::Removed(block) => {
                    removed.push(block);
                    Code::Ok
                }
                directory::Removal::Kept => Code::Leased,
                directory::Removal::Missing => {
                    if reservations.is_pending(namespace, *key) {
                        Code::InProgress
                    } else {
                        Code::Missing
                    }
                }
            })
            .collect();
        (removed, codes)
    }

    /// What is missing may have been removed a moment ago, and would be back if the master died before
    /// that is durable: whoever is told that it is missing is told so after that.
    async fn earlier_removals_are_durable(&self) -> Result<(), Code> {
        // What has left the directory has been submitted once this is free.
        drop(self.removing.write());
        tokio::select! {
            biased;
            flushed = self.journal().flush() => flushed.map(|_| ()).map_err(|error| error.code()),
            () = self.lapsed() => Err(Code::StoreFailed),
        }
    }

    /// Submits a removal; the future ends when it is durable.
    fn submit_removed(
        self: &Arc<Self>,
        removed: Vec<Removed>,
    ) -> impl Future<Output = Result<(), Code>> + use<> {
        let (done, durable) = oneshot::channel();
        if removed.is_empty() {
            // Cannot fail: the other end is here.
            let _told = done.send(Ok(()));
        } else {
            self.metrics.removed(removed.len());
            self.submit_removal(removed, move |outcome| {
                let _caller_left = done.send(outcome);
            });
        }
        async move { durable.await.unwrap_or(Err(Code::StoreFailed)) }
    }

    /// Logs the removal of blocks that have left the directory; frees their extents once that is
    /// durable, then calls `then`.
    pub(super) fn submit_removal(
        self: &Arc<Self>,
        removed: Vec<Removed>,
        then: impl FnOnce(Result<(), Code>) + Send + 'static,
    ) {
        let records = removed.iter().map(removal_record).collect();
        let freed: Vec<Freed> = removed.iter().flat_map(|block| self.freed(block)).collect();
        let pool = Arc::clone(self);
        self.journal().submit_now(
            records,
            crate::store::journal::Ack::Durable,
            move |durable| match durable {
                Ok(_) => {
                    pool.free(freed);
                    then(Ok(()));
                }
                Err(_) => then(Err(Code::StoreFailed)),
            },
        );
    }

    /// Notes what clients found wrong with replicas: a wrong checksum hides the copy until its node
    /// has checked it again. A node that a client cannot reach is judged by its own heartbeats.
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
        if !self.hidden.write().insert((segment, offset)) {
            return;
        }
        let node = self
            .placement
            .segments()
            .get(segment)
            .map(|s| Arc::clone(&s.node));
        let Some(node) = node else { return };
        tracing::warn!(%key, %version, node = %node.name, "a client found wrong bytes");
        let extent = kvpool_types::Extent {
            segment,
            offset,
            length,
        };
        self.quarantine.verify(
            &node,
            Suspected {
                namespace,
                key,
                version,
                extent,
                checksum,
            },
        );
    }

    /// Takes a node's word on a copy that a client found wrong.
    pub fn verified(self: &Arc<Self>, suspected: Suspected, matches: bool) {
        let Suspected {
            namespace,
            key,
            version,
            extent,
            ..
        } = suspected;
        let place = (extent.segment, extent.offset);
        if matches {
            tracing::info!(%key, %version, "the copy is right: the fault was the client's");
            self.hidden.write().remove(&place);
            return;
        }
        self.metrics.corrupt_replica();
        tracing::error!(%key, %version, %extent, "a copy is corrupt and is dropped");
        let dropped = self
            .directory
            .drop_replica(namespace, key.as_ref(), version, extent.segment);
        // Out of the directory first, then out of hiding: in between nobody can be led to it.
        self.hidden.write().remove(&place);
        let Some(dropped) = dropped else { return };
        match dropped.removed {
            Some(block) => self.submit_removal(vec![block], |_| {}),
            None => {
                let not_before = dropped.lease_until.max(self.lease_floor_of(version));
                let freed =
                    self.freed_replicas(&[dropped.replica], version, extent.length, not_before);
                let pool = Arc::clone(self);
                let record = Record::ReplicaGone(record::ReplicaGone {
                    namespace,
                    key,
                    version,
                    segment: extent.segment,
                });
                let ack = crate::store::journal::Ack::Durable;
                self.journal()
                    .submit_now(vec![record], ack, move |durable| {
                        if durable.is_ok() {
                            pool.free(freed);
                        }
                    });
            }
        }
    }
}

fn removal_record(block: &Removed) -> Record {
    Record::Remove(record::Remove {
        namespace: block.namespace,
        key: block.key.clone(),
        version: block.version,
    })
}
