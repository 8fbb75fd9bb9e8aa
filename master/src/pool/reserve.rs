//! Reservations: grants for puts, and the wait for room.

use super::put_queue::{Demand, QueuedPut};
use super::quotas::{QUOTA_PASS, QuotaWait, broken_quota, never_fits};
use super::read::View;
use super::{FreedReplicas, Pool};
use crate::clock::BootInstant;
use crate::directory::{Copies, Goal, Replica};
use crate::placement::{Extents, NoRoom, PlacementHints};
use crate::reservations::{End, Pending};
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::KeyBatch;
use kvpool_types::{ClientId, Code, Length, Version};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Options of a put.
#[derive(Clone, Debug, Default)]
pub struct ReserveOptions {
    /// Where to place the replicas.
    pub hints: PlacementHints,
    /// True if a key that is present gets a new version.
    pub upsert: bool,
    /// The longest wait for room, or for another writer of a key.
    pub timeout: Duration,
    /// The requested lifetime of the grants: the longest time that the write may take.
    pub grant_ttl: Duration,
    /// The length of the soft pin.
    pub soft_pin: Option<Duration>,
    /// True if the blocks are hard-pinned, which means never evicted.
    pub hard_pin: bool,
    /// The id of the request; 0 for none.
    pub request: u64,
    /// The sorted ids of earlier requests of the caller. Their grants for these keys end, since
    /// their reply was lost or their write failed.
    pub instead_of: Vec<u64>,
    /// The client that writes. When its last framed connection ends, the put ends. `None`: only the
    /// grants' lifetime ends the put.
    pub writer: Option<ClientId>,
}

/// The permission to write one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Granted {
    /// The id of the grants.
    pub version: Version,
    /// The extents to write.
    pub replicas: Copies,
}

/// The most other writers that a put watches at once. The put continues when the first of them
/// ends.
const WATCHED: usize = 32;
/// The polling interval of a put that waits for nodes.
const NODES_POLL: Duration = Duration::from_millis(100);

type Outcome = Option<Result<Granted, Code>>;

/// The keys that a pass over a batch left open.
#[derive(Debug, Default)]
struct Open {
    granted: bool,
    demand: u64,
    /// The number of blocks in the demand.
    blocks: u64,
    largest: u64,
    copies: usize,
    no_nodes: bool,
    /// The blocks and bytes that a hard quota of the namespace holds back.
    over_quota: Goal,
    /// The smallest `need` of the held-back blocks, by its bytes. See [`Open::note_over_quota`].
    least_over_quota: Option<Goal>,
    /// The ends of other puts of the keys, at most [`WATCHED`].
    writers: Vec<Arc<End>>,
}

impl Open {
    fn is_done(&self) -> bool {
        self.demand == 0
            && !self.no_nodes
            && self.over_quota == Goal::default()
            && self.writers.is_empty()
    }

    /// Records a block that a hard quota holds back. `need` is the size of this block and of the batch's earlier blocks
    /// that wait for room.
    fn note_over_quota(&mut self, bytes: u64, need: Goal) {
        self.over_quota.bytes += bytes;
        self.over_quota.blocks += 1;
        let least = self.least_over_quota.get_or_insert(need);
        if need.bytes < least.bytes {
            *least = need;
        }
    }

    /// Records a block that waits for room for its copies, each of `rounded` bytes.
    fn note_demand(&mut self, rounded: u64, copies: usize) {
        self.demand += rounded * copies as u64;
        self.blocks += 1;
        // The largest block is the hardest to place, so the put waits for as many nodes as that
        // block needs.
        if rounded >= self.largest {
            (self.largest, self.copies) = (rounded, copies);
        }
    }
}

impl Pool {
    /// The lifetime of a grant: the requested one, within the pool's bounds.
    pub fn grant_ttl(&self, asked: Duration) -> Duration {
        let most = self.config.max_grant_ttl;
        if asked.is_zero() {
            most
        } else {
            asked.min(most)
        }
    }

    /// Grants room for blocks. The call waits for room, or for another writer of a key, only while
    /// it has no grant. A put with grants never waits for another put's grants, so no two puts wait
    /// for each other. Keys still open at the end get their retryable code.
    pub async fn reserve<'k>(
        self: &Arc<Self>,
        namespace: NamespaceId,
        keys: impl Into<KeyBatch<'k>>,
        lengths: &[Length],
        options: &ReserveOptions,
    ) -> Vec<Result<Granted, Code>> {
        let keys = keys.into();
        let mut outcomes: Vec<Outcome> = lengths.iter().map(|l| self.judge_length(*l)).collect();
        let deadline = tokio::time::Instant::now() + options.timeout.min(self.config.max_wait);
        let until = self.now().after(options.timeout.min(self.config.max_wait));
        let mut queued: Option<QueuedPut<'_>> = None;
        let mut called = false;
        let mut waits_for_quota: Option<QuotaWait<'_>> = None;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let may_take = called || (queued.is_none() && self.put_queue.is_empty());
            let open =
                self.reserve_open(namespace, &keys, lengths, options, may_take, &mut outcomes);
            if open.is_done() || open.granted || self.is_stopping() {
                break;
            }
            let demand = Demand {
                bytes: open.demand,
                largest: open.largest,
                copies: open.copies,
                until,
            };
            match &queued {
                _ if open.demand == 0 => queued = None,
                Some(queued) => queued.set_demand(demand, called),
                None => queued = Some(self.enqueue_put(demand)),
            }
            self.wait_for_quota(namespace, open.over_quota, &mut waits_for_quota);
            // A node may return without an event, so this wait also polls.
            let pause = match (&waits_for_quota, open.no_nodes) {
                (_, true) => Some(NODES_POLL),
                (Some(_), false) => Some(QUOTA_PASS),
                (None, false) => None,
            };
            let until_poll = pause.map_or(deadline, |pause| {
                deadline.min(tokio::time::Instant::now() + pause)
            });
            // The order of the branches matters: a put takes room or a key that becomes free at its
            // deadline.
            called = tokio::select! {
                biased;
                () = turn(queued.as_ref()) => true,
                () = any_end(&open.writers) => false,
                () = self.quota_takes(namespace, open.least_over_quota) => false,
                () = tokio::time::sleep_until(until_poll) => {
                    if tokio::time::Instant::now() >= deadline {
                        break;
                    }
                    false
                }
                () = changed => false,
            };
        }
        drop(queued);
        outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or(Err(Code::Full)))
            .collect()
    }

    fn judge_length(&self, length: Length) -> Outcome {
        if length.0 == 0 {
            Some(Err(Code::InvalidArgument))
        } else if length.0 > self.config.max_block_size.as_u64() {
            Some(Err(Code::TooLarge))
        } else {
            None
        }
    }

    /// Makes one pass over the open keys and decides as many as possible. Takes room only if
    /// `may_take`.
    fn reserve_open(
        &self,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        lengths: &[Length],
        options: &ReserveOptions,
        may_take: bool,
        outcomes: &mut [Outcome],
    ) -> Open {
        self.metrics.put_passes();
        let mut open = Open::default();
        // Taken once for the whole pass. A second read lock would wait behind a waiting writer, and
        // the writer waits for the first lock.
        let view = self.view();
        let mut room = view.segments.allocator(&options.hints, namespace);
        let mut reservations = self.reservations.lock();
        // A drain searches for the puts on its node under the reservations' lock, so the check is
        // made under it too.
        room.leave_out_nodes_that_drain();
        let account = self.directory.accounts().of(namespace);
        if account.is_closed() {
            outcomes.fill_with(|| Some(Err(Code::UnknownNamespace)));
            return open;
        }
        let present = match options.upsert {
            true => None,
            false => Some(&view),
        };
        let had_blocks = self.settle_present(present, namespace, keys, outcomes);
        let tenant = self.directory.accounts().tenant(namespace);
        let expires = self.now().after(self.grant_ttl(options.grant_ttl));
        let mut lost = Vec::new();
        let wishes = keys.iter().zip(lengths).zip(outcomes.iter_mut());
        for (index, ((key, length), outcome)) in wishes.enumerate() {
            if outcome.as_ref().is_some_and(|settled| !is_open(settled)) {
                continue;
            }
            lost.extend(reservations.take_back(namespace, key, &options.instead_of));
            if let Some(end) = reservations.end_of(namespace, key) {
                if open.writers.len() < WATCHED {
                    open.writers.push(end);
                }
                *outcome = Some(Err(Code::InProgress));
                continue;
            }
            let _until_taken = tenant.map(|tenant| tenant.taking.lock());
            if let Some(tenant) = tenant {
                let bytes = Extents::rounded(*length).0 * room.copies(*length) as u64;
                // The batch's earlier blocks that wait for room take their part of the quota first.
                let need = Goal {
                    bytes: open.demand + bytes,
                    blocks: open.blocks + 1,
                };
                if let Some(code) = broken_quota(account, tenant, need) {
                    let is_final = never_fits(tenant, Goal { bytes, blocks: 1 });
                    if !is_final {
                        open.note_over_quota(bytes, need);
                    }
                    *outcome = Some(Err(if is_final { Code::OverQuota } else { code }));
                    continue;
                }
            }
            let found = if may_take {
                room.allocate(*length)
            } else {
                room.judge(*length).and(Err(NoRoom::Full))
            };
            *outcome = Some(match found {
                Ok(replicas) if !self.has_versions() => {
                    view.segments.release(&replicas);
                    open.no_nodes = true;
                    Err(Code::StoreFailed)
                }
                Ok(replicas) => {
                    let version = Version(self.next_version.fetch_add(1, Ordering::Relaxed));
                    let mut pending = Pending::granted(version, *length, replicas.clone());
                    pending.expires = expires;
                    pending.soft_pin = options.soft_pin;
                    pending.hard_pin = options.hard_pin;
                    pending.had_block = had_blocks.contains(&index);
                    pending.request = options.request;
                    pending.writer = options.writer;
                    reservations.insert(namespace, key, pending);
                    open.granted = true;
                    Ok(Granted { version, replicas })
                }
                Err(NoRoom::TooLarge) => Err(Code::TooLarge),
                Err(NoRoom::NoNodes) => {
                    open.no_nodes = true;
                    Err(Code::NoNodes)
                }
                Err(NoRoom::Full) => {
                    open.note_demand(Extents::rounded(*length).0, room.copies(*length));
                    Err(Code::Full)
                }
            });
        }
        drop(reservations);
        drop(room);
        // Eviction starts before puts need the room.
        let is_low = open.granted && self.is_low(&view.segments.usage());
        drop(view);
        if is_low {
            self.evictor_wake.wake();
        }
        self.end_reservations(lost);
        open
    }

    /// True when the next version is reserved durably.
    pub(super) fn has_versions(&self) -> bool {
        self.next_version.load(Ordering::Acquire) < self.versions_until.load(Ordering::Acquire)
    }

    /// Decides the keys that are present on a reachable node. Without `view`, it decides no key.
    /// Returns the indexes of the open keys that have a block all the same.
    fn settle_present(
        &self,
        view: Option<&View<'_>>,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        outcomes: &mut [Outcome],
    ) -> BTreeSet<usize> {
        let mut had_blocks = BTreeSet::new();
        let ticks = self.directory.ticks(keys.len());
        self.directory.visit(namespace, keys, |index, block| {
            let (Some(mut block), Some(outcome)) = (block, outcomes.get_mut(index)) else {
                return;
            };
            if outcome.as_ref().is_some_and(|outcome| !is_open(outcome)) {
                return;
            }
            if view.is_some_and(|view| view.is_present(&block.view())) {
                block.touch(ticks.of(index));
                *outcome = Some(Err(Code::Exists));
            } else {
                had_blocks.insert(index);
            }
        });
        self.settle_on_media(view.is_some(), namespace, keys, outcomes, &mut had_blocks);
        had_blocks
    }

    /// Decides the keys that have a readable copy on a medium, if `decides` is true. Adds the
    /// indexes of the other open keys with a copy to `had_blocks`.
    fn settle_on_media(
        &self,
        decides: bool,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        outcomes: &mut [Outcome],
        had_blocks: &mut BTreeSet<usize>,
    ) {
        if !self.has_media() {
            return;
        }
        let readable = self.tiering.readable();
        let copies = self.tier.directory();
        let ticks = copies.ticks(keys.len());
        copies.visit(namespace, keys, |index, block| {
            let (Some(mut block), Some(outcome)) = (block, outcomes.get_mut(index)) else {
                return;
            };
            if outcome.as_ref().is_some_and(|outcome| !is_open(outcome)) {
                return;
            }
            let (replicas, length) = (block.replicas(), block.length());
            let is_readable = |r: &Replica| readable.has(r.segment, length);
            if decides && replicas.iter().any(is_readable) {
                block.touch(ticks.of(index));
                *outcome = Some(Err(Code::Exists));
            } else {
                had_blocks.insert(index);
            }
        });
    }

    /// Returns unused grants.
    pub fn revoke<'k>(
        &self,
        namespace: NamespaceId,
        keys: impl Into<KeyBatch<'k>>,
        versions: &[Version],
    ) -> Vec<Code> {
        let keys = keys.into();
        let mut ended = Vec::new();
        let codes = {
            let mut reservations = self.reservations.lock();
            keys.iter()
                .zip(versions)
                .map(
                    |(key, version)| match reservations.revoke(namespace, key, *version) {
                        Some(pending) => {
                            ended.push(pending);
                            Code::Ok
                        }
                        None => Code::GrantEnded,
                    },
                )
                .collect()
        };
        self.end_reservations(ended);
        codes
    }

    /// Sends the extents of ended puts into the quarantine.
    pub(super) fn end_reservations(&self, ended: Vec<Pending>) {
        if ended.is_empty() {
            return;
        }
        let freed = self.freed(ended.iter().map(|pending| FreedReplicas {
            replicas: &pending.replicas,
            version: pending.version,
            length: pending.length,
            not_before: BootInstant(0),
        }));
        self.free(freed);
    }
}

/// Waits until a queued put is woken. Without a queued put, waits forever.
async fn turn(queued: Option<&QueuedPut<'_>>) {
    match queued {
        Some(queued) => queued.woken().await,
        None => std::future::pending().await,
    }
}

/// Waits until one of these puts has ended. Without puts, waits forever.
async fn any_end(writers: &[Arc<End>]) {
    if writers.is_empty() {
        std::future::pending().await
    }
    let ends = writers.iter().map(|writer| Box::pin(writer.reached()));
    futures::future::select_all(ends).await;
}

/// True while an outcome may still change.
fn is_open(outcome: &Result<Granted, Code>) -> bool {
    // `StoreFailed` means that no version is reserved durably at the moment.
    matches!(
        outcome,
        Err(Code::Full
            | Code::NoNodes
            | Code::InProgress
            | Code::StoreFailed
            | Code::MemoryQuota
            | Code::BlocksQuota)
    )
}
