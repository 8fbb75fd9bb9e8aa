//! An engine for tests that injects faults into another engine.

use crate::engine::{Completion, Engine, EngineKind, IoError, Op, Request};
use kvpool_types::Offset;
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A fault of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request fails with this error number. Nothing is transferred.
    Errno(i32),
    /// The request transfers only this many bytes, as if the device ended there.
    Short(u64),
    /// The request is served later by this time.
    Delay(Duration),
    /// One bit of a read is inverted. The number counts bits from the start of the range.
    Flip(u64),
    /// The request succeeds, but nothing is transferred.
    Lost,
    /// The request fails, and the kernel may still use its memory.
    Kept,
}

/// Faults for requests of one kind that touch a range.
#[derive(Clone, Debug)]
struct Rule {
    reads: bool,
    writes: bool,
    range: Range<u64>,
    /// The number of requests that the fault will still hit.
    left: u64,
    fault: Fault,
}

/// Another engine, with faults.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Engine>,
    rules: Mutex<Vec<Rule>>,
    late: Arc<Late>,
    thread: Option<JoinHandle<()>>,
}

impl Faulty {
    /// Wraps `inner`, without faults at first.
    pub fn new(inner: Arc<dyn Engine>) -> Self {
        let late = Arc::new(Late::default());
        let (engine, requests) = (Arc::clone(&inner), Arc::clone(&late));
        let thread = std::thread::spawn(move || requests.run(&*engine));
        Self {
            inner,
            rules: Mutex::default(),
            late,
            thread: Some(thread),
        }
    }

    /// Injects `fault` into the next `times` reads that touch `range`.
    pub fn on_reads(&self, range: Range<u64>, times: u64, fault: Fault) {
        self.add(true, false, range, times, fault);
    }

    /// Injects `fault` into the next `times` writes and flushes that touch `range`. A flush touches every range.
    pub fn on_writes(&self, range: Range<u64>, times: u64, fault: Fault) {
        self.add(false, true, range, times, fault);
    }

    /// Injects `fault` into every request from now on.
    pub fn on_all(&self, fault: Fault) {
        self.add(true, true, 0..u64::MAX, u64::MAX, fault);
    }

    /// Ends all faults.
    pub fn mend(&self) {
        self.rules.lock().clear();
    }

    fn add(&self, reads: bool, writes: bool, range: Range<u64>, left: u64, fault: Fault) {
        self.rules.lock().push(Rule {
            reads,
            writes,
            range,
            left,
            fault,
        });
    }

    fn fault_of(&self, request: &Request) -> Option<Fault> {
        let is_read = request.op.is_read();
        let is_flush = matches!(request.op, Op::Flush);
        let end = request.offset.saturating_add(request.op.length());
        let mut rules = self.rules.lock();
        let rule = rules.iter_mut().find(|rule| {
            let touches = is_flush || request.offset < rule.range.end && rule.range.start < end;
            rule.left > 0 && touches && if is_read { rule.reads } else { rule.writes }
        })?;
        rule.left -= 1;
        Some(rule.fault.clone())
    }
}

impl Engine for Faulty {
    fn submit(&self, mut request: Request) {
        if let Err(error) = request.check(self.inner.size()) {
            request.end(Err(error));
            return;
        }
        match self.fault_of(&request) {
            None => self.inner.submit(request),
            Some(Fault::Errno(number)) => {
                request.end(Err(Errno::from_raw_os_error(number).into()));
            }
            Some(Fault::Short(done)) => {
                let wanted = request.op.length();
                request.end(Err(IoError::Short { wanted, done }));
            }
            Some(Fault::Delay(by)) => self.late.push(Instant::now() + by, request),
            Some(Fault::Lost) => request.end(Ok(())),
            Some(Fault::Kept) => {
                let Request { op, done, .. } = request;
                std::mem::forget(op);
                done(Completion {
                    buffer: None,
                    memory: None,
                    result: Err(Errno::INVAL.into()),
                });
            }
            Some(Fault::Flip(bit)) => {
                let done = std::mem::replace(&mut request.done, Box::new(|_| {}));
                request.done = Box::new(move |mut completion: Completion| {
                    flip(&mut completion, bit);
                    done(completion);
                });
                self.inner.submit(request);
            }
        }
    }

    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn kind(&self) -> EngineKind {
        self.inner.kind()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.late.queue.lock().requests.len()
    }
}

/// Inverts one bit of the bytes that were read.
fn flip(read: &mut Completion, bit: u64) {
    let Some(buffer) = &mut read.buffer else {
        return;
    };
    let first = buffer.len() as u64;
    let rest = read.memory.as_ref().map_or(0, |memory| memory.length().0);
    let at = bit / 8 % (first + rest).max(1);
    let mask = 1 << (bit % 8);
    match &read.memory {
        Some(memory) if at >= first => {
            let (at, mut byte) = (Offset(at - first), [0]);
            memory.read_at(at, &mut byte);
            memory.write_at(at, &[byte[0] ^ mask]);
        }
        _ => {
            let at = usize::try_from(at).unwrap_or(0);
            if let Some(byte) = buffer.get_mut(at) {
                *byte ^= mask;
            }
        }
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.late.queue.lock().is_closed = true;
        self.late.wake.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic there has been printed, and the test fails by its own checks.
            let _ended = thread.join();
        }
    }
}

/// Requests that are delayed.
#[derive(Debug, Default)]
struct Late {
    queue: Mutex<LateQueue>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct LateQueue {
    requests: VecDeque<(Instant, Request)>,
    is_closed: bool,
}

impl Late {
    fn push(&self, at: Instant, request: Request) {
        self.queue.lock().requests.push_back((at, request));
        self.wake.notify_all();
    }

    /// Passes delayed requests on when their time has come, or when the engine ends.
    fn run(&self, engine: &dyn Engine) {
        let mut queue = self.queue.lock();
        loop {
            let now = Instant::now();
            let due = queue.requests.iter().map(|(at, _)| *at).min();
            match due {
                Some(at) if at <= now || queue.is_closed => {
                    let place = queue.requests.iter().position(|(other, _)| *other == at);
                    if let Some((_, request)) = place.and_then(|at| queue.requests.remove(at)) {
                        parking_lot::MutexGuard::unlocked(&mut queue, || engine.submit(request));
                    }
                }
                Some(at) => {
                    self.wake.wait_until(&mut queue, at);
                }
                None if queue.is_closed => return,
                None => self.wake.wait(&mut queue),
            }
        }
    }
}
