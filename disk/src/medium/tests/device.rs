//! A device in memory that a test can damage, fail, or delay. It keeps no log.

use crate::{Completion, Engine, EngineKind, IoError, Op, Request};
use parking_lot::Mutex;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The device. It answers on the thread that submits.
#[derive(Debug)]
pub(super) struct Device {
    bytes: Mutex<Vec<u8>>,
    /// The bytes that cannot be read or written.
    pub(super) bad: Mutex<Vec<u64>>,
    /// The bytes that can be read but not written.
    pub(super) stuck: Mutex<Vec<u64>>,
    pub(super) flush_fails: AtomicBool,
    /// Whether requests wait in `held`.
    pub(super) holds: AtomicBool,
    pub(super) held: Mutex<Vec<Held>>,
    /// The offsets of all writes.
    pub(super) written: Mutex<Vec<u64>>,
}

/// A request that waits.
pub(super) struct Held(pub(super) Request);

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Held")
    }
}

impl Device {
    /// A device with these bytes.
    pub(super) fn new(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self {
            bytes: Mutex::new(bytes),
            bad: Mutex::default(),
            stuck: Mutex::default(),
            flush_fails: AtomicBool::new(false),
            holds: AtomicBool::new(false),
            held: Mutex::default(),
            written: Mutex::default(),
        })
    }

    /// A device of zeros.
    pub(super) fn blank(size: u64) -> Arc<Self> {
        Self::new(vec![0; usize::try_from(size).unwrap()])
    }

    fn range(&self, offset: u64, length: usize) -> Result<Range<usize>, IoError> {
        let range = offset..offset + length as u64;
        if self.bad.lock().iter().any(|bad| range.contains(bad)) {
            return Err(IoError::Medium(io::Error::other("bad sector")));
        }
        if range.end > self.size() {
            return Err(IoError::OutOfRange);
        }
        let start = usize::try_from(offset).unwrap();
        Ok(start..start + length)
    }
}

impl Engine for Device {
    fn submit(&self, request: Request) {
        if self.holds.load(Ordering::SeqCst) {
            self.held.lock().push(Held(request));
            return;
        }
        let Request {
            mut op,
            offset,
            done,
        } = request;
        let result = match &mut op {
            Op::Read(_) | Op::ReadInto(..) => {
                let range = self.range(offset, usize::try_from(op.length()).unwrap());
                range.map(|range| op.fill(&self.bytes.lock()[range]))
            }
            Op::Write(buffer) => {
                self.written.lock().push(offset);
                let range = self.range(offset, buffer.len()).and_then(|range| {
                    let is_stuck = |at: &u64| range.contains(&usize::try_from(*at).unwrap());
                    match self.stuck.lock().iter().any(is_stuck) {
                        true => Err(IoError::Medium(io::Error::other("write protected"))),
                        false => Ok(range),
                    }
                });
                range.map(|range| self.bytes.lock()[range].copy_from_slice(buffer))
            }
            Op::Flush if self.flush_fails.load(Ordering::SeqCst) => {
                Err(IoError::Medium(io::Error::other("the flush failed")))
            }
            Op::Flush => Ok(()),
        };
        done(Completion::of(op, result));
    }

    fn size(&self) -> u64 {
        self.bytes.lock().len() as u64
    }

    fn kind(&self) -> EngineKind {
        EngineKind::Memory
    }

    fn in_flight(&self) -> usize {
        self.held.lock().len()
    }
}
