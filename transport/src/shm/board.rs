//! The pin board: how a client pins an extent, and the node sees it, without a round trip.
//!
//! A board is a few pages of memory that a node makes for one connection and both sides map. The
//! client writes there which extents its views touch; the node reads it whenever it decides whether
//! something still touches an extent.
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
//! | layout | node, once | which layout this is |
//! | generation | node | the epoch in which pins count; 0 when none do any more |
//! | allowance | node, once | the most bytes that the client pins here at once |
//! | reach | client, only up | how many slots were ever used: no more need be looked at |
//! | state | client | free, claimed (being written or cleared), or pinned |
//! | the rest of a slot | client, while it is claimed | the extent, as the master named it |
//!
//! Every word is 8 bytes, aligned, and only ever touched as an atomic.
//!
//! # Why a pin that counts is always seen
//!
//! ```text
//!  client                                        node
//!  P1  state := pinned                           N1  (new epoch, new life, drain) generation := other
//!  P2  full fence                                N2  full fence
//!  P3  generation = the location's epoch?        N3  look at all slots
//!      no: state := free, the pin failed
//!  P4  does the lease still run?
//!      no: state := free, the pin failed
//! ```
//!
//! *Against a change of the generation.* Of the two fences one is first, in the single order of all
//! such fences. If it is P2, the look N3 sees the slot. If it is N2, the load P3 sees the new
//! generation, and the pin fails. So once N2 is done, every pin of an earlier generation is seen by
//! every look or was undone by its own maker. Epochs only grow, and a board whose incarnation is over
//! stays closed, so no generation comes back.
//!
//! *Against a fence ticket within a generation.* The client reads the clock (P4) after P2, so a pin
//! that counts was visible to all processors while the lease ran. The master frees an extent only once
//! every lease on it is over by its own clock, which is later than by the client's, and only then
//! tells the node to fence it. The look that the node takes on being told comes after that, and sees
//! the slot for as long as it is not cleared. A client that is stopped between any two steps changes
//! nothing about this: before P1 it has no pin, after P1 its slot is there to see, and whether it may
//! use the bytes is decided by what it reads after it goes on.
//!
//! *A torn read.* The words of a slot are not read at once. If a slot is cleared and used again while
//! it is looked at, the node may see an extent that is made up of two. The pin before has ended, and
//! the pin after was published after the look began, for which the two arguments above hold. A made-up
//! extent can at worst hold a ticket up until the next look, which is milliseconds later.
//!
//! *A client that lies* can keep extents from being reused, as one can that never undoes a pin at the
//! node: what it holds is counted and reported, and ends with its process. What lies in no segment
//! pins nothing.
//!
//! The slot is cleared with release order after the last use of the view, so whoever sees it cleared
//! comes after those uses.
//!
//! ADR 0009 says why this is safe.

// UNSAFETY: makes references to atomics in memory that another process has mapped, too.
#![allow(unsafe_code, reason = "refers to atomics in shared memory")]

mod client;
mod node;

pub use client::{Pin, Pinner};
pub use node::Board;

use crate::memory::{Region, Slice};
use kvpool_types::{Length, Offset};
use std::sync::atomic::AtomicU64;

/// How many pins one connection can have at once on its board.
pub const SLOTS: usize = 255;
/// The bytes of a board.
pub const BOARD_BYTES: Length = Length(LINE * (SLOTS as u64 + 1));

/// The bytes of the head and of each slot: a cache line.
const LINE: u64 = 64;
/// What the layout word holds: "KVPBRD1" and the number of slots.
const LAYOUT: u64 = u64::from_le_bytes(*b"KVPBRD1\0") | (SLOTS as u64) << 56;
/// The generation of a board on which no pin counts.
const CLOSED: u64 = 0;

const FREE: u64 = 0;
const CLAIMED: u64 = 1;
const PINNED: u64 = 2;

/// The words of a board, as either side has mapped it.
#[derive(Debug)]
struct Words(Slice);

/// One slot's words.
struct SlotWords<'a> {
    state: &'a AtomicU64,
    segment: &'a AtomicU64,
    offset: &'a AtomicU64,
    length: &'a AtomicU64,
}

impl Words {
    /// The words of a mapped board; `None` when the mapping is too short or cannot be written.
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

    /// The slot of a number below [`SLOTS`].
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
        // SAFETY: the 8 bytes lie inside the region, as `range` has checked, and `self` keeps it.
        // Mappings begin at a page, so words are aligned. The region is known to this module alone,
        // which touches it in no other way, and what other processes do to it the compiler does not
        // know of.
        unsafe { AtomicU64::from_ptr(start.cast()) }
    }
}

#[cfg(test)]
mod tests;
