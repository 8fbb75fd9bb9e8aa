//! The node's side: says in which epoch pins count, and looks at them.

use super::{BOARD_BYTES, CLOSED, LAYOUT, PINNED, SLOTS, Words};
use crate::memory::create_small;
use kvpool_types::{Epoch, Extent, Length, Offset, SegmentId};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

/// One connection's board.
#[derive(Debug)]
pub struct Board(pub(super) Words);

impl Board {
    /// Makes a closed board whose client is to pin at most `allowance` bytes at once, and the
    /// descriptor that the client maps it by. Fails as making and mapping a memfd does.
    pub fn create(allowance: Length) -> io::Result<(Self, OwnedFd)> {
        let (fd, region) = create_small(BOARD_BYTES, "kvpool-board")?;
        let words = Words::new(&region).expect("invariant: the board was made long enough");
        words.layout().store(LAYOUT, Ordering::SeqCst);
        words.allowance().store(allowance.0, Ordering::SeqCst);
        Ok((Self(words), fd))
    }

    /// From now on pins count for locations of `epoch` alone. Every pin that was taken before for
    /// another one is seen by all later looks, or is undone by its maker.
    pub fn open(&self, epoch: Epoch) {
        self.0.generation().store(epoch.0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// From now on no pin succeeds. Those that there are stay until they are undone.
    pub fn close(&self) {
        self.open(Epoch(CLOSED));
    }

    /// Hands every pinned extent to `pinned`, as the client wrote it: it may be nonsense. Sees every
    /// pin that was in place before the call.
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
