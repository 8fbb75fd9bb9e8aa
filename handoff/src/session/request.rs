//! The caller's handles of one request, at decode and at prefill.

use super::HandoffError;
use super::agent::{Call, Event, SendingCall};
use super::handle::{TransferCell, TransferState, has_ended};
use super::memory::RankMemory;
use crate::room::{PageRectangle, RoomId, RoomTag};
use kvpool_types::Code;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::mpsc;

/// Decode's end of one request. Dropping it before the end of the request aborts the request.
#[derive(Debug)]
pub struct Receiving {
    tag: RoomTag,
    cell: Arc<TransferCell>,
    events: mpsc::UnboundedSender<Event>,
}

/// Prefill's end of one request. Dropping it before the end of the request aborts the request.
#[derive(Debug)]
pub struct Sending {
    room: RoomId,
    pages: u32,
    layers: Range<u32>,
    slot_bytes: u64,
    /// The pages times layers that the caller has named as computed.
    named: AtomicU64,
    cell: Arc<TransferCell>,
    events: mpsc::UnboundedSender<Event>,
}

impl Receiving {
    pub(super) const fn new(
        tag: RoomTag,
        cell: Arc<TransferCell>,
        events: mpsc::UnboundedSender<Event>,
    ) -> Self {
        Self { tag, cell, events }
    }

    /// The present state of the transfer.
    pub fn state(&self) -> TransferState {
        self.cell.get()
    }

    /// Waits until the transfer has ended and its pages are released, at most until `deadline`. Returns the
    /// state at that time.
    pub fn wait(&self, deadline: Instant) -> TransferState {
        self.cell.wait_for_end(deadline)
    }

    /// Aborts the request at all ends, with [`Code::Draining`], unless it has ended. Returns at once.
    pub fn abort(&self) {
        let call = Call::EndReceiving(self.tag, Code::Draining);
        // The session may have ended.
        drop(self.events.send(Event::Call(call)));
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if !has_ended(&self.cell.get()) {
            self.abort();
        }
    }
}

impl Sending {
    pub(super) fn new(
        (room, pages): (RoomId, u32),
        memory: &RankMemory,
        cell: Arc<TransferCell>,
        events: mpsc::UnboundedSender<Event>,
    ) -> Self {
        Self {
            room,
            pages,
            layers: memory.layers(),
            slot_bytes: memory.aux_layout().slot_bytes(),
            named: AtomicU64::new(0),
            cell,
            events,
        }
    }

    /// Counts all pages as named: the agent names the pages of an offer itself.
    pub(super) fn name_all(&self) {
        let all = u64::from(self.pages) * self.layers.len() as u64;
        self.named.store(all, Ordering::Relaxed);
    }

    /// The present state of the transfer.
    pub fn state(&self) -> TransferState {
        self.cell.get()
    }

    /// As [`Receiving::wait`].
    pub fn wait(&self, deadline: Instant) -> TransferState {
        self.cell.wait_for_end(deadline)
    }

    /// Names pages and layers of the request that are computed, so that they can be sent. Pages count from the
    /// request's first token, layers from the model's first layer. Name each page and layer once.
    ///
    /// # Errors
    ///
    /// [`HandoffError::OutOfRange`] for a page outside the request, a layer that this rank does not have, and an
    /// empty range. [`HandoffError::Closed`] after the end of the session.
    pub fn produced(&self, pages: Range<u32>, layers: Range<u32>) -> Result<(), HandoffError> {
        let is_inside = |inner: &Range<u32>, outer: &Range<u32>| {
            inner.start < inner.end && outer.start <= inner.start && inner.end <= outer.end
        };
        if !is_inside(&pages, &(0..self.pages)) || !is_inside(&layers, &self.layers) {
            return Err(HandoffError::OutOfRange(pages, layers));
        }
        let rectangle = PageRectangle { pages, layers };
        self.named.fetch_add(rectangle.cells(), Ordering::Relaxed);
        self.call(SendingCall::Produced(rectangle))
    }

    /// Ends the request once all pages are computed and [`Sending::produced`] has named each page and layer
    /// once. `aux` goes last, to a receiver that asks for the metadata. It is the start of the slot, and zeros
    /// follow. The session fills in the field of the room.
    ///
    /// # Errors
    ///
    /// [`HandoffError::NotComputed`] while pages or layers are not named, [`HandoffError::LongAux`] for more bytes
    /// than a slot has, [`HandoffError::Closed`] after the end of the session.
    pub fn finish(&self, aux: Vec<u8>) -> Result<(), HandoffError> {
        let all = u64::from(self.pages) * self.layers.len() as u64;
        let named = self.named.load(Ordering::Relaxed);
        if named != all {
            return Err(HandoffError::NotComputed { named, all });
        }
        if aux.len() as u64 > self.slot_bytes {
            return Err(HandoffError::LongAux(aux.len(), self.slot_bytes));
        }
        self.call(SendingCall::ProducedAll(aux))
    }

    /// Aborts the request at all ends, with [`Code::Draining`], unless it has ended. Returns at once.
    pub fn abort(&self) {
        // The session may have ended.
        drop(self.call(SendingCall::End(Code::Draining)));
    }

    /// The layers of this rank.
    pub fn layers(&self) -> Range<u32> {
        self.layers.clone()
    }

    /// The number of pages of the request.
    pub const fn pages(&self) -> u32 {
        self.pages
    }

    fn call(&self, call: SendingCall) -> Result<(), HandoffError> {
        let call = Call::OfSending(self.room, Arc::clone(&self.cell), call);
        let sent = self.events.send(Event::Call(call));
        sent.map_err(|_| HandoffError::Closed)
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.abort();
    }
}
