//! The submitting side of a queue pair: flow control, selective signalling, outcomes.
//!
//! ```text
//!  Open ─ bad completion, refused post, abort ─► Closing (ERR, draining) ─► Ended (destroyed)
//! ```
//!
//! `posted` holds every posted work request, in order, until a completion reports its end or the
//! queue pair is destroyed. Every read has a completion, which carries its byte count. Only some
//! writes have one. A successful completion covers all earlier writes, because a reliable
//! connection works in order.

// UNSAFETY: posts work requests that name memory. Operations keep the memory until their work has
// ended.
#![allow(unsafe_code, reason = "posts work requests that name memory")]

use super::completions::{CompletionState, DRAIN, LaneSlot};
use super::device::Device;
use super::operation::{Finished, Operation};
use super::plan::Bounds;
use super::queue::{QueuePair, WorkChain};
use super::sys;
use super::turns::{Turns, Window};
use super::work::{Transfer, Verb, WorkError};
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The most work requests posted by one call.
const CHAIN: usize = 32;

/// A connected queue pair for submissions. Dropping it calls [`RdmaLane::abort`], which may block
/// briefly while work is in flight.
pub struct RdmaLane {
    inner: Arc<Inner>,
}

/// Shared by the lane and the completion thread.
pub(super) struct Inner {
    device: Arc<Device>,
    shared: Arc<CompletionState>,
    slot_id: LaneSlot,
    number: u32,
    bounds: Bounds,
    is_open: AtomicBool,
    state: Mutex<RdmaLaneState>,
    changed: Condvar,
}

struct RdmaLaneState {
    phase: LanePhase,
    queue: Option<QueuePair>,
    operations: HashMap<u64, Operation>,
    next_operation: u64,
    turns: Turns,
    window: Window,
    posted: VecDeque<Posted>,
    /// The sequence number of the front of `posted`.
    first: u32,
    /// The works and bytes posted since the last signalled request.
    unsignalled: (u32, u64),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LanePhase {
    Open,
    Closing,
    Ended,
}

#[derive(Clone, Copy)]
struct Posted {
    operation: u64,
    work: usize,
    length: u32,
    verb: Verb,
}

impl RdmaLane {
    /// Takes over a connected queue pair.
    pub fn new(queue: QueuePair) -> Self {
        let limits = queue.rail().limits();
        let bounds = Bounds {
            slice: limits.slice,
            scatter: limits.scatter,
        };
        Self::bounded(queue, bounds)
    }

    fn bounded(queue: QueuePair, bounds: Bounds) -> Self {
        let rail = queue.rail().clone();
        let shared = rail.completions.shared().clone();
        let inner = shared.enter(|slot_id| {
            Arc::new(Inner {
                device: rail.device.clone(),
                shared: shared.clone(),
                slot_id,
                number: queue.address().number,
                bounds,
                is_open: AtomicBool::new(true),
                state: Mutex::new(RdmaLaneState {
                    phase: LanePhase::Open,
                    window: Window::new(queue.depth(), rail.options.window),
                    queue: Some(queue),
                    operations: HashMap::new(),
                    next_operation: 0,
                    turns: Turns::default(),
                    posted: VecDeque::new(),
                    first: 0,
                    unsignalled: (0, 0),
                }),
                changed: Condvar::new(),
            })
        });
        // Checked after the lane has its slot: a device that fails later closes the lane itself.
        if !shared.is_usable() {
            inner.close(WorkError::local("device failure", "the device has failed"));
        }
        Self { inner }
    }

    /// Submits transfers. `done` is called once, with one outcome per item, in order. It runs on the
    /// completion thread and must not block. If there is nothing to wait for, it runs on the calling thread.
    /// Slices and registrations are kept until their work has ended.
    ///
    /// After an error other than [`Fault::Invalid`](super::Fault::Invalid) the lane is closed.
    pub fn submit(
        &self,
        transfers: Vec<Transfer>,
        done: impl FnOnce(Vec<Result<(), WorkError>>) + Send + 'static,
    ) {
        let inner = &self.inner;
        let mut finished = Vec::new();
        let mut operation = Operation::new(transfers, &inner.device, inner.bounds, Box::new(done));
        let mut state = inner.state.lock();
        if state.phase != LanePhase::Open {
            operation.cancel(&WorkError::flushed("the lane is closed"));
        }
        if operation.is_finished() {
            drop(state);
            Finished::tell(vec![operation.finish()]);
            return;
        }
        let key = state.next_operation;
        state.next_operation += 1;
        state.operations.insert(key, operation);
        state.turns.enter(key);
        inner.pump_locked(&mut state, &mut finished);
        drop(state);
        Finished::tell(finished);
    }

    /// Whether the lane accepts work.
    pub fn is_open(&self) -> bool {
        self.inner.is_open.load(Ordering::Acquire)
    }

    /// Aborts all work in flight. On return the queue pair is destroyed, and this lane touches no
    /// memory here or at the peer. Unfinished work has been reported as failed. Takes a quarter of
    /// a second at most, usually far less.
    pub fn abort(&self) {
        self.inner.close(WorkError::flushed("the lane was aborted"));
        self.inner.drain();
        self.inner.end();
    }
}

impl Drop for RdmaLane {
    fn drop(&mut self) {
        self.abort();
    }
}

impl fmt::Debug for RdmaLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaLane")
            .field("number", &self.inner.number)
            .field("is_open", &self.is_open())
            .finish_non_exhaustive()
    }
}

impl Inner {
    /// Handles a completion, which ends this work request and all earlier ones.
    pub(super) fn completed(
        self: &Arc<Self>,
        sequence: u32,
        completion: &sys::Wc,
        finished: &mut Vec<Finished>,
    ) {
        let mut state = self.state.lock();
        let ahead = sequence.wrapping_sub(state.first) as usize;
        let Some(&posted) = state.posted.get(ahead) else {
            tracing::error!(sequence, "RDMA completion matches no work request");
            return;
        };
        let outcome = judge(posted, completion);
        let mut failure = outcome.as_ref().err().cloned();
        for _ in 0..ahead {
            // Earlier unsignalled writes succeeded if this request did. After a failure their end
            // is unknown, so they fail. A read without a completion always fails.
            let before = match state.posted.front() {
                Some(before) if before.verb == Verb::Write && failure.is_none() => Ok(()),
                Some(before) if before.verb == Verb::Read => Err(WorkError::local(
                    "no completion",
                    "a read ended without a completion",
                )),
                _ => Err(WorkError::flushed(
                    "the queue pair failed before this write was confirmed",
                )),
            };
            if let Err(error) = &before {
                failure.get_or_insert_with(|| error.clone());
            }
            self.retire_first(&mut state, &before, finished);
        }
        self.retire_first(&mut state, &outcome, finished);
        if let Some(failure) = failure {
            self.close_locked(&mut state, &failure, finished);
        }
        if state.posted.is_empty() {
            self.changed.notify_all();
        }
    }

    /// Posts as much work as the window admits.
    pub(super) fn pump(self: &Arc<Self>, finished: &mut Vec<Finished>) {
        let mut state = self.state.lock();
        self.pump_locked(&mut state, finished);
    }

    /// Closes the lane to new work. Work in flight soon ends with an error.
    pub(super) fn close(self: &Arc<Self>, failure: WorkError) {
        let mut finished = Vec::new();
        let mut state = self.state.lock();
        self.close_locked(&mut state, &failure, &mut finished);
        drop(state);
        Finished::tell(finished);
    }

    /// Destroys the queue pair and fails all unfinished work. Returns after that is done, here or
    /// by another thread.
    pub(super) fn end(&self) {
        let mut state = self.state.lock();
        let Some(mut queue) = state.queue.take() else {
            while state.phase != LanePhase::Ended {
                self.changed.wait(&mut state);
            }
            return;
        };
        if !state.posted.is_empty() {
            queue.leaves_completions();
        }
        drop(state);
        // The rail may be dropped with its last queue pair. That drop joins the completion thread, which may
        // be waiting here for the end.
        let rail = queue.rail().clone();
        drop(queue);
        let mut finished = Vec::new();
        state = self.state.lock();
        let flushed = Err(WorkError::flushed("the queue pair was destroyed"));
        while !state.posted.is_empty() {
            self.retire_first(&mut state, &flushed, &mut finished);
        }
        state.phase = LanePhase::Ended;
        drop(state);
        self.changed.notify_all();
        self.shared.leave(self.slot_id);
        Finished::tell(finished);
        drop(rail);
    }

    /// Whether no posted work is unfinished.
    pub(super) fn is_drained(&self) -> bool {
        self.state.lock().posted.is_empty()
    }

    /// Whether this open lane owns the queue pair with this number.
    pub(super) fn has_queue_pair(&self, number: u32) -> bool {
        self.number == number && self.is_open.load(Ordering::Acquire)
    }

    /// Waits for the work in flight, for [`DRAIN`] at most.
    fn drain(&self) {
        // The completion thread would wait for itself.
        if self.shared.is_completion_thread() {
            return;
        }
        let deadline = Instant::now() + DRAIN;
        let mut state = self.state.lock();
        while !state.posted.is_empty() {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
    }

    fn pump_locked(self: &Arc<Self>, state: &mut RdmaLaneState, finished: &mut Vec<Finished>) {
        while state.phase == LanePhase::Open {
            let mut chain = self.fill(state);
            let length = chain.len();
            if length == 0 {
                return;
            }
            let Some(queue) = &state.queue else {
                return;
            };
            self.shared.posted(length);
            // SAFETY: each request of the chain is a work of an operation in `operations`. The
            // operation keeps the slices and registrations that the request names until the work is
            // retired: by its completion, or after the queue pair has been dropped.
            let Err(refused) = (unsafe { queue.post(&mut chain) }) else {
                continue;
            };
            let failure = WorkError::refused(&refused.error);
            for _ in refused.taken..length {
                self.retire_last(state, &failure, finished);
            }
            // Requests that were accepted may be unsignalled, and no later completion will cover
            // them. Ending the queue pair does.
            self.close_locked(state, &failure, finished);
        }
    }

    /// Builds the next chain of work requests, as many as the window admits, and counts them as
    /// posted.
    fn fill(&self, state: &mut RdmaLaneState) -> WorkChain {
        let mut chain = WorkChain::default();
        while chain.len() < CHAIN
            && let Some(key) = state.turns.current()
        {
            let operation = state
                .operations
                .get_mut(&key)
                .expect("invariant: an operation has its turn while it has work");
            let (work, parts) = operation
                .next()
                .expect("invariant: an operation has its turn while it has work");
            let (length, verb) = (work.length, work.verb);
            if !state.window.admits(length) {
                break;
            }
            let sequence = state.first.wrapping_add(
                u32::try_from(state.posted.len()).expect("invariant: a send queue's depth"),
            );
            chain.push(self.slot_id.id(sequence), verb, work.remote, parts, false);
            let work = operation.posted();
            let has_more = operation.next().is_some();
            state.turns.took(length, has_more);
            state.window.enter(length);
            state.posted.push_back(Posted {
                operation: key,
                work,
                length,
                verb,
            });
            let (works, bytes) = state.unsignalled;
            let (works, bytes) = (works + 1, bytes + u64::from(length));
            if verb == Verb::Read || !has_more || state.window.wants_signal(works, bytes) {
                chain.signal_last();
                state.unsignalled = (0, 0);
            } else {
                state.unsignalled = (works, bytes);
            }
        }
        if chain.len() > 0 {
            chain.signal_last();
            state.unsignalled = (0, 0);
        }
        chain
    }

    fn close_locked(
        self: &Arc<Self>,
        state: &mut RdmaLaneState,
        failure: &WorkError,
        finished: &mut Vec<Finished>,
    ) {
        if state.phase != LanePhase::Open {
            return;
        }
        state.phase = LanePhase::Closing;
        self.is_open.store(false, Ordering::Release);
        if let Some(queue) = &state.queue {
            queue.fail();
        }
        tracing::debug!(number = self.number, %failure, "RDMA lane closed");
        state.turns.clear();
        let flushed = WorkError::flushed(format!("the lane was closed: {}", failure.message));
        for operation in state.operations.values_mut() {
            operation.cancel(&flushed);
        }
        let done = state
            .operations
            .extract_if(|_, operation| operation.is_finished());
        finished.extend(done.map(|(_, operation)| operation.finish()));
        if !state.posted.is_empty() {
            self.shared.end_later(self.clone());
        }
    }

    fn retire_first(
        &self,
        state: &mut RdmaLaneState,
        outcome: &Result<(), WorkError>,
        finished: &mut Vec<Finished>,
    ) {
        if let Some(posted) = state.posted.pop_front() {
            state.first = state.first.wrapping_add(1);
            self.retire(state, posted, outcome, finished);
        }
    }

    fn retire_last(
        &self,
        state: &mut RdmaLaneState,
        failure: &WorkError,
        finished: &mut Vec<Finished>,
    ) {
        if let Some(posted) = state.posted.pop_back() {
            self.retire(state, posted, &Err(failure.clone()), finished);
        }
    }

    fn retire(
        &self,
        state: &mut RdmaLaneState,
        posted: Posted,
        outcome: &Result<(), WorkError>,
        finished: &mut Vec<Finished>,
    ) {
        self.shared.retired(1);
        state.window.leave(posted.length);
        let Some(operation) = state.operations.get_mut(&posted.operation) else {
            unreachable!("invariant: an operation stays while it has work in flight")
        };
        operation.retire(posted.work, outcome);
        if operation.is_finished()
            && let Some(operation) = state.operations.remove(&posted.operation)
        {
            finished.push(operation.finish());
        }
    }
}

/// The outcome of a work request, by its completion.
fn judge(posted: Posted, completion: &sys::Wc) -> Result<(), WorkError> {
    if completion.status != sys::WC_SUCCESS {
        return Err(WorkError::of_completion(completion));
    }
    let expected = match posted.verb {
        Verb::Read => sys::WC_RDMA_READ,
        Verb::Write => sys::WC_RDMA_WRITE,
    };
    if completion.opcode != expected {
        return Err(WorkError::local(
            "wrong completion",
            format!(
                "the completion of a {:?} has the code {}",
                posted.verb, completion.opcode
            ),
        ));
    }
    // Only a read's completion carries a byte count.
    if posted.verb == Verb::Read && completion.byte_len != posted.length {
        return Err(WorkError::local(
            "short read",
            format!(
                "{} of {} bytes were read",
                completion.byte_len, posted.length
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
