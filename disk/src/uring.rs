//! The engine with io_uring: one ring and one thread.
//!
//! ```text
//!  submit ─► queue ─ wakes, if it sleeps ─► thread: fill the ring ─► enter and wait ─► completions
//! ```
//!
//! The thread sleeps in the kernel until a transfer ends or an event wakes it. So an idle ring costs no time.
//! Every completion names its slot and the slot's generation, so that no request takes the result of another.

// UNSAFETY: entries name memory and descriptors by address. The memory is the buffer or slice that the slot
// owns until the completion; the descriptors live as long as the ring.
#![allow(unsafe_code, reason = "submission entries hold raw addresses")]

use crate::arena::Arena;
use crate::engine::{Completion, Engine, EngineKind, IoError, Op, Request};
use crate::file::File;
use crate::scattered::ScatterList;
use io_uring::{IoUring, opcode, squeue, types};
use kvpool_types::Length;
use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The tag of the entry that reads the wake-up event.
const WAKE: u64 = u64::MAX;
/// The most bytes of one entry. The kernel transfers no more at once.
const MOST_BYTES: usize = 1 << 30;
/// How long the kernel may interrupt a transfer again and again without a byte. Otherwise a file that
/// transfers nothing would keep the thread busy forever.
const GIVEN_BACK: Duration = Duration::from_secs(1);
/// How long the kernel may refuse every call before a closed ring is abandoned.
const REFUSED: Duration = Duration::from_secs(2);
/// The pause after a call that the kernel refused.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);

/// A ring over one file.
#[derive(Debug)]
pub(crate) struct Uring {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    file: Arc<File>,
    queue: Mutex<Queue>,
    wake: OwnedFd,
    in_flight: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<Request>,
    /// Whether the thread may sleep without having seen the queue.
    sleeps: bool,
    is_closed: bool,
}

/// A request in the ring.
struct Slot {
    generation: u32,
    request: Option<Request>,
    /// Bytes transferred by earlier entries.
    done: usize,
    /// The list of memory that the entry names. It does not move while the slot has a request.
    scattered: Box<ScatterList>,
    /// When the kernel first interrupted the transfer since its last byte.
    given_back: Option<Instant>,
}

impl Uring {
    pub(crate) fn start(file: Arc<File>, arena: &Arc<Arena>, depth: u32) -> io::Result<Self> {
        Self::spawn(Driver::new(file, arena, depth)?)
    }

    fn spawn(driver: Driver) -> io::Result<Self> {
        let shared = Arc::clone(&driver.shared);
        let thread = std::thread::Builder::new()
            .name("disk-ring".into())
            .spawn(move || driver.run())?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }
}

impl Driver {
    fn new(file: Arc<File>, arena: &Arc<Arena>, depth: u32) -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_cqsize(depth.saturating_mul(2).next_power_of_two())
            .build(depth.next_power_of_two())?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Read::CODE,
            opcode::Readv::CODE,
            opcode::Write::CODE,
            opcode::Fsync::CODE,
        ];
        if needed.iter().any(|code| !probe.is_supported(*code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let whole = libc_iovec(arena);
        // SAFETY: the mapping outlives the ring: the thread keeps a reference to the arena.
        let registered = unsafe { ring.submitter().register_buffers(&whole) };
        let is_fixed = match registered {
            Ok(()) => true,
            Err(error) => {
                tracing::info!(%error, "I/O buffers are not registered (the limit of locked memory is low)");
                false
            }
        };
        let shared = Arc::new(Shared {
            file,
            queue: Mutex::default(),
            wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
            in_flight: AtomicUsize::new(0),
        });
        let mut driver = Self {
            ring,
            shared,
            arena: Arc::clone(arena),
            is_fixed,
            slots: Vec::new(),
            vacant: Vec::new(),
            again: VecDeque::new(),
            woken: Box::new(0),
            is_armed: false,
        };
        for number in 0..depth {
            driver.slots.push(Slot {
                generation: 0,
                request: None,
                done: 0,
                scattered: Box::default(),
                given_back: None,
            });
            driver.vacant.push(number);
        }
        Ok(driver)
    }
}

fn libc_iovec(arena: &Arc<Arena>) -> [libc::iovec; 1] {
    [libc::iovec {
        iov_base: arena.start().as_ptr().cast(),
        iov_len: arena.size(),
    }]
}

impl Shared {
    fn wake(&self) {
        // If the counter is full, the thread has already been woken.
        let _woken = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Engine for Uring {
    fn submit(&self, request: Request) {
        if let Err(error) = request.check(self.shared.file.size) {
            request.end(Err(error));
            return;
        }
        self.shared.in_flight.fetch_add(1, Ordering::AcqRel);
        let sleeps = {
            let mut queue = self.shared.queue.lock();
            queue.requests.push_back(request);
            std::mem::take(&mut queue.sleeps)
        };
        if sleeps {
            self.shared.wake();
        }
    }

    fn size(&self) -> u64 {
        self.shared.file.size
    }

    fn kind(&self) -> EngineKind {
        EngineKind::Uring
    }

    fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::Acquire)
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.shared.queue.lock().is_closed = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take()
            // A completion may drop the last reference on this thread.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the disk's thread panicked");
        }
    }
}

struct Driver {
    ring: IoUring,
    shared: Arc<Shared>,
    arena: Arc<Arena>,
    is_fixed: bool,
    slots: Vec<Slot>,
    vacant: Vec<u32>,
    /// Slots whose transfer continues after a partial one.
    again: VecDeque<u32>,
    /// The target of the reads of the wake-up event.
    woken: Box<u64>,
    /// Whether the ring has an entry that reads the wake-up event.
    is_armed: bool,
}

impl Driver {
    fn run(mut self) {
        // The time since which the kernel has refused every call.
        let mut refused: Option<Instant> = None;
        loop {
            self.arm();
            self.fill();
            let is_idle = self.vacant.len() == self.slots.len() && self.again.is_empty();
            {
                let mut queue = self.shared.queue.lock();
                if queue.is_closed && is_idle && queue.requests.is_empty() {
                    return;
                }
                // Requests that found no free slot wait for a completion, not for the event.
                queue.sleeps = queue.requests.is_empty();
                if !queue.requests.is_empty() && !self.vacant.is_empty() {
                    continue;
                }
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => refused = None,
                // A signal came, or the completion queue is full. The queue is read below.
                Err(error)
                    if matches!(
                        Errno::from_io_error(&error),
                        Some(Errno::INTR | Errno::BUSY | Errno::AGAIN)
                    ) => {}
                Err(error) => {
                    // The ring cannot be used otherwise: the memory of entries in progress must be kept.
                    if refused.is_none() {
                        tracing::error!(%error, "io_uring refuses all calls: the disk does nothing more");
                    }
                    let since = *refused.get_or_insert_with(Instant::now);
                    if self.shared.queue.lock().is_closed && since.elapsed() >= REFUSED {
                        self.reap();
                        return self.leave(Errno::from_io_error(&error).unwrap_or(Errno::IO));
                    }
                    std::thread::sleep(REFUSED_PAUSE);
                }
            }
            self.reap();
        }
    }

    /// Ends all requests with an error, and abandons the ring. No call tells when the kernel has finished
    /// with the memory that the entries name. So that memory is never freed.
    fn leave(mut self, errno: Errno) {
        tracing::error!(
            error = %io::Error::from(errno),
            "io_uring refuses all calls, and its disk is closed: the disk's lock and the memory of its \
             requests stay until the process ends"
        );
        let queued = std::mem::take(&mut self.shared.queue.lock().requests);
        let entered: Vec<Request> = self
            .slots
            .iter_mut()
            .filter_map(|slot| slot.request.take())
            .collect();
        let count = queued.len() + entered.len();
        self.shared.in_flight.fetch_sub(count, Ordering::AcqRel);
        let failed = || IoError::System(errno.into());
        for request in queued {
            request.end(Err(failed()));
        }
        for Request { op, done, .. } in entered {
            std::mem::forget(op);
            done(Completion {
                buffer: None,
                memory: None,
                result: Err(failed()),
            });
        }
        std::mem::forget(self);
    }

    fn arm(&mut self) {
        if self.is_armed {
            return;
        }
        let wake = types::Fd(self.shared.wake.as_raw_fd());
        let to: *mut u64 = &mut *self.woken;
        let entry = opcode::Read::new(wake, to.cast(), 8)
            .build()
            .user_data(WAKE);
        self.is_armed = self.push(&entry);
    }

    /// False when the submission queue is full.
    fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the entry's memory belongs to its slot, or to the driver, until the completion.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    fn fill(&mut self) {
        while let Some(number) = self.again.pop_front() {
            if !self.enter(number) {
                self.again.push_front(number);
                return;
            }
        }
        while let Some(number) = self.vacant.pop() {
            let Some(request) = self.shared.queue.lock().requests.pop_front() else {
                self.vacant.push(number);
                return;
            };
            if let Some(slot) = self.slots.get_mut(number as usize) {
                slot.request = Some(request);
                slot.done = 0;
                slot.given_back = None;
            }
            if !self.enter(number) {
                self.again.push_back(number);
                return;
            }
        }
    }

    /// Puts a slot's transfer, or the rest of it, into the submission queue.
    fn enter(&mut self, number: u32) -> bool {
        let Some(slot) = self.slots.get_mut(number as usize) else {
            return true;
        };
        let Some(request) = &mut slot.request else {
            return true;
        };
        let fd = types::Fd(self.shared.file.fd.as_raw_fd());
        let offset = request.offset + slot.done as u64;
        let tag = joined(slot.generation, number);
        let done = slot.done;
        let entry = match &mut request.op {
            Op::Read(buffer) => {
                let left = part(buffer.len(), done);
                let is_fixed = self.is_fixed && buffer.is_of(&self.arena);
                // SAFETY: `done` is below the buffer's length.
                let to = unsafe { buffer.address().add(done) };
                match is_fixed {
                    true => opcode::ReadFixed::new(fd, to, left, 0)
                        .offset(offset)
                        .build(),
                    false => opcode::Read::new(fd, to, left).offset(offset).build(),
                }
            }
            Op::ReadInto(buffer, memory) => {
                *slot.scattered = ScatterList::new(buffer, memory, done);
                let (list, count) = slot.scattered.list();
                opcode::Readv::new(fd, list, count).offset(offset).build()
            }
            Op::Write(buffer) => {
                let left = part(buffer.len(), done);
                let is_fixed = self.is_fixed && buffer.is_of(&self.arena);
                // SAFETY: `done` is below the buffer's length.
                let from = unsafe { buffer.address().add(done) };
                match is_fixed {
                    true => opcode::WriteFixed::new(fd, from, left, 0)
                        .offset(offset)
                        .build(),
                    false => opcode::Write::new(fd, from, left).offset(offset).build(),
                }
            }
            Op::Flush => opcode::Fsync::new(fd)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
        };
        self.push(&entry.user_data(tag))
    }

    fn reap(&mut self) {
        let ended: Vec<(u64, i32)> = {
            let queue = self.ring.completion();
            queue
                .map(|entry| (entry.user_data(), entry.result()))
                .collect()
        };
        let now = Instant::now();
        for (tag, result) in ended {
            if tag == WAKE {
                self.is_armed = false;
                continue;
            }
            let (generation, number) = split(tag);
            let Some(slot) = self.slots.get_mut(number as usize) else {
                continue;
            };
            if slot.generation != generation {
                tracing::error!(tag, "a completion without a request");
                continue;
            }
            let outcome = match slot.take(result, now) {
                Step::Again => {
                    self.again.push_back(number);
                    continue;
                }
                Step::Ended(outcome) => outcome,
            };
            slot.generation = slot.generation.wrapping_add(1) % (u32::MAX - 1);
            let request = slot.request.take();
            self.vacant.push(number);
            self.shared.in_flight.fetch_sub(1, Ordering::AcqRel);
            if let Some(request) = request {
                request.end(outcome);
            }
        }
    }
}

enum Step {
    /// The rest must still be transferred.
    Again,
    /// The request has ended.
    Ended(Result<(), IoError>),
}

impl Slot {
    /// Takes the result of an entry: a number of bytes, or a negative error number.
    fn take(&mut self, result: i32, now: Instant) -> Step {
        let Some(request) = &self.request else {
            return Step::Ended(Ok(()));
        };
        let bytes = match usize::try_from(result) {
            Ok(bytes) => bytes,
            Err(_) => {
                let errno = Errno::from_raw_os_error(-result);
                if matches!(errno, Errno::INTR | Errno::AGAIN) {
                    let since = *self.given_back.get_or_insert(now);
                    if now.duration_since(since) < GIVEN_BACK {
                        return Step::Again;
                    }
                }
                return Step::Ended(Err(errno.into()));
            }
        };
        let wanted = match &request.op {
            op @ (Op::Read(_) | Op::ReadInto(..) | Op::Write(_)) => Length(op.length()).as_usize(),
            Op::Flush => return Step::Ended(Ok(())),
        };
        self.done += bytes;
        self.given_back = None;
        if self.done >= wanted {
            return Step::Ended(Ok(()));
        }
        if bytes == 0 {
            return Step::Ended(Err(IoError::Short {
                wanted: wanted as u64,
                done: self.done as u64,
            }));
        }
        Step::Again
    }
}

/// The tag of a slot's entry: its generation and number.
fn joined(generation: u32, number: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(number)
}

fn split(tag: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = tag.to_le_bytes();
    let number = u32::from_le_bytes([a, b, c, d]);
    (u32::from_le_bytes([e, f, g, h]), number)
}

fn part(length: usize, done: usize) -> u32 {
    let left = (length - done).min(MOST_BYTES);
    u32::try_from(left).expect("invariant: a part has at most 1 GiB")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GRANULE;
    use kvpool_transport::memory::Region;
    use std::sync::mpsc;

    fn writing(arena: &Arc<Arena>) -> Slot {
        let request = Request {
            op: Op::Write(arena.take(2 * GRANULE).unwrap()),
            offset: 0,
            done: Box::new(|_| {}),
        };
        Slot {
            generation: 0,
            request: Some(request),
            done: 0,
            scattered: Box::default(),
            given_back: None,
        }
    }

    /// A result of the entry, `millis` after the start.
    fn step(slot: &mut Slot, start: Instant, millis: u64, result: i32) -> Step {
        slot.take(result, start + Duration::from_millis(millis))
    }

    #[test]
    fn a_write_that_is_given_back_without_end_fails() {
        let arena = Arena::new(1 << 20).unwrap();
        let (again, part) = (-libc::EAGAIN, i32::try_from(GRANULE).unwrap());
        let (mut slot, start) = (writing(&arena), Instant::now());
        // A byte restarts the time.
        for (millis, result) in [(0, again), (999, again), (1500, part), (1600, again)] {
            let step = step(&mut slot, start, millis, result);
            assert!(matches!(step, Step::Again), "{result} after {millis} ms");
        }
        assert!(matches!(step(&mut slot, start, 2599, again), Step::Again));
        let Step::Ended(Err(IoError::System(error))) = step(&mut slot, start, 2600, again) else {
            panic!("it goes on");
        };
        assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
    }

    #[test]
    fn a_ring_that_the_kernel_refuses_for_good_ends_with_its_requests() {
        const SIZE: u64 = 1 << 20;
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE).unwrap();
        let file = Arc::new(File {
            fd: file.into(),
            size: SIZE,
            is_direct: false,
        });
        let arena = Arena::new(1 << 20).unwrap();
        let driver = match Driver::new(file, &arena, 4) {
            Ok(driver) => driver,
            Err(error) => {
                eprintln!(
                    "SKIPPED a_ring_that_the_kernel_refuses_for_good_ends_with_its_requests: {error}"
                );
                return;
            }
        };
        let null = std::fs::File::open("/dev/null").unwrap();
        let (from, to) = (null.as_raw_fd(), driver.ring.as_raw_fd());
        // SAFETY: both descriptors are open. The ring uses the second one for calls alone, which now fail.
        let replaced = unsafe { libc::dup2(from, to) };
        assert_eq!(replaced, to);
        let engine = Uring::spawn(driver).unwrap();
        let (says, ended) = mpsc::channel();
        // The hook is there as long as the kernel may write to the memory.
        let hook = Arc::new(());
        let memory = Region::allocate(Length(GRANULE as u64)).whole();
        let ops = [
            Op::Write(arena.take(GRANULE).unwrap()),
            Op::ReadInto(arena.take(GRANULE).unwrap(), memory.with_hook(hook.clone())),
        ];
        for op in ops {
            let says = says.clone();
            engine.submit(Request {
                op,
                offset: 0,
                done: Box::new(move |completion| says.send(completion).unwrap()),
            });
        }
        let dropping = std::thread::spawn(move || drop(engine));
        for _ in 0..2 {
            let completion = ended.recv_timeout(Duration::from_secs(30));
            let completion = completion.expect("the drop waits for the kernel without end");
            assert!(matches!(completion.result, Err(IoError::System(_))));
            assert!(completion.buffer.is_none(), "the kernel may still use it");
            assert!(completion.memory.is_none(), "the kernel may still write it");
        }
        dropping.join().unwrap();
        assert_eq!(arena.free(), arena.size() - 2 * GRANULE);
        assert_eq!(Arc::strong_count(&hook), 2, "the memory is held");
    }
}
