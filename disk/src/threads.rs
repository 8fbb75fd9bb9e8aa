//! The engine with threads and blocking calls, for hosts that do not permit io_uring.

use crate::engine::{Engine, EngineKind, IoError, Op, Request};
use crate::file::File;
use crate::scattered;
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

/// The most threads. More threads would only wait for each other on the device.
const MOST_THREADS: u32 = 16;

/// A pool of threads over one file.
#[derive(Debug)]
pub(crate) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    file: Arc<File>,
    queue: Mutex<Queue>,
    work: Condvar,
    in_flight: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<Request>,
    is_closed: bool,
}

impl Threads {
    pub(crate) fn start(file: Arc<File>, depth: u32) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            file,
            queue: Mutex::default(),
            work: Condvar::new(),
            in_flight: AtomicUsize::new(0),
        });
        let mut engine = Self {
            shared,
            threads: Vec::new(),
        };
        for number in 0..depth.min(MOST_THREADS) {
            let shared = Arc::clone(&engine.shared);
            let thread = std::thread::Builder::new().name(format!("disk-{number}"));
            engine.threads.push(thread.spawn(move || shared.run())?);
        }
        Ok(engine)
    }
}

impl Engine for Threads {
    fn submit(&self, request: Request) {
        if let Err(error) = request.check(self.shared.file.size) {
            request.end(Err(error));
            return;
        }
        self.shared.in_flight.fetch_add(1, Ordering::AcqRel);
        self.shared.queue.lock().requests.push_back(request);
        self.shared.work.notify_one();
    }

    fn size(&self) -> u64 {
        self.shared.file.size
    }

    fn kind(&self) -> EngineKind {
        EngineKind::Threads
    }

    fn in_flight(&self) -> usize {
        self.shared.in_flight.load(Ordering::Acquire)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.queue.lock().is_closed = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A completion may drop the last reference on one of these threads.
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::error!("a disk thread panicked");
            }
        }
    }
}

impl Shared {
    fn run(&self) {
        while let Some(mut request) = self.next() {
            let result = self.serve(&mut request);
            self.in_flight.fetch_sub(1, Ordering::AcqRel);
            request.end(result);
        }
    }

    fn next(&self) -> Option<Request> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(request) = queue.requests.pop_front() {
                return Some(request);
            }
            if queue.is_closed {
                return None;
            }
            self.work.wait(&mut queue);
        }
    }

    fn serve(&self, request: &mut Request) -> Result<(), IoError> {
        let (fd, offset) = (&self.file.fd, request.offset);
        match &mut request.op {
            Op::Read(buffer) => {
                let mut done = 0;
                whole(buffer.len(), |at| {
                    let part = buffer.get_mut(at..).unwrap_or_default();
                    done = rustix::io::pread(fd, part, offset + at as u64)?;
                    Ok(done)
                })
            }
            Op::ReadInto(buffer, memory) => {
                let length = buffer.len() + memory.length().as_usize();
                whole(length, |at| {
                    scattered::read(fd, offset, (&mut *buffer, &*memory), at)
                })
            }
            Op::Write(buffer) => whole(buffer.len(), |at| {
                let part = buffer.get(at..).unwrap_or_default();
                rustix::io::pwrite(fd, part, offset + at as u64)
            }),
            Op::Flush => repeat(|| rustix::fs::fdatasync(fd)).map_err(IoError::from),
        }
    }
}

fn repeat<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            outcome => return outcome,
        }
    }
}

/// Repeats a transfer until all bytes are transferred, since one call may transfer only a part.
fn whole(
    wanted: usize,
    mut transfer: impl FnMut(usize) -> Result<usize, Errno>,
) -> Result<(), IoError> {
    let mut done = 0;
    while done < wanted {
        match repeat(|| transfer(done))? {
            0 => {
                return Err(IoError::Short {
                    wanted: wanted as u64,
                    done: done as u64,
                });
            }
            bytes => done += bytes,
        }
    }
    Ok(())
}
