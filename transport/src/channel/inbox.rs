//! What has come in over a channel, and who waits for it.

use crate::batch::unreachable;
use crate::frame::{ReceiveError, decode_header, failure};
use crate::link::TransferError;
use kvpool_types::wire::frame::{HEADER_BYTES, Header, MAX_META_BYTES, Op};
use kvpool_types::{Code, Epoch, Length};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::task::Waker;

/// The room that a channel starts with; more is taken while a larger answer comes in.
const ROOM: usize = 64 << 10;
/// The largest payload of an answer.
const MAX_PAYLOAD: u64 = 1 << 20;

/// One answer, which is not a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// What it is.
    pub op: Op,
    /// The epoch of the one who answered.
    pub epoch: Epoch,
    /// Its meta.
    pub meta: Vec<u8>,
    /// Its payload.
    pub payload: Vec<u8>,
}

type Answer = Result<Reply, TransferError>;

#[derive(Debug, Default)]
pub(super) struct Inbox {
    waiting: Mutex<Waiting>,
    incoming: Mutex<Incoming>,
}

#[derive(Debug, Default)]
struct Waiting {
    slots: HashMap<u64, Arc<Slot>>,
    failed: Option<TransferError>,
}

/// The place of one answer.
#[derive(Debug, Default)]
struct Slot(Mutex<SlotState>);

#[derive(Debug, Default)]
struct SlotState {
    answer: Option<Answer>,
    waker: Option<Waker>,
}

impl Slot {
    fn answer(&self, answer: Answer) {
        let waker = {
            let mut state = self.0.lock();
            state.answer.get_or_insert(answer);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Bytes that have come and are not a whole frame yet.
#[derive(Debug, Default)]
struct Incoming {
    buffer: Vec<u8>,
    /// The part of `buffer` that holds bytes.
    start: usize,
    end: usize,
}

impl Inbox {
    /// Why the channel has failed.
    pub(super) fn failure(&self) -> Option<TransferError> {
        self.waiting.lock().failed.clone()
    }

    /// Makes room for the answer to `request`.
    pub(super) fn register(&self, request: u64) -> Result<Waiter<'_>, TransferError> {
        let slot = Arc::new(Slot::default());
        let mut waiting = self.waiting.lock();
        if let Some(error) = &waiting.failed {
            return Err(error.clone());
        }
        waiting.slots.insert(request, slot.clone());
        drop(waiting);
        Ok(Waiter {
            inbox: self,
            request,
            slot,
        })
    }

    /// Fails all that wait and all that come.
    pub(super) fn fail(&self, error: TransferError) {
        let slots = {
            let mut waiting = self.waiting.lock();
            waiting.failed.get_or_insert(error.clone());
            std::mem::take(&mut waiting.slots)
        };
        for slot in slots.into_values() {
            slot.answer(Err(error.clone()));
        }
    }

    /// The turn to read, unless another has it.
    pub(super) fn try_read(&self) -> Option<Reader<'_>> {
        self.incoming.try_lock().map(|incoming| Reader {
            inbox: self,
            incoming,
        })
    }

    /// Has one of those that wait look for itself whether there is something to read.
    fn wake_one(&self) {
        let waker = self
            .waiting
            .lock()
            .slots
            .values()
            .find_map(|slot| slot.0.lock().waker.take());
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn deliver(&self, header: &Header, meta: &[u8], payload: &[u8]) -> Result<(), TransferError> {
        if header.op == Op::Failure && header.request == 0 {
            return Err(failure(meta));
        }
        // One that nobody waits for any more was given up.
        let slot = self.waiting.lock().slots.get(&header.request).cloned();
        if let Some(slot) = slot {
            slot.answer(if header.op == Op::Failure {
                Err(failure(meta))
            } else {
                Ok(Reply {
                    op: header.op,
                    epoch: header.epoch,
                    meta: meta.to_vec(),
                    payload: payload.to_vec(),
                })
            });
        }
        Ok(())
    }
}

/// One that waits for one answer. Dropping it gives the answer up.
pub(super) struct Waiter<'a> {
    inbox: &'a Inbox,
    request: u64,
    slot: Arc<Slot>,
}

impl Waiter<'_> {
    pub(super) fn take(&self) -> Option<Answer> {
        self.slot.0.lock().answer.take()
    }

    pub(super) fn is_answered(&self) -> bool {
        self.slot.0.lock().answer.is_some()
    }

    pub(super) fn wake_with(&self, waker: &Waker) {
        let mut state = self.slot.0.lock();
        match &mut state.waker {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let left = {
            let mut waiting = self.inbox.waiting.lock();
            waiting.slots.remove(&self.request);
            !waiting.slots.is_empty()
        };
        // It may have been the one that the driver would wake.
        if left {
            self.inbox.wake_one();
        }
    }
}

/// The one whose turn it is to read.
pub(super) struct Reader<'a> {
    inbox: &'a Inbox,
    incoming: MutexGuard<'a, Incoming>,
}

impl Reader<'_> {
    /// Reads once what is there, if anything, and hands out the answers that are whole.
    pub(super) fn receive(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> Result<(), TransferError> {
        match read(self.incoming.room()) {
            Ok(0) => return Err(unreachable("it was closed")),
            Ok(count) => self.incoming.end += count,
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                return Ok(());
            }
            Err(error) => return Err(unreachable(error)),
        }
        while let Some((header, frame)) = self.incoming.whole_frame()? {
            let meta_end = HEADER_BYTES + Length(header.meta.into()).as_usize();
            let bytes = self.incoming.buffer.get(frame.clone()).unwrap_or_default();
            let (head, payload) = bytes.split_at(meta_end);
            let meta = head.get(HEADER_BYTES..).unwrap_or_default();
            self.inbox.deliver(&header, meta, payload)?;
            self.incoming.start = frame.end;
        }
        Ok(())
    }
}

impl Incoming {
    /// Room to read into, for the rest of the frame that has begun at least.
    fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
            self.buffer.truncate(ROOM);
            self.buffer.shrink_to(ROOM);
        }
        let wanted = self.frame_bytes().unwrap_or(HEADER_BYTES);
        if self.buffer.len() - self.start < wanted {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let size = self.buffer.len().max(wanted).max(ROOM);
            self.buffer.resize(size, 0);
        }
        self.buffer.get_mut(self.end..).unwrap_or_default()
    }

    /// The size of the frame that has begun, when its header is there and good.
    fn frame_bytes(&self) -> Option<usize> {
        let (header, _) = self.buffer.get(self.start..self.end)?.split_first_chunk()?;
        let header = decode_header(header).ok()?;
        Some(total(&header))
    }

    /// The first frame and where it lies, once all of it is there.
    fn whole_frame(&self) -> Result<Option<(Header, std::ops::Range<usize>)>, TransferError> {
        let bytes = self.buffer.get(self.start..self.end).unwrap_or_default();
        let Some((head, _)) = bytes.split_first_chunk() else {
            return Ok(None);
        };
        let header = decode_header(head).map_err(|error| match error {
            ReceiveError::Decode { error, .. } => TransferError {
                code: error.code(),
                message: error.to_string(),
            },
            other => unreachable(other),
        })?;
        if header.payload > MAX_PAYLOAD || u64::from(header.meta) > MAX_META_BYTES {
            return Err(TransferError {
                code: Code::Malformed,
                message: format!("an answer of {} bytes was not asked for", header.payload),
            });
        }
        let total = total(&header);
        Ok((bytes.len() >= total).then(|| (header, self.start..self.start + total)))
    }
}

fn total(header: &Header) -> usize {
    HEADER_BYTES + Length(u64::from(header.meta) + header.payload.min(MAX_PAYLOAD)).as_usize()
}
