//! The answers that arrive over a channel, and the calls that wait for them.

use crate::frame::failure;
use crate::link::TransferError;
use crate::outcomes::unreachable;
use kvpool_types::Epoch;
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::frame::Op;
use kvpool_types::wire::incoming::{Frame, Incoming};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::task::Waker;

/// The largest payload of an answer, in bytes.
const MAX_PAYLOAD: u64 = 1 << 20;

/// An answer other than a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The operation.
    pub op: Op,
    /// The peer's epoch.
    pub epoch: Epoch,
    /// The meta part, encoded.
    pub meta: Vec<u8>,
    /// The payload.
    pub payload: Vec<u8>,
}

type Answer = Result<Reply, TransferError>;

#[derive(Debug)]
pub(super) struct Inbox {
    waiting: Mutex<WaitingCalls>,
    incoming: Mutex<Incoming>,
}

#[derive(Debug, Default)]
struct WaitingCalls {
    slots: HashMap<u64, Arc<Slot>>,
    failed: Option<TransferError>,
}

/// Holds one call's answer until the call takes it.
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

impl Default for Inbox {
    fn default() -> Self {
        Self {
            waiting: Mutex::default(),
            incoming: Mutex::new(Incoming::new(MAX_PAYLOAD)),
        }
    }
}

impl Inbox {
    /// The error that ended the channel, if it has ended.
    pub(super) fn failure(&self) -> Option<TransferError> {
        self.waiting.lock().failed.clone()
    }

    /// Registers a call before its request is sent.
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

    /// Fails all waiting and all later calls.
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

    /// Takes the role of the reader, unless another call has it.
    pub(super) fn try_read(&self) -> Option<ReaderRole<'_>> {
        self.incoming.try_lock().map(|incoming| ReaderRole {
            inbox: self,
            incoming,
        })
    }

    /// Wakes one waiting call, which then tries to become the reader.
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

    /// Wakes every waiting call. The call that is polled last becomes the reader.
    pub(super) fn wake_all(&self) {
        let slots: Vec<_> = self.waiting.lock().slots.values().cloned().collect();
        for slot in slots {
            // The waker is taken out, so that no reader passes the role to this call before it is polled
            // again.
            let waker = slot.0.lock().waker.take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    fn deliver(&self, frame: &Frame<'_>) -> Result<(), TransferError> {
        let Frame {
            header,
            meta,
            payload,
        } = *frame;
        if header.op == Op::Failure && header.request == 0 {
            return Err(failure(meta));
        }
        // A dropped call has no slot, and its answer is discarded.
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

/// A registered call. Dropping it gives up the answer.
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
        // The dropped call may have been the one that the driver would wake.
        if left {
            self.inbox.wake_one();
        }
    }
}

/// The role of the reader, held by one call at a time.
pub(super) struct ReaderRole<'a> {
    inbox: &'a Inbox,
    incoming: MutexGuard<'a, Incoming>,
}

impl ReaderRole<'_> {
    /// Reads once without waiting, and delivers every complete answer.
    pub(super) fn receive(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> Result<(), TransferError> {
        match read(self.incoming.room()) {
            Ok(0) => return Err(unreachable("the peer closed the connection")),
            Ok(count) => self.incoming.filled(count),
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
        let malformed = |error: DecodeError| TransferError {
            code: error.code(),
            message: error.to_string(),
        };
        while let Some(frame) = self.incoming.next_frame().map_err(malformed)? {
            self.inbox.deliver(&frame)?;
        }
        Ok(())
    }
}
