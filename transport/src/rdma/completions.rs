//! The completion queue of a rail and the thread that empties it.
//!
//! The thread spins only while work is in flight and for a moment; then it has the device send an
//! event at the next completion, looks once more, and sleeps. A work request is known by the slot of
//! its lane, the slot's generation, and a number in the lane: a completion that comes after its lane
//! is gone finds another generation and is passed over.

// UNSAFETY: polls a completion queue and reads events. The queue and its channel are made here and
// destroyed once, when the last that uses them is gone.
#![allow(unsafe_code, reason = "calls libibverbs")]

use super::device::{Device, check};
use super::lane::Inner;
use super::operation::Finished;
use super::registry::Cache;
use super::sys::{self, Zeroed};
use super::work::WorkError;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use std::ffi::{c_int, c_uint};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// How many completions the queue has room for, unless the device or locked memory allows less.
const MOST_ENTRIES: u32 = 1 << 16;
const LEAST_ENTRIES: u32 = 1 << 10;

/// How many completions are taken at once.
const BATCH: usize = 64;

/// How long the thread looks on after the last completion, while more are to come.
const SPIN: Duration = Duration::from_micros(50);

/// How many events are acknowledged at once: each time takes a lock.
const ACKNOWLEDGED_AT_ONCE: c_uint = 128;

/// How long work that was given up is waited for before its queue pair is destroyed.
pub(super) const DRAIN: Duration = Duration::from_millis(250);

/// How long a queue pair waits for room in the completion queue that others have just left.
const ROOM: Duration = Duration::from_millis(500);

/// How often the registrations of regions that are gone are looked for.
const SWEEP: Duration = Duration::from_secs(1);

/// The thread, which ends with this.
pub(super) struct Completions {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What queue pairs, lanes and the thread share.
pub(super) struct Shared {
    device: Arc<Device>,
    channel: NonNull<sys::Channel>,
    queue: NonNull<sys::Cq>,
    room: Mutex<Room>,
    room_made: Condvar,
    slots: Mutex<Slots>,
    closing: Mutex<Vec<(Instant, Arc<Inner>)>>,
    in_flight: AtomicUsize,
    usable: AtomicBool,
    stop: AtomicBool,
    wake: OwnedFd,
    thread: Mutex<Option<ThreadId>>,
}

/// Room in the completion queue, counted in completions.
struct Room {
    free: u32,
    /// Free once the queue has been seen empty.
    left: u32,
}

#[derive(Default)]
struct Slots {
    slots: Vec<Slot>,
    free: Vec<u16>,
}

#[derive(Default)]
struct Slot {
    generation: u16,
    lane: Option<Arc<Inner>>,
}

/// Where a lane is known, as the upper half of the ids of its work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    slot: u16,
    generation: u16,
}

/// Room for the completions of one queue pair.
pub(super) struct Reserved {
    shared: Arc<Shared>,
    entries: u32,
    leaves_completions: bool,
}

// SAFETY: the library locks the queue and the channel; they belong to no thread.
unsafe impl Send for Shared {}
// SAFETY: as for `Send`.
unsafe impl Sync for Shared {}

impl Place {
    pub(super) fn id(self, sequence: u32) -> u64 {
        u64::from(self.slot) << 48 | u64::from(self.generation) << 32 | u64::from(sequence)
    }

    fn of_id(id: u64) -> (Self, u32) {
        let place = Self {
            slot: u16::try_from(id >> 48).expect("invariant: 16 bits remain"),
            generation: u16::try_from(id >> 32 & 0xffff).expect("invariant: masked to 16 bits"),
        };
        let sequence = u32::try_from(id & 0xffff_ffff).expect("invariant: masked to 32 bits");
        (place, sequence)
    }
}

impl Completions {
    /// Makes the queue of a device and starts its thread, which also sweeps the cache.
    pub(super) fn start(device: &Arc<Device>, cache: &Arc<Cache>) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(device)?);
        let thread = std::thread::Builder::new()
            .name("kvpool-rdma".to_owned())
            .spawn({
                let shared = shared.clone();
                let cache = cache.clone();
                move || Loop::new(shared, cache).run()
            })?;
        *shared.thread.lock() = Some(thread.thread().id());
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        // The last queue pair, and with it the rail, may go on the thread itself.
        if let Some(thread) = self.thread.take()
            && !self.shared.is_completion_thread()
            && thread.join().is_err()
        {
            tracing::error!("the RDMA completion thread panicked");
        }
    }
}

impl Shared {
    fn new(device: &Arc<Device>) -> io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let context = device.context.as_ptr();
        // SAFETY: the context lives as long as the device, which is kept.
        let channel = unsafe { (device.library.create_channel)(context) };
        let channel = NonNull::new(channel).ok_or_else(io::Error::last_os_error)?;
        let most = u32::try_from(device.attributes.max_cqe).unwrap_or(0);
        let mut entries = MOST_ENTRIES.min(most.max(1));
        let queue = loop {
            let asked = c_int::try_from(entries).expect("invariant: at most a few ten thousand");
            // SAFETY: the context and the channel live.
            let queue = unsafe {
                (device.library.create_cq)(
                    context,
                    asked,
                    std::ptr::null_mut(),
                    channel.as_ptr(),
                    0,
                )
            };
            match NonNull::new(queue) {
                Some(queue) => break queue,
                None if entries / 2 >= LEAST_ENTRIES => entries /= 2,
                None => {
                    let error = io::Error::last_os_error();
                    // SAFETY: just made, and nothing uses it.
                    unsafe { (device.library.destroy_channel)(channel.as_ptr()) };
                    return Err(error);
                }
            }
        };
        let shared = Self {
            device: device.clone(),
            channel,
            queue,
            room: Mutex::new(Room {
                free: entries,
                left: 0,
            }),
            room_made: Condvar::new(),
            slots: Mutex::default(),
            closing: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            usable: AtomicBool::new(true),
            stop: AtomicBool::new(false),
            wake,
            thread: Mutex::new(None),
        };
        for fd in [shared.channel_fd(), shared.async_fd()] {
            let flags = rustix::fs::fcntl_getfl(fd)?;
            rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        }
        Ok(shared)
    }

    /// Takes room for the completions of a queue pair.
    pub(super) fn reserve(self: &Arc<Self>, entries: u32) -> io::Result<Reserved> {
        if !self.is_usable() {
            return Err(io::Error::other("the RDMA device has failed"));
        }
        let deadline = Instant::now() + ROOM;
        let mut room = self.room.lock();
        while room.free < entries {
            let is_hopeless = room.left == 0 || self.is_completion_thread();
            if is_hopeless || self.room_made.wait_until(&mut room, deadline).timed_out() {
                return Err(io::Error::new(
                    io::ErrorKind::QuotaExceeded,
                    "the device's completion queue has no room for another queue pair",
                ));
            }
        }
        room.free -= entries;
        Ok(Reserved {
            shared: self.clone(),
            entries,
            leaves_completions: false,
        })
    }

    /// Gives a lane a place.
    pub(super) fn enter(&self, lane: impl FnOnce(Place) -> Arc<Inner>) -> Arc<Inner> {
        let mut slots = self.slots.lock();
        let slot = slots.free.pop().unwrap_or_else(|| {
            let slot = u16::try_from(slots.slots.len())
                .expect("invariant: each lane reserves room, of which there is less");
            slots.slots.push(Slot::default());
            slot
        });
        let entry = &mut slots.slots[usize::from(slot)];
        let lane = lane(Place {
            slot,
            generation: entry.generation,
        });
        entry.lane = Some(lane.clone());
        lane
    }

    /// Forgets a lane; what still comes for it is passed over.
    pub(super) fn leave(&self, place: Place) {
        let mut slots = self.slots.lock();
        let Some(entry) = slots.slots.get_mut(usize::from(place.slot)) else {
            return;
        };
        if entry.generation != place.generation {
            return;
        }
        entry.generation = entry.generation.wrapping_add(1);
        let lane = entry.lane.take();
        slots.free.push(place.slot);
        drop(slots);
        drop(lane);
    }

    /// Has the thread end a lane that is still not drained after a while.
    pub(super) fn end_later(&self, lane: Arc<Inner>) {
        self.closing.lock().push((Instant::now() + DRAIN, lane));
        if !self.is_completion_thread() {
            self.wake();
        }
    }

    pub(super) fn posted(&self, works: usize) {
        self.in_flight.fetch_add(works, Ordering::AcqRel);
    }

    pub(super) fn retired(&self, works: usize) {
        self.in_flight.fetch_sub(works, Ordering::AcqRel);
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    pub(super) fn lanes(&self) -> usize {
        let slots = self.slots.lock();
        slots
            .slots
            .iter()
            .filter(|slot| slot.lane.is_some())
            .count()
    }

    pub(super) fn is_usable(&self) -> bool {
        self.usable.load(Ordering::Acquire)
    }

    pub(super) fn is_completion_thread(&self) -> bool {
        *self.thread.lock() == Some(std::thread::current().id())
    }

    fn wake(&self) {
        if let Err(error) = rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) {
            // Full means that it is awake.
            tracing::debug!(%error, "the RDMA completion thread was not woken");
        }
    }

    fn lane(&self, place: Place) -> Option<Arc<Inner>> {
        let slots = self.slots.lock();
        let entry = slots.slots.get(usize::from(place.slot))?;
        (entry.generation == place.generation)
            .then(|| entry.lane.clone())
            .flatten()
    }

    fn all_lanes(&self) -> Vec<Arc<Inner>> {
        let slots = self.slots.lock();
        slots
            .slots
            .iter()
            .filter_map(|slot| slot.lane.clone())
            .collect()
    }

    fn channel_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives as long as this value.
        let fd = unsafe { self.channel.as_ref() }.fd;
        // SAFETY: the descriptor is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the device, which is kept.
        unsafe { BorrowedFd::borrow_raw(self.device.async_fd()) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: every queue pair keeps this value, so none uses the queue any more; the thread has
        // acknowledged its events when it ended.
        let code = unsafe { (self.device.library.destroy_cq)(self.queue.as_ptr()) };
        if code != 0 {
            tracing::error!(code, "an RDMA completion queue could not be destroyed");
        }
        // SAFETY: its only queue is gone.
        unsafe { (self.device.library.destroy_channel)(self.channel.as_ptr()) };
    }
}

impl Reserved {
    pub(super) fn queue(&self) -> *mut sys::Cq {
        self.shared.queue.as_ptr()
    }

    pub(super) fn leaves_completions(&mut self) {
        self.leaves_completions = true;
    }
}

impl fmt::Debug for Reserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reserved({})", self.entries)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut room = self.shared.room.lock();
        if self.leaves_completions {
            room.left += self.entries;
            drop(room);
            self.shared.wake();
        } else {
            room.free += self.entries;
            drop(room);
            self.shared.room_made.notify_all();
        }
    }
}

/// What the thread has for itself.
struct Loop {
    shared: Arc<Shared>,
    cache: Arc<Cache>,
    batch: Vec<sys::Wc>,
    unacknowledged: c_uint,
    may_spin: bool,
    swept: Instant,
}

impl Loop {
    fn new(shared: Arc<Shared>, cache: Arc<Cache>) -> Self {
        Self {
            shared,
            cache,
            batch: vec![sys::Wc::zeroed(); BATCH],
            unacknowledged: 0,
            may_spin: std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1),
            swept: Instant::now(),
        }
    }

    fn run(mut self) {
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
            // SAFETY: the queue lives as long as what is shared.
            let code = unsafe { sys::req_notify_cq(self.shared.queue.as_ptr()) };
            if let Err(error) = check(code) {
                self.give_up(&format!("no event can be asked for: {error}"));
                return;
            }
            if !self.take() {
                self.sleep();
            }
            quiet_since = Instant::now();
        }
        self.acknowledge(0);
    }

    /// Takes completions that are there and tells their lanes; whether there were any.
    fn take(&mut self) -> bool {
        let room = c_int::try_from(self.batch.len()).expect("invariant: a small batch");
        // SAFETY: the queue lives as long as what is shared, and the batch has this much room.
        let taken =
            unsafe { sys::poll_cq(self.shared.queue.as_ptr(), room, self.batch.as_mut_ptr()) };
        let Ok(taken) = usize::try_from(taken) else {
            self.give_up("the completion queue cannot be read");
            return false;
        };
        if taken == 0 {
            self.free_room();
            return false;
        }
        let mut finished = Vec::new();
        let mut lanes: Vec<(Place, Arc<Inner>)> = Vec::new();
        for completion in &self.batch[..taken] {
            let (place, sequence) = Place::of_id(completion.wr_id);
            let known = lanes.iter().position(|(other, _)| *other == place);
            let at = known.or_else(|| {
                lanes.push((place, self.shared.lane(place)?));
                Some(lanes.len() - 1)
            });
            // A lane that is gone has answered for all its work already.
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

    /// What queue pairs that are gone left in the completion queue is out.
    fn free_room(&self) {
        let mut room = self.shared.room.lock();
        if room.left > 0 {
            room.free += std::mem::take(&mut room.left);
            drop(room);
            self.shared.room_made.notify_all();
        }
    }

    /// Destroys the queue pairs of lanes that were given time to drain and have not.
    fn end_overdue(&self) {
        // Not under the lock: lanes take it while they hold their own.
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

    /// Sleeps until the device, somebody here, or the time has something.
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
                    // Only emptied: what it was for is looked up anyway.
                    let _ = rustix::io::read(&shared.wake, &mut count);
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => self.give_up(&format!("events cannot be waited for: {error}")),
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
            // SAFETY: the channel lives as long as what is shared; the rest is ours to fill.
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
        if self.unacknowledged > 0 && self.unacknowledged >= from {
            let count = std::mem::take(&mut self.unacknowledged);
            // SAFETY: so many events of this queue were taken and not acknowledged.
            unsafe {
                (self.shared.device.library.ack_cq_events)(self.shared.queue.as_ptr(), count);
            }
        }
    }

    /// What the device says about itself and its queue pairs.
    fn take_news(&mut self) {
        loop {
            let mut event = sys::AsyncEvent::zeroed();
            let library = self.shared.device.library;
            // SAFETY: the context lives as long as the device, and the event is ours to fill.
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
                // SAFETY: such an event names a queue pair, whose destruction waits until the event
                // has been acknowledged.
                unsafe { (*event.element).qp_num }
            });
            // SAFETY: taken above and acknowledged once.
            unsafe { (library.ack_async_event)(&raw mut event) };
            tracing::debug!(kind = event.event_type, ?number, "an RDMA device reports");
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
                self.give_up("the device reports a failure that it does not recover from");
            }
        }
    }

    /// Nothing will come any more: ends all there is.
    fn give_up(&self, why: &str) {
        if self.shared.usable.swap(false, Ordering::AcqRel) {
            tracing::error!(%why, "an RDMA device has failed");
        }
        for lane in self.shared.all_lanes() {
            lane.close(WorkError::local("device failure", why));
            lane.end();
        }
    }
}
