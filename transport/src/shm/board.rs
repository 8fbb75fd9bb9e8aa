//! The pin board: a client pins an extent, and the node sees the pin, without a round trip.
//!
//! A board is a few pages of memory that a node creates for one connection and both sides map. The
//! client writes the extents that its views touch. The node reads the board when it decides whether
//! an extent may still be touched.
//!
//! ```text
//!  line 0    layout | generation | allowance | reach           64 bytes
//!  line 1    state  | segment    | offset    | length          slot 0
//!   ...                                                        64 bytes each, so that two threads
//!  line 255  state  | segment    | offset    | length          that pin share no cache line
//! ```
//!
//! | word | written by | meaning |
//! |---|---|---|
//! | layout | node, once | the version of the layout |
//! | generation | node | the epoch in which pins count; 0 when the board is closed |
//! | allowance | node, once | the most bytes that the client may pin here at once |
//! | reach | client, only up | the number of slots ever used: the node reads no more |
//! | state | client | free, claimed (being written or cleared), or pinned |
//! | other words of a slot | client, while it is claimed | the extent, as the master named it |
//!
//! Every word is 8 bytes, aligned, and only accessed as an atomic.
//!
//! # Why the node always sees a pin that counts
//!
//! ```text
//!  client                                        node
//!  P1  state := pinned                           N1  (new epoch, new incarnation, drain) generation := other
//!  P2  full fence                                N2  full fence
//!  P3  generation = the location's epoch?        N3  read all slots
//!      no: state := free, the pin failed
//!  P4  does the lease still run?
//!      no: state := free, the pin failed
//! ```
//!
//! *A change of the generation.* All full fences have one single order. If P2 comes before N2, the
//! read N3 sees the slot. If N2 comes first, the load P3 sees the new generation, and the pin
//! fails. So after N2, every later read sees each pin of an earlier generation, unless its client
//! has undone it. Epochs only grow, and the board of an ended incarnation stays closed. So no
//! generation returns.
//!
//! *A fence ticket within a generation.* The client reads the clock (P4) after P2. So a pin that
//! counts was visible to all processors while the lease ran. The master frees an extent only when
//! every lease on it has expired by the master's clock, which is later than by the client's. Only
//! then does it ask the node to fence the extent. The node reads the board after that, and sees the
//! slot until the client clears it. A client that is stopped between two steps changes nothing.
//! Before P1 it has no pin; after P1 its slot is visible. Whether it may use the bytes depends on
//! what it reads after it resumes.
//!
//! *A torn read.* The node does not read the words of a slot at one instant. If a slot is cleared
//! and reused meanwhile, the node may see an extent mixed from two. The earlier pin has ended. The
//! later pin was published after the read began, and the two arguments above cover it. A mixed
//! extent can at worst delay a ticket until the next read, milliseconds later.
//!
//! *A client that lies* can keep extents from being reused, just like a client that never removes a
//! pin at the node. Its pins are counted and reported, and end with its process. A pin outside
//! every segment has no effect.
//!
//! The client clears a slot with release order after the last use of the view. So a node that sees
//! the cleared slot comes after those uses.
//!
//! ADR 0009 says why this is safe.

// UNSAFETY: makes references to atomics in memory that another process maps too.
#![allow(unsafe_code, reason = "refers to atomics in shared memory")]

mod client;
mod node;

pub use client::{Pin, Pinner};
pub use node::Board;

use crate::memory::{Region, Slice};
use kvpool_types::{Length, Offset};
use std::sync::atomic::AtomicU64;

/// The most pins of one connection on its board.
pub const SLOTS: usize = 255;
/// The size of a board, in bytes.
pub const BOARD_BYTES: Length = Length(LINE * (SLOTS as u64 + 1));

/// The size of the head and of each slot, in bytes: one cache line.
const LINE: u64 = 64;
/// The layout word: "KVPBRD1" and the number of slots.
const LAYOUT: u64 = u64::from_le_bytes(*b"KVPBRD1\0") | (SLOTS as u64) << 56;
/// The generation of a closed board.
const CLOSED: u64 = 0;

const FREE: u64 = 0;
const CLAIMED: u64 = 1;
const PINNED: u64 = 2;

/// The words of a board, as mapped by either side.
#[derive(Debug)]
struct Words(Slice);

/// The words of one slot.
struct SlotWords<'a> {
    state: &'a AtomicU64,
    segment: &'a AtomicU64,
    offset: &'a AtomicU64,
    length: &'a AtomicU64,
}

impl Words {
    /// The words of a mapped board; `None` when the mapping is too short or read-only.
    fn new(region: &Region) -> Option<Self> {
        let usable = region.is_writable() && region.length() >= BOARD_BYTES;
        usable.then(|| Self(region.whole()))
    }

    fn layout(&self) -> &AtomicU64 {
        self.word(0, 0)
    }

    fn generation(&self) -> &AtomicU64 {
        self.word(0, 1)
    }

    fn allowance(&self) -> &AtomicU64 {
        self.word(0, 2)
    }

    fn reach(&self) -> &AtomicU64 {
        self.word(0, 3)
    }

    /// The slot with an index below [`SLOTS`].
    fn slot(&self, slot: usize) -> SlotWords<'_> {
        let line = slot as u64 + 1;
        SlotWords {
            state: self.word(line, 0),
            segment: self.word(line, 1),
            offset: self.word(line, 2),
            length: self.word(line, 3),
        }
    }

    fn word(&self, line: u64, word: u64) -> &AtomicU64 {
        let start = self.0.range(Offset(line * LINE + word * 8), Length(8));
        // SAFETY: the 8 bytes lie inside the region, as `range` has checked, and `self` keeps the
        // region alive. Mappings begin at a page, so words are aligned. Only this module has the
        // region, and it accesses the region in no other way. The compiler does not see the
        // accesses of other processes.
        unsafe { AtomicU64::from_ptr(start.cast()) }
    }
}

#[cfg(test)]
mod tests;
