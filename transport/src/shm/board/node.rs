//! The node's side: sets the epoch in which pins count, and reads the pins.

use super::{BOARD_BYTES, CLOSED, LAYOUT, PINNED, SLOTS, Words};
use crate::memory::create_small;
use kvpool_types::{Epoch, Extent, Length, Offset, SegmentId};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

/// The board of one connection.
#[derive(Debug)]
pub struct Board(pub(super) Words);

impl Board {
    /// Creates a closed board for a client that may pin at most `allowance` bytes at once, and the
    /// descriptor to map it by.
    ///
    /// # Errors
    ///
    /// The error of creating or mapping the memfd.
    pub fn create(allowance: Length) -> io::Result<(Self, OwnedFd)> {
        let (fd, region) = create_small(BOARD_BYTES, "kvpool-board")?;
        let words = Words::new(&region).expect("invariant: the board was made long enough");
        words.layout().store(LAYOUT, Ordering::SeqCst);
        words.allowance().store(allowance.0, Ordering::SeqCst);
        Ok((Self(words), fd))
    }

    /// Makes pins count for locations of `epoch` alone. All later calls of [`Board::look`] see
    /// every earlier pin for another epoch, unless its client has removed it.
    pub fn open(&self, epoch: Epoch) {
        self.0.generation().store(epoch.0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Makes every new pin fail. Existing pins stay until the client removes them.
    pub fn close(&self) {
        self.open(Epoch(CLOSED));
    }

    /// Passes every pinned extent to `pinned`, as the client wrote it: the extent may be invalid.
    /// Sees every pin that was in place before the call.
    pub fn look(&self, mut pinned: impl FnMut(Extent)) {
        fence(Ordering::SeqCst);
        let reach = self.0.reach().load(Ordering::SeqCst);
        let reach = usize::try_from(reach).unwrap_or(SLOTS).min(SLOTS);
        for slot in 0..reach {
            let slot = self.0.slot(slot);
            if slot.state.load(Ordering::SeqCst) != PINNED {
                continue;
            }
            let Ok(segment) = u32::try_from(slot.segment.load(Ordering::Relaxed)) else {
                continue;
            };
            pinned(Extent {
                segment: SegmentId(segment),
                offset: Offset(slot.offset.load(Ordering::Relaxed)),
                length: Length(slot.length.load(Ordering::Relaxed)),
            });
        }
    }
}
