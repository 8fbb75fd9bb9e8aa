//! The completion queue of a rail, and the thread that empties it.
//!
//! A work request's id holds its lane's slot, the slot's generation, and a sequence number of the
//! lane. A completion that arrives after its lane has ended finds another generation and is
//! ignored. Every queue pair reserves room for all its possible completions, so the queue never
//! overflows.

// UNSAFETY: creates a completion queue with its channel, and destroys each once. Every user of the
// queue keeps `CompletionState` alive, so none is left by then.
#![allow(unsafe_code, reason = "calls libibverbs")]

mod thread;

use super::device::Device;
use super::lane::Inner;
use super::registry::Cache;
use super::sys;
use super::work::WorkError;
use parking_lot::{Condvar, Mutex};
use rustix::event::EventfdFlags;
use std::ffi::c_int;
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};
use thread::Loop;

/// The size of the completion queue. Falls to the least when the device or the limit of locked
/// memory requires it.
const MOST_ENTRIES: u32 = 1 << 16;
const LEAST_ENTRIES: u32 = 1 << 10;

/// How long aborted work may drain before its queue pair is destroyed.
pub(super) const DRAIN: Duration = Duration::from_millis(250);

/// How long a new queue pair waits for room that ended queue pairs are about to free.
const ROOM: Duration = Duration::from_millis(500);

/// Owns the completion thread, which ends when this is dropped.
pub(super) struct Completions {
    shared: Arc<CompletionState>,
    thread: Option<JoinHandle<()>>,
}

/// Shared by queue pairs, lanes and the thread.
pub(super) struct CompletionState {
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

/// Free entries of the completion queue.
struct Room {
    free: u32,
    /// Entries of ended queue pairs, free once the queue has been seen empty.
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

/// A lane's slot: the upper half of the ids of its work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaneSlot {
    slot: u16,
    generation: u16,
}

/// The entries reserved for one queue pair.
pub(super) struct Reserved {
    shared: Arc<CompletionState>,
    entries: u32,
    leaves_completions: bool,
}

// SAFETY: the library locks the queue and the channel, and neither belongs to a thread.
unsafe impl Send for CompletionState {}
// SAFETY: as for `Send`.
unsafe impl Sync for CompletionState {}

impl LaneSlot {
    pub(super) fn id(self, sequence: u32) -> u64 {
        u64::from(self.slot) << 48 | u64::from(self.generation) << 32 | u64::from(sequence)
    }

    fn of_id(id: u64) -> (Self, u32) {
        let slot_id = Self {
            slot: u16::try_from(id >> 48).expect("invariant: 16 bits remain"),
            generation: u16::try_from(id >> 32 & 0xffff).expect("invariant: masked to 16 bits"),
        };
        let sequence = u32::try_from(id & 0xffff_ffff).expect("invariant: masked to 32 bits");
        (slot_id, sequence)
    }
}

impl Completions {
    /// Creates the queue of a device and starts its thread, which also sweeps the cache.
    pub(super) fn start(device: &Arc<Device>, cache: &Arc<Cache>) -> io::Result<Self> {
        let shared = Arc::new(CompletionState::new(device)?);
        let thread = std::thread::Builder::new()
            .name("kvpool-rdma".to_owned())
            .spawn({
                let shared = shared.clone();
                let cache = cache.clone();
                move || {
                    let thread = AssertUnwindSafe(|| Loop::new(shared.clone(), cache).run());
                    if std::panic::catch_unwind(thread).is_err() {
                        shared.give_up("its completion thread panicked");
                    }
                }
            })?;
        *shared.thread.lock() = Some(thread.thread().id());
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    pub(super) fn shared(&self) -> &Arc<CompletionState> {
        &self.shared
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        // The last queue pair, and with it the rail, may be dropped on the thread itself.
        if let Some(thread) = self.thread.take()
            && !self.shared.is_completion_thread()
            && thread.join().is_err()
        {
            tracing::error!("the RDMA completion thread panicked");
        }
    }
}

impl CompletionState {
    fn new(device: &Arc<Device>) -> io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let context = device.context.as_ptr();
        // SAFETY: the context lives as long as the device, which this value keeps.
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
                    // SAFETY: the channel was just created and nothing uses it.
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

    /// Reserves entries for a queue pair.
    pub(super) fn reserve(self: &Arc<Self>, entries: u32) -> io::Result<Reserved> {
        if !self.is_usable() {
            return Err(io::Error::other("the RDMA device failed"));
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

    /// Assigns a slot to a lane.
    pub(super) fn enter(&self, lane: impl FnOnce(LaneSlot) -> Arc<Inner>) -> Arc<Inner> {
        let mut slots = self.slots.lock();
        let slot = slots.free.pop().unwrap_or_else(|| {
            let slot = u16::try_from(slots.slots.len())
                .expect("invariant: each lane reserves room, of which there is less");
            slots.slots.push(Slot::default());
            slot
        });
        let entry = &mut slots.slots[usize::from(slot)];
        let lane = lane(LaneSlot {
            slot,
            generation: entry.generation,
        });
        entry.lane = Some(lane.clone());
        lane
    }

    /// Releases a lane's slot. Later completions of the lane are ignored.
    pub(super) fn leave(&self, slot_id: LaneSlot) {
        let mut slots = self.slots.lock();
        let Some(entry) = slots.slots.get_mut(usize::from(slot_id.slot)) else {
            return;
        };
        if entry.generation != slot_id.generation {
            return;
        }
        entry.generation = entry.generation.wrapping_add(1);
        let lane = entry.lane.take();
        slots.free.push(slot_id.slot);
        drop(slots);
        drop(lane);
    }

    /// Lets the thread end a lane that has not drained after [`DRAIN`].
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
            // The counter is full, so the thread is awake.
            tracing::debug!(%error, "waking the RDMA completion thread failed");
        }
    }

    fn lane(&self, slot_id: LaneSlot) -> Option<Arc<Inner>> {
        let slots = self.slots.lock();
        let entry = slots.slots.get(usize::from(slot_id.slot))?;
        (entry.generation == slot_id.generation)
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

    /// The device has failed: ends every lane.
    fn give_up(&self, why: &str) {
        if self.usable.swap(false, Ordering::AcqRel) {
            tracing::error!(%why, "RDMA device failed");
        }
        for lane in self.all_lanes() {
            lane.close(WorkError::local("device failure", why));
            lane.end();
        }
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

impl Drop for CompletionState {
    fn drop(&mut self) {
        // SAFETY: every queue pair keeps this value, so none uses the queue any more. The thread
        // acknowledged its events when it ended.
        let code = unsafe { (self.device.library.destroy_cq)(self.queue.as_ptr()) };
        if code != 0 {
            tracing::error!(code, "destroying an RDMA completion queue failed");
        }
        // SAFETY: the channel's only queue is destroyed.
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
