//! The client's side: takes slots and gives them back.

use super::{BOARD_BYTES, CLAIMED, FREE, LAYOUT, PINNED, SLOTS, Words};
use crate::memory::{Populate, Region, populate_step};
use kvpool_types::{Epoch, Extent, Length};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A board that a client pins on, with all its threads.
#[derive(Debug)]
pub struct Pinner {
    pub(super) words: Words,
    /// The bytes that are pinned now.
    pinned: AtomicU64,
    allowance: Length,
    /// The id of the process that mapped the board.
    process: u32,
}

/// A pin that the node can see. Dropping it undoes it.
#[derive(Debug)]
pub struct Pin {
    pinner: Arc<Pinner>,
    slot: usize,
    length: u64,
}

impl Pinner {
    /// Maps the board behind a descriptor. Fails with `InvalidData` when it is laid out in a way that
    /// is not known here, and as `mmap` does.
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
        // A few pages in one step; without it, the first pins fault.
        populate_step(&mut Populate::of(&region));
        Ok(Self {
            pinned: AtomicU64::new(0),
            allowance: Length(words.allowance().load(Ordering::SeqCst)),
            process: std::process::id(),
            words,
        })
    }

    /// Pins an extent whose location was learnt in `epoch`; `None` when no slot is free, the
    /// allowance is used up, or pins of that epoch count no more. Before the caller uses the bytes, it
    /// must ask whether its lease still runs, *after* this.
    pub fn pin(self: &Arc<Self>, epoch: Epoch, extent: Extent) -> Option<Pin> {
        let pin = self.publish(extent)?;
        pin.counts(epoch).then_some(pin)
    }

    /// The first half of [`Pinner::pin`]: shows the pin to the node. It does not count before
    /// [`Pin::counts`] says so.
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
        // Whoever sees the slot pinned sees the extent and that the reach covers it.
        self.words
            .reach()
            .fetch_max(slot as u64 + 1, Ordering::SeqCst);
        words.state.store(PINNED, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Some(pin)
    }

    /// The lowest free slot, so that the node has few to look at.
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
    /// Whether the node counts pins for locations of `epoch`: asked after the pin was shown to it.
    pub fn counts(&self, epoch: Epoch) -> bool {
        let generation = self.pinner.words.generation().load(Ordering::SeqCst);
        epoch != Epoch(super::CLOSED) && generation == epoch.0
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // A child made by fork has a copy of this value but not the board, and its parent still looks.
        if std::process::id() != self.pinner.process {
            return;
        }
        let state = self.pinner.words.slot(self.slot).state;
        state.store(FREE, Ordering::Release);
        self.pinner.pinned.fetch_sub(self.length, Ordering::Relaxed);
    }
}
