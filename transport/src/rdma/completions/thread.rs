//! The thread that empties a completion queue and reports the completions to the lanes.
//!
//! It spins while work is in flight, for [`SPIN`] at most. Then it requests an event for the next
//! completion, looks once more, and sleeps.

// UNSAFETY: polls a completion queue and reads events of its channel and its device, all of which
// live as long as `CompletionState`.
#![allow(unsafe_code, reason = "calls libibverbs")]

use super::{CompletionState, LaneSlot};
use crate::rdma::device::check;
use crate::rdma::lane::Inner;
use crate::rdma::operation::Finished;
use crate::rdma::registry::Cache;
use crate::rdma::sys::{self, Zeroed};
use crate::rdma::work::WorkError;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::ffi::{c_int, c_uint};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The most completions taken by one poll.
const BATCH: usize = 64;

/// How long the thread spins after the last completion while work is in flight.
const SPIN: Duration = Duration::from_micros(50);

/// The number of events acknowledged by one call, because each call takes a lock.
const ACKNOWLEDGED_AT_ONCE: c_uint = 128;

/// How often the cache is swept of dropped regions.
const SWEEP: Duration = Duration::from_secs(1);

/// The state of the thread.
pub(super) struct Loop {
    shared: Arc<CompletionState>,
    cache: Arc<Cache>,
    batch: Vec<sys::Wc>,
    unacknowledged: c_uint,
    may_spin: bool,
    swept: Instant,
}

impl Loop {
    pub(super) fn new(shared: Arc<CompletionState>, cache: Arc<Cache>) -> Self {
        Self {
            shared,
            cache,
            batch: vec![sys::Wc::zeroed(); BATCH],
            unacknowledged: 0,
            may_spin: std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1),
            swept: Instant::now(),
        }
    }

    /// Runs until the rail is dropped or the device fails.
    pub(super) fn run(mut self) {
        let mut quiet_since = Instant::now();
        while !self.shared.stop.load(Ordering::Acquire) {
            if self.take() {
                quiet_since = Instant::now();
                continue;
            }
            self.end_overdue();
            let is_expecting = self.may_spin && self.shared.in_flight() > 0;
            if is_expecting && quiet_since.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            // SAFETY: the queue lives as long as the shared state.
            let code = unsafe { sys::req_notify_cq(self.shared.queue.as_ptr()) };
            if let Err(error) = check(code) {
                self.shared
                    .give_up(&format!("requesting a completion event failed: {error}"));
                return;
            }
            if !self.take() {
                self.sleep();
            }
            quiet_since = Instant::now();
        }
    }

    /// Takes the completions that have arrived and reports them. False when there were none.
    fn take(&mut self) -> bool {
        let room = c_int::try_from(self.batch.len()).expect("invariant: a small batch");
        // SAFETY: the queue lives as long as the shared state, and the batch has this much room.
        let taken =
            unsafe { sys::poll_cq(self.shared.queue.as_ptr(), room, self.batch.as_mut_ptr()) };
        let Ok(taken) = usize::try_from(taken) else {
            self.shared.give_up("reading the completion queue failed");
            return false;
        };
        if taken == 0 {
            self.free_room();
            return false;
        }
        let mut finished = Vec::new();
        let mut lanes: Vec<(LaneSlot, Arc<Inner>)> = Vec::new();
        for completion in &self.batch[..taken] {
            let (slot_id, sequence) = LaneSlot::of_id(completion.wr_id);
            let known = lanes.iter().position(|(other, _)| *other == slot_id);
            let at = known.or_else(|| {
                lanes.push((slot_id, self.shared.lane(slot_id)?));
                Some(lanes.len() - 1)
            });
            // An ended lane has reported all its work already.
            if let Some((_, lane)) = at.and_then(|at| lanes.get(at)) {
                lane.completed(sequence, completion, &mut finished);
            }
        }
        for (_, lane) in &lanes {
            lane.pump(&mut finished);
        }
        Finished::tell(finished);
        true
    }

    /// The queue is empty, so completions of ended queue pairs have left it.
    fn free_room(&self) {
        let mut room = self.shared.room.lock();
        if room.left > 0 {
            room.free += std::mem::take(&mut room.left);
            drop(room);
            self.shared.room_made.notify_all();
        }
    }

    /// Destroys the queue pairs of lanes that did not drain in time.
    fn end_overdue(&self) {
        // Taken out of the lock, because lanes take it while they hold their own.
        let closing = std::mem::take(&mut *self.shared.closing.lock());
        if closing.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut later = Vec::new();
        for (deadline, lane) in closing {
            if lane.is_drained() {
                continue;
            }
            if deadline <= now {
                lane.end();
            } else {
                later.push((deadline, lane));
            }
        }
        self.shared.closing.lock().extend(later);
    }

    /// Sleeps until an event of the device, a wake-up, or the next deadline.
    fn sleep(&mut self) {
        let shared = self.shared.clone();
        let deadline = shared
            .closing
            .lock()
            .iter()
            .map(|(deadline, _)| *deadline)
            .min();
        let until = match deadline {
            Some(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
            None if self.cache.is_empty() => None,
            None => Some(SWEEP),
        };
        let until = until.map(|time| Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(1),
            tv_nsec: i64::from(time.subsec_nanos()),
        });
        let mut fds = [
            PollFd::from_borrowed_fd(shared.channel_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(shared.async_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(shared.wake.as_fd(), PollFlags::IN),
        ];
        match rustix::event::poll(&mut fds, until.as_ref()) {
            Ok(_) => {
                let [channel, device, wake] = fds.map(|fd| !fd.revents().is_empty());
                if channel {
                    self.take_events();
                }
                if device {
                    self.take_news();
                }
                if wake {
                    let mut count = [0; 8];
                    // Only drained: the loop checks every cause of a wake-up anyway.
                    let _ = rustix::io::read(&shared.wake, &mut count);
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => self
                .shared
                .give_up(&format!("waiting for RDMA events failed: {error}")),
        }
        if self.swept.elapsed() >= SWEEP {
            self.cache.sweep();
            self.swept = Instant::now();
        }
    }

    fn take_events(&mut self) {
        let mut queue = std::ptr::null_mut();
        let mut context = std::ptr::null_mut();
        loop {
            // SAFETY: the channel lives as long as the shared state; the other arguments are local.
            let code = unsafe {
                (self.shared.device.library.get_cq_event)(
                    self.shared.channel.as_ptr(),
                    &raw mut queue,
                    &raw mut context,
                )
            };
            if code != 0 {
                break;
            }
            self.unacknowledged += 1;
        }
        self.acknowledge(ACKNOWLEDGED_AT_ONCE);
    }

    fn acknowledge(&mut self, from: c_uint) {
        if self.unacknowledged >= from {
            let count = std::mem::take(&mut self.unacknowledged);
            // SAFETY: this many events of this queue were taken and not acknowledged.
            unsafe {
                (self.shared.device.library.ack_cq_events)(self.shared.queue.as_ptr(), count);
            }
        }
    }

    /// Handles the device's asynchronous events.
    fn take_news(&mut self) {
        loop {
            let mut event = sys::AsyncEvent::zeroed();
            let library = self.shared.device.library;
            // SAFETY: the context lives as long as the device, and the event is local.
            let code = unsafe {
                (library.get_async_event)(self.shared.device.context.as_ptr(), &raw mut event)
            };
            if code != 0 {
                return;
            }
            let is_of_queue_pair = matches!(
                event.event_type,
                sys::EVENT_QP_FATAL | sys::EVENT_QP_REQ_ERR | sys::EVENT_QP_ACCESS_ERR
            );
            let number = is_of_queue_pair.then(|| {
                // SAFETY: such an event names a queue pair, which cannot be destroyed before the
                // event is acknowledged.
                unsafe { (*event.element).qp_num }
            });
            // SAFETY: the event was taken above and is acknowledged once.
            unsafe { (library.ack_async_event)(&raw mut event) };
            tracing::debug!(kind = event.event_type, ?number, "RDMA device event");
            if let Some(number) = number {
                for lane in self.shared.all_lanes() {
                    if lane.has_queue_pair(number) {
                        lane.close(WorkError::local(
                            "QP event",
                            "the device failed the queue pair",
                        ));
                    }
                }
            } else if matches!(
                event.event_type,
                sys::EVENT_CQ_ERR | sys::EVENT_DEVICE_FATAL
            ) {
                self.shared.give_up("the device reported a fatal error");
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // The queue can be destroyed only after all its events are acknowledged.
        self.acknowledge(1);
        // Lanes keep the shared state, so the shared state must not keep lanes.
        let closing = std::mem::take(&mut *self.shared.closing.lock());
        drop(closing);
    }
}
