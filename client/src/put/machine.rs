//! The state machine of one batch of puts. Its steps run concurrently.

use super::requests::{Bounds, Reservations, reserve_request, wait_for_room};
use super::stages::{Reserved, Written};
use crate::api::{PutBlock, PutOptions, PutOutcome};
use crate::cache::KnownNode;
use crate::clock::{Backoff, Deadline};
use crate::context::ClientContext;
use crate::control::Call;
use crate::counters::Counting;
use crate::errors::{ControlError, PutError};
use crate::latencies::Measured;
use crate::links::Links;
use crate::locate::{code_of, expect_answers, node_at, read_nodes};
use crate::spans;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use kvpool_proto::{CommitColumns, CommitRequest, ReserveReply};
use kvpool_seams::maps::HashMap;
use kvpool_transport::memory::total_length;
use kvpool_transport::{Slice, TransferError, TransferResult, WriteOp};
use kvpool_types::wire::keys::pack;
use kvpool_types::{Code, Epoch, Grant, Key, Length};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tracing::Instrument;

/// How long a put looks for another node after this client refused a node's certificate or address.
const ELSEWHERE: Duration = Duration::from_millis(1_500);

/// If less time than this remains, a failed connection does not prove that no master serves the
/// address.
const HURRY: Duration = Duration::from_millis(100);
/// The time limit of a reserve's answer, beyond its wait for room.
const RESERVE_MARGIN: Duration = Duration::from_secs(1);

/// One batch of blocks with distinct keys, small enough for one message.
pub(super) struct PutBatch<'a> {
    inner: &'a ClientContext,
    /// The number of this batch among the concurrent batches of one call.
    number: usize,
    options: &'a PutOptions,
    deadline: Deadline,
    items: Vec<Item<'a>>,
    work: FuturesUnordered<BoxFuture<'a, Step<'a>>>,
    /// The term of the last master that answered in columns. This master also accepts commits in columns.
    columns: Option<Epoch>,
}

struct Item<'a> {
    key: Key,
    parent: Option<Key>,
    /// The parent's index, if the parent is in this batch.
    parent_at: Option<usize>,
    buffers: Vec<Slice>,
    length: Length,
    stage: Stage<'a>,
    backoff: Backoff,
    /// The error of the last attempt.
    last: Option<PutError>,
    /// When this client first refused a node's certificate or address.
    untrusted_since: Option<Instant>,
    /// Whether the outcome of a commit is not known. The block may then be visible, whatever happens later.
    unknown: bool,
    /// The ids of the requests under which the master may hold a grant for the key: the request of the
    /// present grant, and requests whose reply was lost. The next request names them, and its grants replace
    /// theirs.
    granted_by: Vec<u64>,
}

enum Stage<'a> {
    /// The block has no reservation. A request for a reservation is in progress or will be sent.
    Waiting,
    /// The replicas are being written.
    Writing(Reserved<'a>),
    /// The replicas are written, and the commit is not sent yet.
    Written(Written<'a>),
    /// The commit is in progress.
    Committing,
    /// The block has its outcome.
    Settled(Result<PutOutcome, PutError>),
}

/// The result of one concurrent step.
enum Step<'a> {
    /// No time was left to try these blocks again.
    Late(Vec<usize>),
    Reserved {
        items: Vec<usize>,
        reply: Result<Box<ReserveReply>, ControlError>,
        /// The id of the request; `None` when no master received it.
        request: Option<u64>,
    },
    Wrote {
        node: Arc<KnownNode>,
        writes: NodeWrites,
        results: Vec<TransferResult>,
        /// Whether no time was left for the pause before the writes.
        late: bool,
    },
    Committed {
        items: Vec<(usize, Written<'a>)>,
        codes: Result<Vec<Code>, ControlError>,
        /// Whether the master may have done the commit without an answer.
        unknown: bool,
    },
}

/// The writes to one node: the index of each item, and its grant.
type NodeWrites = Vec<(usize, Grant)>;

impl<'a> PutBatch<'a> {
    pub(super) fn new(
        inner: &'a ClientContext,
        number: usize,
        blocks: Vec<PutBlock>,
        options: &'a PutOptions,
        deadline: Deadline,
    ) -> Self {
        // Only blocks with parents need the index of the parent.
        let chained = blocks.iter().any(|block| block.parent.is_some());
        let places: HashMap<Key, usize> = blocks
            .iter()
            .enumerate()
            .filter(|_| chained)
            .map(|(at, block)| (block.key.clone(), at))
            .collect();
        let items = blocks
            .into_iter()
            .map(|block| Item {
                parent_at: block
                    .parent
                    .as_ref()
                    .and_then(|parent| places.get(parent))
                    .copied(),
                length: total_length(&block.buffers),
                key: block.key,
                parent: block.parent,
                buffers: block.buffers,
                stage: Stage::Waiting,
                backoff: Backoff::default(),
                last: None,
                untrusted_since: None,
                unknown: false,
                granted_by: Vec::new(),
            })
            .collect();
        Self {
            inner,
            number,
            options,
            deadline,
            items,
            work: FuturesUnordered::new(),
            columns: None,
        }
    }

    /// Runs until every block has an outcome.
    pub(super) async fn run(mut self) -> Vec<Result<PutOutcome, PutError>> {
        self.reserve((0..self.items.len()).collect(), None);
        while let Some(step) = self.work.next().await {
            match step {
                Step::Late(items) => items.into_iter().for_each(|at| self.late(at)),
                Step::Reserved {
                    items,
                    reply,
                    request,
                } => self.reserved(&items, reply.map(|reply| *reply), request),
                Step::Wrote {
                    node,
                    writes,
                    results,
                    late,
                } => self.wrote(node, &writes, results, late),
                Step::Committed {
                    items,
                    codes,
                    unknown,
                } => self.committed(items, codes, unknown),
            }
        }
        self.items
            .into_iter()
            .map(|item| match item.stage {
                Stage::Settled(outcome) => outcome,
                _ => Err(super::unanswered()),
            })
            .collect()
    }

    fn item(&mut self, at: usize) -> &mut Item<'a> {
        self.items
            .get_mut(at)
            .expect("invariant: steps name only items of their batch")
    }

    /// Asks for reservations, after a pause if there is one.
    fn reserve(&mut self, items: Vec<usize>, pause: Option<Duration>) {
        if items.is_empty() {
            return;
        }
        let named = || items.iter().filter_map(|at| self.items.get(*at));
        let keys = pack(named().map(|item| &item.key));
        let lengths = named().map(|item| item.length.0).collect();
        let mut instead_of: Vec<u64> = named().flat_map(|i| i.granted_by.clone()).collect();
        instead_of.sort_unstable();
        instead_of.dedup();
        let (inner, options, deadline) = (self.inner, self.options, self.deadline);
        let number = self.number;
        let many = items.len() > 1;
        self.work.push(Box::pin(async move {
            if !deadline.pause(pause.unwrap_or_default()).await {
                return Step::Late(items);
            }
            // The remaining time is computed only when a master can be called.
            if let Err(error) = inner.control.ready(deadline).await {
                let reply = Err(error);
                let request = None;
                return Step::Reserved {
                    items,
                    reply,
                    request,
                };
            }
            let left = deadline.left();
            let wait = wait_for_room(left, many);
            let request = reserve_request(keys, lengths, options, wait, left, instead_of);
            let name = request.request;
            // The call is not repeated unchanged, because its wait for room must fit the time that is left.
            let call = Call::by(deadline.at_most(wait + RESERVE_MARGIN))
                .once()
                .waiting()
                .over(number);
            let mut unknown = false;
            let reply = inner.control.call_noting(request, call, &mut unknown);
            let reply = reply.await;
            Step::Reserved {
                request: (reply.is_ok() || unknown).then_some(name),
                items,
                reply: reply.map(Box::new),
            }
        }));
    }

    fn reserved(
        &mut self,
        items: &[usize],
        reply: Result<ReserveReply, ControlError>,
        request: Option<u64>,
    ) {
        let reply = reply.and_then(|mut reply| {
            let reservations = Reservations::take(&mut reply, items.len())?;
            let nodes = read_nodes(&reply.nodes)?;
            let bounds = Bounds::of(&reply);
            Ok((Epoch(reply.epoch), reservations, nodes, bounds))
        });
        let (epoch, reservations, nodes, bounds) = match reply {
            Ok(read) => read,
            Err(error) => {
                for at in items {
                    self.item(*at).granted_by.extend(request);
                }
                let again = items
                    .iter()
                    .copied()
                    .filter(|at| self.failed(*at, error.clone().into()))
                    .collect();
                return self.again(again);
            }
        };
        if matches!(reservations, Reservations::Columns(_)) {
            self.columns = Some(epoch);
        }
        let (mut again, mut waits) = (Vec::new(), Vec::new());
        let mut writes: BTreeMap<u32, NodeWrites> = BTreeMap::new();
        for (number, at) in items.iter().copied().enumerate() {
            match code_of(reservations.code(number)) {
                Code::Ok => {}
                Code::Exists => {
                    self.settle(at, Ok(PutOutcome::Present));
                    continue;
                }
                code => {
                    if self.failed(at, self.refused(at, code, &bounds)) {
                        match code {
                            Code::Full | Code::InProgress => waits.push(at),
                            _ => again.push(at),
                        }
                    }
                    continue;
                }
            }
            let length = self.item(at).length;
            match reservations.granted(number, &nodes, epoch, length) {
                Ok((version, granted)) => {
                    let revoker = &self.inner.revoker;
                    let item = self.item(at);
                    item.granted_by = request.into_iter().collect();
                    item.stage = Stage::Writing(Reserved::new(
                        item.key.clone(),
                        version,
                        epoch,
                        granted.len(),
                        revoker,
                    ));
                    for (node, grant) in granted {
                        writes.entry(node).or_default().push((at, grant));
                    }
                }
                Err(error) => self.settle(at, Err(error.into())),
            }
        }
        if writes.is_empty() {
            again.append(&mut waits);
        } else {
            // The master does not wait for these keys, since it answers at once if it grants anything. So the
            // client asks again without a pause. The master makes room while the client writes.
            self.reserve(waits, None);
        }
        for (node, writes) in writes {
            // The index was checked together with the grants.
            if let Ok(node) = node_at(&nodes, node) {
                self.write(node, writes, None);
            }
        }
        self.again(again);
    }

    /// Writes the replicas on one node, after a pause if there is one.
    fn write(&mut self, node: Arc<KnownNode>, writes: NodeWrites, pause: Option<Duration>) {
        let ops: Vec<WriteOp> = writes
            .iter()
            .map(|(at, grant)| WriteOp {
                grant: *grant,
                from: self.item(*at).buffers.clone(),
            })
            .collect();
        let bytes = writes.iter().map(|(_, grant)| grant.extent.length.0).sum();
        let (inner, deadline) = (self.inner, self.deadline);
        self.work.push(Box::pin(async move {
            if let Some(pause) = pause
                && !deadline.pause(pause).await
            {
                let results = vec![Err(held_back(&node.name)); writes.len()];
                return Step::Wrote {
                    node,
                    writes,
                    results,
                    late: true,
                };
            }
            // Half of the remaining time is kept for another node, in case this node hangs.
            let limit = deadline.share(2, Length(bytes));
            let results = match inner.links.best(&node, limit).await {
                Ok(link) => {
                    let kind = link.kind();
                    let span = spans::transfer("write", kind, &node, ops.len(), bytes);
                    let writing = span.in_scope(|| link.write(ops, limit.to_std()));
                    let began = Instant::now();
                    let wrote = limit.with_grace().run(writing.instrument(span)).await;
                    let measured = Measured::Write(kind);
                    inner.counting.latencies.observe(measured, began.elapsed());
                    match wrote {
                        Ok(results) => {
                            let of_way = |error: &TransferError| {
                                node_failed(Some(error)) || Links::is_of_way(error.code)
                            };
                            let mut errors = results.iter().filter_map(|r| r.as_ref().err());
                            if errors.any(of_way) {
                                inner.links.rdma_cooldown(&node, kind);
                            }
                            for (result, (_, grant)) in results.iter().zip(&writes) {
                                if result.is_ok() {
                                    inner.counting.written(kind, grant.extent.length.0);
                                }
                            }
                            results
                        }
                        Err(_) => vec![Err(overdue(&node.name)); writes.len()],
                    }
                }
                Err(error) => vec![Err(error); writes.len()],
            };
            if results
                .iter()
                .any(|result| node_failed(result.as_ref().err()))
            {
                inner.links.deprioritize(&node);
            }
            Step::Wrote {
                node,
                writes,
                results,
                late: false,
            }
        }));
    }

    fn wrote(
        &mut self,
        node: Arc<KnownNode>,
        writes: &NodeWrites,
        results: Vec<TransferResult>,
        late: bool,
    ) {
        // Another attempt of a late write would end at once, and the loop would spin until the deadline.
        let is_over = late || self.deadline.has_passed();
        let mut again = Vec::new();
        // A node limits the bytes that one client holds at a time. The grants of these writes stay valid. The
        // writes are repeated after the writes that succeeded.
        let mut held_back = NodeWrites::new();
        for ((at, grant), result) in writes.iter().copied().zip(results) {
            let waits = |error: &TransferError| error.code == Code::TooManyHeld && !is_over;
            if result.as_ref().is_err_and(waits) {
                held_back.push((at, grant));
                continue;
            }
            let item = self.item(at);
            match std::mem::replace(&mut item.stage, Stage::Waiting) {
                Stage::Writing(mut reserved) => {
                    reserved.record(grant.extent.segment, result);
                    if !reserved.is_done() {
                        item.stage = Stage::Writing(reserved);
                        continue;
                    }
                    match reserved.finish() {
                        Ok(written) => item.stage = Stage::Written(written),
                        Err(error) => {
                            Counting::one(&self.inner.counting.transfer_retries);
                            if error.code == Code::StaleEpoch {
                                self.inner.control.hear_of_newer_term();
                            }
                            let error = transfer_failed(error);
                            if self.may_be_trusted_elsewhere(at, &error) {
                                self.item(at).last = Some(error);
                                again.push(at);
                            } else if self.failed(at, error) {
                                again.push(at);
                            }
                        }
                    }
                }
                other => item.stage = other,
            }
        }
        if let Some((first, _)) = held_back.first() {
            // If no write succeeded, other operations of this client use up its limit at the node.
            let none_went = held_back.len() == writes.len();
            let pause = none_went.then(|| self.item(*first).backoff.next());
            self.write(node, held_back, pause);
        }
        self.again(again);
        self.commit();
    }

    /// Commits the written blocks. A block whose parent is still being written or committed waits.
    fn commit(&mut self) {
        let mut ready: Vec<usize> = (0..self.items.len())
            .filter(|at| matches!(self.item(*at).stage, Stage::Written(_)))
            .collect();
        // A block that waits may make its children wait, so this repeats until nothing changes.
        loop {
            let goes = |at: &usize| {
                let parent = self.items.get(*at).and_then(|item| item.parent_at);
                parent.is_none_or(|parent| {
                    let stage = self.items.get(parent).map(|item| &item.stage);
                    match stage {
                        Some(Stage::Writing(_) | Stage::Committing) => false,
                        Some(Stage::Written(_)) => {
                            parent == *at || ready.binary_search(&parent).is_ok()
                        }
                        _ => true,
                    }
                })
            };
            let left: Vec<usize> = ready.iter().copied().filter(|at| goes(at)).collect();
            if left.len() == ready.len() {
                break;
            }
            ready = left;
        }
        let mut by_epoch: BTreeMap<Epoch, Vec<(usize, Written<'a>)>> = BTreeMap::new();
        for at in ready {
            let item = self.item(at);
            if let Stage::Written(written) = std::mem::replace(&mut item.stage, Stage::Committing) {
                by_epoch
                    .entry(written.epoch())
                    .or_default()
                    .push((at, written));
            }
        }
        for (epoch, items) in by_epoch {
            let request = self.commit_request(epoch, &items);
            let (inner, deadline, number) = (self.inner, self.deadline, self.number);
            self.work.push(Box::pin(async move {
                // The last eighth of the time is kept for another put, which can tell whether an unanswered
                // commit succeeded.
                let call = Call::by(deadline.leaving_rest()).under(epoch).over(number);
                let mut unknown = false;
                let reply = inner.control.call_noting(request, call, &mut unknown);
                let codes = reply.await.and_then(|reply| {
                    expect_answers(reply.codes.len(), items.len())?;
                    Ok(reply.codes.into_iter().map(code_of).collect())
                });
                Step::Committed {
                    items,
                    codes,
                    unknown,
                }
            }));
        }
    }

    fn commit_request(&mut self, epoch: Epoch, items: &[(usize, Written<'a>)]) -> CommitRequest {
        let named = || items.iter().filter_map(|(at, _)| self.items.get(*at));
        let keys = pack(named().map(|item| &item.key));
        let chained = named().any(|item| item.parent.is_some());
        let mut numbers: HashMap<Key, u32> = (1..)
            .zip(named())
            .filter(|_| chained)
            .map(|(number, item)| (item.key.clone(), number))
            .collect();
        let mut next = u32::try_from(items.len()).unwrap_or(u32::MAX);
        let mut parents = Vec::new();
        let mut wire = Vec::new();
        let on_one = items.iter().all(|(_, written)| written.is_on_one());
        let mut columns = (self.columns == Some(epoch) && on_one).then(|| columns_for(items.len()));
        for (at, written) in items {
            let item = self.item(*at);
            let parent = item.parent.as_ref().map_or(0, |parent| {
                *numbers.entry(parent.clone()).or_insert_with(|| {
                    parents.push(parent.clone());
                    next += 1;
                    next
                })
            });
            match &mut columns {
                Some(columns) => written.add_to(columns, item.length, parent),
                None => wire.push(written.item(item.length, parent)),
            }
        }
        if let Some(columns) = columns.as_mut().filter(|_| !chained) {
            columns.parents.clear();
        }
        CommitRequest {
            caller: None,
            keys: keys.into(),
            items: wire,
            parents: pack(&parents).into(),
            columns,
        }
    }

    fn committed(
        &mut self,
        items: Vec<(usize, Written<'a>)>,
        codes: Result<Vec<Code>, ControlError>,
        unknown: bool,
    ) {
        let changed = items.iter().filter_map(|(at, _)| self.items.get(*at));
        let changed = changed.map(|item| &item.key);
        let viewed = changed.clone();
        // The caller's next get must see the caller's own upsert.
        if self.options.upsert {
            self.inner.locations.purge(changed);
        } else {
            changed.for_each(|key| self.inner.locations.forget(key));
        }
        self.inner.releases.forget(viewed);
        let mut again = Vec::new();
        match codes {
            Ok(codes) => {
                for ((at, written), code) in items.into_iter().zip(codes) {
                    let replicas = written.used_up();
                    match code {
                        Code::Ok => self.settle(at, Ok(PutOutcome::Stored { replicas })),
                        Code::Exists => self.settle(at, Ok(PutOutcome::Present)),
                        code => {
                            // The store may have recorded the commit all the same. So may it after an attempt
                            // without an answer, which the master may still carry out. If the network
                            // duplicated the request, the master carries out the other one. It may have done
                            // so already, and the grant ended with that. A block whose node was lost has
                            // replaced the earlier one.
                            let maybe_done = matches!(
                                code,
                                Code::StoreFailed
                                    | Code::InProgress
                                    | Code::Unreachable
                                    | Code::GrantEnded
                            );
                            self.item(at).unknown |= unknown || maybe_done;
                            if self.failed(at, self.refused(at, code, &Bounds::default())) {
                                again.push(at);
                            }
                        }
                    }
                }
            }
            // Under a new term the grants are void. After other errors the outcome of the commit is unknown.
            // So the client puts the block again, and a committed block is then present.
            Err(error) => {
                for (at, written) in items {
                    if error.code == Code::StaleEpoch {
                        written.used_up();
                    } else {
                        drop(written);
                    }
                    self.item(at).unknown |= unknown;
                    if self.failed(at, error.clone().into()) {
                        again.push(at);
                    }
                }
            }
        }
        self.again(again);
        self.commit();
    }

    /// Whether to repeat a write that failed because this client refuses the node's certificate or address.
    /// This node will not change, but another node may be acceptable. If there is none, the put ends soon.
    fn may_be_trusted_elsewhere(&mut self, at: usize, error: &PutError) -> bool {
        let has_time = !self.deadline.has_passed();
        let since = &mut self.item(at).untrusted_since;
        error.code() == Code::InvalidArgument
            && has_time
            && since.get_or_insert_with(Instant::now).elapsed() < ELSEWHERE
    }

    /// Records a failed attempt. Returns whether to put the block again; if not, the block has its outcome.
    fn failed(&mut self, at: usize, error: PutError) -> bool {
        if !error.is_retryable() {
            self.settle(at, Err(error));
            return false;
        }
        // The block now fails for another reason than a refused certificate or address.
        self.item(at).untrusted_since = None;
        let over = self.deadline.has_passed();
        let hurried = self.deadline.left() < HURRY;
        let item = self.item(at);
        item.stage = Stage::Waiting;
        // A call without an answer is less informative than an earlier answer.
        let says_little = match error.code() {
            Code::DeadlineExceeded => true,
            Code::Unreachable => hurried,
            _ => false,
        };
        if !says_little || item.last.is_none() {
            item.last = Some(error);
        }
        if over {
            self.late(at);
        }
        !over
    }

    /// Ends a block for which no time is left. Its outcome is the last failure.
    fn late(&mut self, at: usize) {
        let last = self.item(at).last.take();
        let outcome = last.unwrap_or_else(|| PutError::Failed {
            code: Code::DeadlineExceeded,
            message: "the put's timeout passed".to_owned(),
        });
        self.settle(at, Err(outcome));
    }

    fn settle(&mut self, at: usize, outcome: Result<PutOutcome, PutError>) {
        let item = self.item(at);
        let outcome = outcome.map_err(|error| match error {
            PutError::Failed { code, message } if item.unknown => {
                PutError::OutcomeUnknown { code, message }
            }
            error => error,
        });
        item.stage = Stage::Settled(outcome);
    }

    /// The error of a block for which kvmaster answered `code`.
    fn refused(&self, at: usize, code: Code, bounds: &Bounds) -> PutError {
        let message = match (code, self.items.get(at)) {
            (Code::TooLarge, Some(item)) => bounds.too_large(item.length),
            (Code::OverQuota, Some(item)) => bounds.over_quota(item.length),
            (Code::MemoryQuota | Code::BlocksQuota, _) => bounds.at_quota(code),
            (Code::Full, _) => {
                "the pool had no room for the block within the put's timeout: leases, pins and guaranteed shares of \
                 namespaces keep blocks in it. `kvctl ls` shows leased and pinned blocks, `kvctl status` shares \
                 that exceed the pool. Wait, remove pinned blocks, or start a store node"
                    .to_owned()
            }
            (Code::InProgress, _) => "another client is putting this block".to_owned(),
            (Code::Unreachable, _) => {
                "the store node was lost while the block was recorded".to_owned()
            }
            (Code::GrantEnded, _) => {
                "the grant had ended when the commit arrived: it expired, or the commit arrived twice"
                    .to_owned()
            }
            (Code::NoNodes, _) => {
                "no store node takes blocks: `kvctl status` shows why".to_owned()
            }
            _ => "kvmaster refused the block".to_owned(),
        };
        PutError::Failed { code, message }
    }

    fn again(&mut self, items: Vec<usize>) {
        let pause = items.iter().map(|at| self.item(*at).backoff.next()).max();
        self.reserve(items, pause);
    }
}

/// Empty columns with room for `count` items.
fn columns_for(count: usize) -> CommitColumns {
    CommitColumns {
        versions: Vec::with_capacity(count),
        lengths: Vec::with_capacity(count),
        checksums: Vec::with_capacity(count),
        segments: Vec::with_capacity(count),
        parents: Vec::with_capacity(count),
    }
}

/// Whether a failure is the node's fault rather than the block's.
fn node_failed(error: Option<&TransferError>) -> bool {
    error.is_some_and(|error| {
        matches!(
            error.code,
            Code::Unreachable | Code::DeadlineExceeded | Code::Draining | Code::InvalidArgument
        )
    })
}

/// The put's error for a failed write. A write whose grant was refused or has ended may succeed under another
/// grant, so its code becomes the retryable `GrantEnded`.
fn transfer_failed(error: TransferError) -> PutError {
    let code = match error.code {
        Code::GrantRefused | Code::AlreadyWritten | Code::IncarnationDropped => Code::GrantEnded,
        code => code,
    };
    PutError::Failed {
        code,
        message: error.message,
    }
}

fn held_back(node: &kvpool_types::NodeName) -> TransferError {
    TransferError {
        code: Code::TooManyHeld,
        message: format!(
            "this client held as many bytes of node {node} as it may until the put's timeout"
        ),
    }
}

fn overdue(node: &kvpool_types::NodeName) -> TransferError {
    TransferError {
        code: Code::DeadlineExceeded,
        message: format!("the transfer to node {node} timed out"),
    }
}
