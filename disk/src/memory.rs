//! A device in memory that records every write and flush. A test makes from them the states that a power cut
//! may leave.

use crate::engine::{Engine, EngineKind, IoError, Op, Request};
use parking_lot::Mutex;

/// A device in memory.
#[derive(Debug, Default)]
pub struct Memory {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    image: Vec<u8>,
    log: Vec<Event>,
}

/// A write or flush of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Bytes were written at an offset.
    Write(u64, Vec<u8>),
    /// Every write before this flush is durable.
    Flush,
}

impl Memory {
    /// A device of `size` zero bytes.
    pub fn new(size: usize) -> Self {
        Self::from_image(vec![0; size])
    }

    /// A device with these bytes.
    pub fn from_image(image: Vec<u8>) -> Self {
        let state = State {
            image,
            log: Vec::new(),
        };
        Self {
            state: Mutex::new(state),
        }
    }

    /// The present bytes.
    pub fn image(&self) -> Vec<u8> {
        self.state.lock().image.clone()
    }

    /// Every write and flush, in order.
    pub fn log(&self) -> Vec<Event> {
        self.state.lock().log.clone()
    }

    /// The number of writes and flushes.
    pub fn log_len(&self) -> usize {
        self.state.lock().log.len()
    }
}

impl Engine for Memory {
    fn submit(&self, mut request: Request) {
        let result = {
            let mut state = self.state.lock();
            let State { image, log } = &mut *state;
            request.check(image.len() as u64).and_then(|()| {
                let start = usize::try_from(request.offset).map_err(|_| IoError::OutOfRange)?;
                let length = usize::try_from(request.op.length());
                let end = start + length.map_err(|_| IoError::OutOfRange)?;
                match &mut request.op {
                    op @ (Op::Read(_) | Op::ReadInto(..)) => {
                        op.fill(image.get(start..end).ok_or(IoError::OutOfRange)?);
                    }
                    Op::Write(buffer) => {
                        let bytes = image.get_mut(start..end).ok_or(IoError::OutOfRange)?;
                        bytes.copy_from_slice(buffer);
                        log.push(Event::Write(request.offset, buffer.to_vec()));
                    }
                    Op::Flush => log.push(Event::Flush),
                }
                Ok(())
            })
        };
        request.end(result);
    }

    fn size(&self) -> u64 {
        self.state.lock().image.len() as u64
    }

    fn kind(&self) -> EngineKind {
        EngineKind::Memory
    }

    fn in_flight(&self) -> usize {
        0
    }
}
