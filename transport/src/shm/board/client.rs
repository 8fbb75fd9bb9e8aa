//! The client's side: claims slots and frees them.

use super::{BOARD_BYTES, CLAIMED, FREE, LAYOUT, PINNED, SLOTS, Words};
use crate::memory::{OwnProcess, Populate, Region, populate_step};
use kvpool_types::{Epoch, Extent, Length};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A mapped board, shared by all threads of a client.
#[derive(Debug)]
pub struct Pinner {
    pub(super) words: Words,
    /// The bytes pinned now.
    pinned: AtomicU64,
    allowance: Length,
    process: OwnProcess,
}

/// A pin that the node can see. Dropping it removes the pin.
#[derive(Debug)]
pub struct Pin {
    pinner: Arc<Pinner>,
    slot: usize,
    length: u64,
}

impl Pinner {
    /// Maps the board behind a descriptor.
    ///
    /// # Errors
    ///
    /// `InvalidData` when the layout is unknown, or the error of `mmap`.
    pub fn map(fd: BorrowedFd<'_>, size: Length) -> io::Result<Self> {
        let unknown =
            || io::Error::new(io::ErrorKind::InvalidData, "the board's layout is unknown");
        if size != BOARD_BYTES {
            return Err(unknown());
        }
        let region = Region::map(fd, size, true)?;
        let words = Words::new(&region).ok_or_else(unknown)?;
        if words.layout().load(Ordering::SeqCst) != LAYOUT {
            return Err(unknown());
        }
        // Populates the few pages in one step; otherwise the first pins take page faults.
        populate_step(&mut Populate::of(&region));
        Ok(Self {
            pinned: AtomicU64::new(0),
            allowance: Length(words.allowance().load(Ordering::SeqCst)),
            process: OwnProcess::mark()?,
            words,
        })
    }

    /// Pins an extent whose location was learnt in `epoch`. `None` when no slot is free, the
    /// allowance is used up, or pins of that epoch no longer count. Before it uses the bytes, the
    /// caller must check its lease *after* this returns.
    pub fn pin(self: &Arc<Self>, epoch: Epoch, extent: Extent) -> Option<Pin> {
        let pin = self.publish(extent)?;
        pin.counts(epoch).then_some(pin)
    }

    /// The first half of [`Pinner::pin`]: makes the pin visible to the node. The pin counts only
    /// once [`Pin::counts`] says so.
    pub fn publish(self: &Arc<Self>, extent: Extent) -> Option<Pin> {
        let length = extent.length.0;
        let before = self.pinned.fetch_add(length, Ordering::Relaxed);
        let allowed = before
            .checked_add(length)
            .is_some_and(|bytes| bytes <= self.allowance.0);
        let slot = if allowed { self.claim() } else { None };
        let Some(slot) = slot else {
            self.pinned.fetch_sub(length, Ordering::Relaxed);
            return None;
        };
        let pin = Pin {
            pinner: self.clone(),
            slot,
            length,
        };
        let words = self.words.slot(slot);
        words
            .segment
            .store(extent.segment.0.into(), Ordering::Relaxed);
        words.offset.store(extent.offset.0, Ordering::Relaxed);
        words.length.store(length, Ordering::Relaxed);
        // A node that sees the slot pinned also sees the extent, and a reach that covers the slot.
        self.words
            .reach()
            .fetch_max(slot as u64 + 1, Ordering::SeqCst);
        words.state.store(PINNED, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Some(pin)
    }

    /// Claims the lowest free slot, so that the node reads few slots.
    fn claim(&self) -> Option<usize> {
        (0..SLOTS).find(|slot| {
            let state = self.words.slot(*slot).state;
            state.load(Ordering::Relaxed) == FREE
                && state
                    .compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
        })
    }
}

impl Pin {
    /// Whether the node counts pins for locations of `epoch`. Must be called after the pin became
    /// visible.
    pub fn counts(&self, epoch: Epoch) -> bool {
        let generation = self.pinner.words.generation().load(Ordering::SeqCst);
        epoch != Epoch(super::CLOSED) && generation == epoch.0
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // A forked child has a copy of this value but not the board, which its parent still uses.
        if !self.pinner.process.is_current() {
            return;
        }
        let state = self.pinner.words.slot(self.slot).state;
        state.store(FREE, Ordering::Release);
        self.pinner.pinned.fetch_sub(self.length, Ordering::Relaxed);
    }
}
