//! The state machine of one batch of gets. Its steps run concurrently.

use super::judge::{Judged, judge};
use super::renewal::Renewal;
use crate::api::{GetBlock, GetOutcome};
use crate::cache::{KnownNode, Leased, Located};
use crate::clock::{Backoff, BootTime, Deadline, Passed};
use crate::context::ClientContext;
use crate::control::Call;
use crate::counters::Counting;
use crate::distinct::Distinct;
use crate::errors::{ControlError, GetError};
use crate::latencies::Measured;
use crate::links::Links;
use crate::locate::{Found, is_later};
use crate::overlap;
use crate::releases::Holding;
use crate::replicas::{Next, Tried, part_of};
use crate::reports::{self, Report};
use crate::spans;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use kvpool_seams::maps::HashMap;
use kvpool_transport::memory::total_length;
use kvpool_transport::{ReadOp, Slice, TransferError, TransferResult, TransportKind};
use kvpool_types::{Code, Epoch, Incarnation, Key, Length, Offset, SegmentId};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tracing::Instrument;

/// How long a get whose outcomes are known waits until the master has released its leases. A master that is
/// gone must not hold back bytes that have arrived. The leases then expire by themselves.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(100);

/// One batch of gets, in which keys may occur more than once.
pub(super) struct GetBatch<'a> {
    inner: &'a ClientContext,
    deadline: Deadline,
    release: bool,
    items: Vec<Item>,
    reports: Vec<Report>,
    holding: Holding,
    /// Blocks that lie on SSDs and for which memory has no room. They are asked for again when the other
    /// blocks are read.
    later: Vec<usize>,
    work: FuturesUnordered<BoxFuture<'a, Step>>,
}

struct Item {
    key: Key,
    buffers: Vec<Slice>,
    located: Option<Arc<Located>>,
    /// Whether the location comes from the cache, so that no lease protects it.
    remembered: bool,
    tried: Tried,
    backoff: Backoff,
    /// Whether the last lookup found the block on an SSD without room for it in memory.
    is_later: bool,
    /// The error of the last attempt.
    last: Option<GetError>,
    outcome: Option<Result<GetOutcome, GetError>>,
}

/// The result of one concurrent step.
enum Step {
    /// No time was left to try these blocks again.
    Late(Vec<usize>),
    Located {
        items: Vec<usize>,
        asked: Vec<Key>,
        answer: Result<Vec<Found>, ControlError>,
        of_item: Vec<usize>,
    },
    Read(ReadDone),
}

/// The blocks that one step reads from one node.
struct NodeReads {
    node: Arc<KnownNode>,
    ways: Vec<TransportKind>,
    epoch: Epoch,
    reads: Vec<(usize, Arc<Located>, SegmentId)>,
    ops: Vec<ReadOp>,
    /// The number of attempts that share the remaining time.
    parts: u32,
}

impl NodeReads {
    /// The result of reads that were done at once over the first of `ways`.
    fn done(mut self, results: Vec<TransferResult>, ended: BootTime) -> ReadDone {
        self.ways.truncate(1);
        ReadDone {
            node: self.node,
            leases: self
                .reads
                .iter()
                .map(|(_, located, _)| located.lease)
                .collect(),
            reads: self.reads,
            ways: self.ways,
            results,
            ended,
            detached: false,
        }
    }
}

/// The result of one step that reads from one node.
struct ReadDone {
    node: Arc<KnownNode>,
    reads: Vec<(usize, Arc<Located>, SegmentId)>,
    /// The transports that the read used, or that could not be opened.
    ways: Vec<TransportKind>,
    results: Vec<TransferResult>,
    leases: Vec<Option<Leased>>,
    ended: BootTime,
    /// Whether the link did not keep its deadline. The link may then still write to the buffers.
    detached: bool,
}

impl<'a> GetBatch<'a> {
    pub(super) fn new(
        inner: &'a ClientContext,
        gets: Vec<GetBlock>,
        release: bool,
        deadline: Deadline,
    ) -> Self {
        let items = gets
            .into_iter()
            .map(|get| Item {
                outcome: overlap::check(&get.buffers).err().map(Err),
                key: get.key,
                buffers: get.buffers,
                located: None,
                remembered: false,
                is_later: false,
                tried: Tried::default(),
                backoff: Backoff::default(),
                last: None,
            })
            .collect();
        Self {
            inner,
            deadline,
            release,
            items,
            reports: Vec::new(),
            holding: inner.hold(),
            later: Vec::new(),
            work: FuturesUnordered::new(),
        }
    }

    /// Runs until every block has an outcome.
    pub(super) async fn run(mut self) -> Vec<Result<GetOutcome, GetError>> {
        self.begin();
        while let Some(step) = self.work.next().await {
            match step {
                Step::Late(items) => items.into_iter().for_each(|at| self.late(at)),
                Step::Located {
                    items,
                    asked,
                    answer,
                    of_item,
                } => self.located(&items, &asked, answer, &of_item),
                Step::Read(done) => self.read_done(done),
            }
            if self.work.is_empty() {
                self.ask_again_for_later();
            }
        }
        let control_timeout = self.inner.options.timeouts.control;
        let later = Deadline::after(control_timeout);
        let reports = std::mem::take(&mut self.reports);
        reports::send_soon(&self.inner.control, reports, later);
        self.end_dropped_leases();
        if self.release {
            let by = self.deadline.with_grace();
            let released = self.inner.releases.send(self.holding.take(), Call::by(by));
            match by.at_most(RELEASE_TIMEOUT).run(released).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::debug!(%error, "leases not released, they expire by themselves")
                }
                Err(Passed) => tracing::debug!("release not confirmed in time"),
            }
        }
        self.items
            .into_iter()
            .map(|item| {
                item.outcome.unwrap_or_else(|| {
                    Err(failed(
                        Code::Internal,
                        "internal fault: the get has no outcome",
                    ))
                })
            })
            .collect()
    }

    /// Releases the leases that dropped [`crate::Lease`]s hold on the blocks that were read.
    fn end_dropped_leases(&self) {
        let releases = &self.inner.releases;
        if releases.remembers() {
            let is_hit = |item: &&Item| matches!(item.outcome, Some(Ok(GetOutcome::Hit { .. })));
            let read = self.items.iter().filter(is_hit);
            releases.read(read.map(|item| item.key.clone()));
        }
    }

    fn item(&mut self, at: usize) -> &mut Item {
        self.items
            .get_mut(at)
            .expect("invariant: steps name only items of their batch")
    }

    /// Takes locations from the cache, and asks the master for the others.
    fn begin(&mut self) {
        let now = BootTime::now();
        let epoch = self.inner.control.epoch();
        let (mut known, mut unknown) = (Vec::new(), Vec::new());
        for at in 0..self.items.len() {
            if self.item(at).outcome.is_some() {
                continue;
            }
            let locations = &self.inner.locations;
            let located = locations.get(&self.item(at).key, epoch, now);
            match located {
                Some(located) => {
                    Counting::one(&self.inner.counting.cache_hits);
                    self.take(at, located);
                    self.item(at).remembered = true;
                    known.push(at);
                }
                None => {
                    Counting::one(&self.inner.counting.cache_misses);
                    unknown.push(at);
                }
            }
        }
        self.locate(unknown, Vec::new(), None);
        self.dispatch(known);
    }

    /// Reports the failures in `reports` to the master, pauses if there is a pause, and then asks for
    /// locations.
    fn locate(&mut self, items: Vec<usize>, reports: Vec<Report>, pause: Option<Duration>) {
        if items.is_empty() {
            return;
        }
        let keys: Vec<Key> = items
            .iter()
            .filter_map(|at| self.items.get(*at))
            .map(|item| item.key.clone())
            .collect();
        let distinct = Distinct::of(&keys);
        let asked: Vec<Key> = distinct
            .firsts
            .iter()
            .filter_map(|first| keys.get(*first).cloned())
            .collect();
        let (inner, deadline, keep) = (self.inner, self.deadline, !self.release);
        self.work.push(Box::pin(async move {
            reports::send_before_lookup(&inner.control, reports, deadline).await;
            if !deadline.pause(pause.unwrap_or_default()).await {
                return Step::Late(items);
            }
            let answer = inner.lookup(&asked, keep, deadline).await;
            Step::Located {
                items,
                asked,
                answer,
                of_item: distinct.of_item,
            }
        }));
    }

    fn located(
        &mut self,
        items: &[usize],
        asked: &[Key],
        answer: Result<Vec<Found>, ControlError>,
        of_item: &[usize],
    ) {
        let found = match answer {
            Ok(found) => {
                for (key, found) in asked.iter().zip(&found) {
                    if let Ok(Some(located)) = found {
                        self.holding.add_located(key, located);
                    }
                }
                found
            }
            Err(error) => {
                let again = items
                    .iter()
                    .copied()
                    .filter(|at| self.try_again(*at, error.clone().into()))
                    .collect();
                return self.again(again);
            }
        };
        let (mut known, mut again) = (Vec::new(), Vec::new());
        for (at, slot) in items.iter().copied().zip(of_item) {
            let found: Found = found.get(*slot).cloned().unwrap_or(Ok(None));
            match found {
                Ok(Some(located)) if located.replicas.is_empty() => {
                    self.settle(at, Ok(GetOutcome::Miss));
                }
                Ok(Some(located)) => {
                    self.take(at, located);
                    known.push(at);
                }
                Ok(None) => self.settle(at, Ok(GetOutcome::Miss)),
                Err(error) if is_later(&error) => {
                    self.item(at).is_later = true;
                    self.later.push(at);
                }
                Err(error) => {
                    if self.try_again(at, error.into()) {
                        again.push(at);
                    }
                }
            }
        }
        self.dispatch(known);
        self.again(again);
    }

    /// Sets the location of a block. If all its replicas have failed, they are tried once more: the master
    /// knows of the failures and still names these replicas.
    fn take(&mut self, at: usize, located: Arc<Located>) {
        let inner = self.inner;
        let item = self.item(at);
        item.tried.renew(located.version, false);
        if item.tried.choose(&located, &inner.links).is_none() {
            item.tried.renew(located.version, true);
        }
        item.located = Some(located);
        item.remembered = false;
        item.is_later = false;
    }

    /// Starts the reads of located blocks, one step per node.
    fn dispatch(&mut self, items: Vec<usize>) {
        type Group = (Incarnation, Vec<TransportKind>, Epoch);
        let mut groups: HashMap<Group, NodeReads> = HashMap::default();
        let mut again = Vec::new();
        for at in items {
            let inner = self.inner;
            let item = self.item(at);
            let Some(located) = item.located.clone() else {
                again.push(at);
                continue;
            };
            let Some(into) = part_of(&item.buffers, Offset(0), located.length) else {
                let error = GetError::BufferTooSmall {
                    buffers: total_length(&item.buffers),
                    block: located.length,
                };
                self.settle(at, Err(error));
                continue;
            };
            let Some(choice) = item.tried.choose(&located, &inner.links) else {
                if inner.reaches_none(&located) {
                    let message = "the transport is set to shared memory only, and no replica is on this host";
                    self.settle(at, Err(failed(Code::Unreachable, message)));
                } else {
                    again.push(at);
                }
                continue;
            };
            let parts = item.tried.untried(&located).saturating_add(1);
            let node = choice.replica.node;
            let group = (node.incarnation, choice.ways.clone(), located.epoch);
            let reads = groups.entry(group).or_insert_with(|| NodeReads {
                node,
                ways: choice.ways,
                epoch: located.epoch,
                reads: Vec::new(),
                ops: Vec::new(),
                parts: 1,
            });
            reads.parts = reads.parts.max(parts);
            reads.ops.push(ReadOp {
                extent: choice.replica.extent,
                from: Offset(0),
                into,
                right: choice.replica.right,
            });
            reads
                .reads
                .push((at, located, choice.replica.extent.segment));
        }
        for reads in groups.into_values() {
            match self.read_now(&reads) {
                Some(results) => {
                    let done = reads.done(results, BootTime::now());
                    self.read_done(done);
                }
                None => self.read(reads),
            }
        }
        self.again(again);
    }

    /// Reads without waiting, if the best transport to the node can do so.
    fn read_now(&self, group: &NodeReads) -> Option<Vec<TransferResult>> {
        let link = self.inner.links.opened(&group.node, *group.ways.first()?)?;
        let _span = spans::inline_read(link.kind(), &group.node, group.ops.len()).entered();
        link.read_now(group.epoch, &group.ops, self.deadline.to_std())
    }

    fn read(&mut self, group: NodeReads) {
        let (inner, deadline) = (self.inner, self.deadline);
        let keys: Vec<Key> = group
            .reads
            .iter()
            .filter_map(|(at, ..)| self.items.get(*at))
            .map(|item| item.key.clone())
            .collect();
        self.work.push(Box::pin(async move {
            let bytes = group.ops.iter().map(|op| op.length().0).sum();
            let limit = deadline.share(group.parts, Length(bytes));
            let blocks = keys
                .iter()
                .zip(group.reads.iter().map(|(_, located, _)| located));
            let renewal = Renewal::new(&inner.control, blocks);
            let asked = group.ops.len();
            let mut ways = group.ways;
            let (results, detached) = match inner.links.first(&group.node, &ways, limit).await {
                Ok(link) => {
                    ways = vec![link.kind()];
                    let span = spans::transfer("read", link.kind(), &group.node, asked, bytes);
                    let read = || link.read(group.epoch, group.ops, limit.to_std());
                    let reading = span.in_scope(read).instrument(span);
                    let reading = limit.with_grace().run(reading);
                    let began = Instant::now();
                    let read = renewal.during(reading, limit).await;
                    let measured = Measured::Read(link.kind());
                    inner.counting.latencies.observe(measured, began.elapsed());
                    match read {
                        Ok(results) => {
                            let broke = |result: &TransferResult| {
                                matches!(result, Err(error) if Links::is_of_way(error.code))
                            };
                            if results.iter().any(broke) {
                                inner.links.rdma_cooldown(&group.node, link.kind());
                            }
                            (results, false)
                        }
                        Err(_) => (vec![Err(overdue(&group.node)); asked], true),
                    }
                }
                Err(error) => (vec![Err(error); asked], false),
            };
            Step::Read(ReadDone {
                ended: BootTime::now(),
                leases: renewal.leases(),
                node: group.node,
                reads: group.reads,
                ways,
                results,
                detached,
            })
        }));
    }

    fn read_done(&mut self, done: ReadDone) {
        let (mut next, mut again) = (Vec::new(), Vec::new());
        let kind = done.ways.first().copied().unwrap_or(TransportKind::Tcp);
        let outcomes = done.reads.into_iter().zip(done.results).zip(done.leases);
        for (((at, located, segment), result), lease) in outcomes {
            if let (Some(before), Some(after)) = (located.lease, lease) {
                let item = self.items.get(at);
                let item = item.expect("invariant: steps name only items of their batch");
                self.holding.renewed(&item.key, before, after);
            }
            let judged = judge(&located, result, lease, done.ended);
            let error = match judged {
                Judged::Right => {
                    self.inner.counting.read(kind, located.length.0);
                    let hit = GetOutcome::Hit {
                        length: located.length,
                        version: located.version,
                    };
                    self.settle(at, Ok(hit));
                    continue;
                }
                Judged::Outrun => {
                    Counting::one(&self.inner.counting.leases_outrun);
                    TransferError {
                        code: Code::LeaseEnded,
                        message: "the lease expired during the read".to_owned(),
                    }
                }
                Judged::Wrong(error) => error,
            };
            if done.detached {
                self.settle(at, Err(failed(error.code, error.message)));
                continue;
            }
            let verdict = Next::after(error.code);
            if verdict == Next::ReportMismatch {
                Counting::one(&self.inner.counting.checksum_mismatches);
                tracing::warn!(
                    node = %done.node.name, extent = ?located.replica(segment).map(|r| r.extent),
                    version = %located.version, "checksum mismatch, trying another replica"
                );
            }
            if verdict == Next::ReportUnreachable {
                self.inner.links.deprioritize(&done.node);
            }
            if error.code == Code::StaleEpoch {
                self.inner.control.hear_of_newer_term();
            }
            Counting::one(&self.inner.counting.transfer_retries);
            let version = located.version;
            let item = self.item(at);
            // The location came from the cache, without a lease. Other bytes there prove no fault
            // of the replica, since the extent may hold another block by now. Only a read under a
            // lease can find a replica corrupt.
            if !(item.remembered && error.code == Code::LeaseEnded) {
                for way in &done.ways {
                    item.tried.fail(segment, *way);
                }
            }
            let key = item.key.clone();
            self.inner.locations.forget(&key);
            if let Some(code) = verdict.report() {
                self.reports.push(Report {
                    key,
                    version,
                    segment,
                    code,
                });
            }
            if !self.note(at, error) {
                continue;
            }
            let inner = self.inner;
            let item = self.item(at);
            let more = item.tried.choose(&located, &inner.links).is_some();
            if verdict == Next::Relocate || !more {
                again.push(at);
            } else {
                next.push(at);
            }
        }
        if again.is_empty() && !self.reports.is_empty() {
            let reports = std::mem::take(&mut self.reports);
            let later = Deadline::after(self.inner.options.timeouts.control);
            reports::send_soon(&self.inner.control, reports, later);
        }
        self.dispatch(next);
        self.again(again);
    }

    /// Records a failed read. Returns false when no time is left for another attempt. The block
    /// then has its outcome.
    fn note(&mut self, at: usize, error: TransferError) -> bool {
        let error = failed(error.code, error.message);
        if self.deadline.has_passed() {
            self.settle(at, Err(error));
            return false;
        }
        self.item(at).last = Some(error);
        true
    }

    /// Records a failed lookup. Returns whether to repeat it; if not, the block has its outcome.
    fn try_again(&mut self, at: usize, error: GetError) -> bool {
        if !error.is_retryable() {
            self.settle(at, Err(error));
            return false;
        }
        // The failure of a replica is more informative than the failure of the lookup after it.
        self.item(at).last.get_or_insert(error);
        let over = self.deadline.has_passed();
        if over {
            self.late(at);
        }
        !over
    }

    /// Ends a block for which no time is left. Its outcome is the last failure.
    fn late(&mut self, at: usize) {
        let item = self.item(at);
        let last = item.last.take();
        if item.is_later && last.is_none() {
            return self.settle(at, Ok(GetOutcome::Miss));
        }
        let late = || failed(Code::DeadlineExceeded, "the get's timeout passed");
        self.settle(at, Err(last.unwrap_or_else(late)));
    }

    /// Asks again for blocks on SSDs that had no room in memory. The blocks that were read no longer need
    /// their room, so their leases are released first.
    fn ask_again_for_later(&mut self) {
        let items = std::mem::take(&mut self.later);
        if !items.is_empty() {
            drop(std::mem::replace(&mut self.holding, self.inner.hold()));
            self.again(items);
        }
    }

    fn again(&mut self, items: Vec<usize>) {
        if items.is_empty() {
            return;
        }
        let pause = items.iter().map(|at| self.item(*at).backoff.next()).max();
        let reports = std::mem::take(&mut self.reports);
        self.locate(items, reports, pause);
    }

    fn settle(&mut self, at: usize, outcome: Result<GetOutcome, GetError>) {
        self.item(at).outcome = Some(outcome);
    }
}

fn failed(code: Code, message: impl Into<String>) -> GetError {
    GetError::Failed {
        code,
        message: message.into(),
    }
}

fn overdue(node: &KnownNode) -> TransferError {
    TransferError {
        code: Code::DeadlineExceeded,
        message: format!("the transfer from node {} timed out", node.name),
    }
}
