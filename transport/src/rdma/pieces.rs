//! Divides a batch into pieces that are moved and summed separately. Combines the outcomes of the pieces into
//! those of the blocks.
//!
//! A block that is moved as a whole is summed before its first byte is sent, or after its last byte has
//! arrived. Meanwhile either the network or the processor is idle. With pieces, one piece moves while another
//! is summed.

use crate::link::TransferError;
use crate::memory::Slice;
use kvpool_types::{CHUNK, Extent, Length, Offset};
use parking_lot::Mutex;
use std::sync::Arc;

/// The most bytes of a piece. Posting a piece costs far less than moving it, and the last piece is
/// short to wait for. A multiple of the chunk size, so the checksums of a block's chunks are those
/// of its pieces.
pub(super) const PIECE_BYTES: u64 = 16 * CHUNK;

/// One transfer of a batch.
pub(super) struct PieceItem<T> {
    /// The index in the batch.
    pub(super) number: usize,
    /// Stays with the item until the item has ended.
    pub(super) tag: T,
    /// The range at the node.
    pub(super) range: Extent,
    /// The local memory, of the same length.
    pub(super) memory: Vec<Slice>,
}

/// A part of an item's memory, and the slice that contains it. The slice is registered as a whole.
pub(super) struct RegisteredPart {
    pub(super) of: Slice,
    pub(super) slice: Slice,
}

/// A range of an item.
pub(super) struct Piece<T, S> {
    pub(super) range: Extent,
    pub(super) memory: Vec<RegisteredPart>,
    pub(super) slot: PieceSlot<T, S>,
}

/// The position of a piece's outcome.
pub(super) struct PieceSlot<T, S> {
    pub(super) whole: Arc<CutItem<T, S>>,
    number: usize,
}

/// An item in pieces. Each piece ends with a sum or an error.
pub(super) struct CutItem<T, S> {
    /// The index in the batch.
    pub(super) number: usize,
    pub(super) tag: T,
    pub(super) length: Length,
    state: Mutex<CutState<S>>,
}

struct CutState<S> {
    /// The number of pieces that have not ended.
    left: usize,
    sums: Vec<Option<S>>,
    failed: Option<TransferError>,
}

/// Cuts the items of a batch into pieces on demand, in order.
pub(super) struct Cutter<T, S> {
    items: std::vec::IntoIter<PieceItem<T>>,
    open: Option<Remainder<T, S>>,
}

/// The part of an item that has not been cut yet.
struct Remainder<T, S> {
    whole: Arc<CutItem<T, S>>,
    next: usize,
    range: Extent,
    memory: std::iter::Peekable<std::vec::IntoIter<Slice>>,
    /// The bytes of the first slice that are used up.
    gone: u64,
}

impl<T, S> Cutter<T, S> {
    pub(super) fn new(items: Vec<PieceItem<T>>) -> Self {
        Self {
            items: items.into_iter(),
            open: None,
        }
    }

    /// Whether all items are cut.
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_none() && self.items.len() == 0
    }

    /// The next pieces; small neighbours are grouped. Empty when nothing is left. `begin` is called before an
    /// item's first piece, and may skip the item.
    pub(super) fn next_group(
        &mut self,
        mut begin: impl FnMut(&mut PieceItem<T>) -> bool,
    ) -> Vec<Piece<T, S>> {
        let mut group = Vec::new();
        let mut bytes = 0;
        while bytes < PIECE_BYTES {
            let mut begun = || {
                self.items
                    .by_ref()
                    .find_map(|mut item| begin(&mut item).then_some(item))
            };
            let Some(mut rest) = self.open.take().or_else(|| begun().map(Remainder::of)) else {
                break;
            };
            let piece = rest.cut();
            bytes += piece.range.length.0;
            group.push(piece);
            // A fully cut item's memory is released here, not with the batch.
            self.open = (rest.range.length > Length(0)).then_some(rest);
        }
        group
    }
}

impl<T, S> Remainder<T, S> {
    fn of(item: PieceItem<T>) -> Self {
        let length = item.range.length;
        let pieces = Length(length.0.div_ceil(PIECE_BYTES)).as_usize();
        Self {
            whole: Arc::new(CutItem {
                number: item.number,
                tag: item.tag,
                length,
                state: Mutex::new(CutState {
                    left: pieces,
                    sums: (0..pieces).map(|_| None).collect(),
                    failed: None,
                }),
            }),
            next: 0,
            range: item.range,
            memory: item.memory.into_iter().peekable(),
            gone: 0,
        }
    }

    fn cut(&mut self) -> Piece<T, S> {
        let length = self.range.length.0.min(PIECE_BYTES);
        let mut memory = Vec::new();
        let mut left = length;
        while left > 0 {
            let slice = self
                .memory
                .peek()
                .expect("invariant: both sides of a transfer have one length");
            let here = slice.length().0 - self.gone;
            let taken = left.min(here);
            let part = slice
                .slice(Offset(self.gone), Length(taken))
                .expect("invariant: a part of what is left of the slice");
            if taken > 0 {
                memory.push(RegisteredPart {
                    of: slice.clone(),
                    slice: part,
                });
            }
            left -= taken;
            self.gone += taken;
            if taken == here {
                self.memory.next();
                self.gone = 0;
            }
        }
        let range = Extent {
            length: Length(length),
            ..self.range
        };
        self.range.offset = Offset(self.range.offset.0.saturating_add(length));
        self.range.length = Length(self.range.length.0 - length);
        let number = self.next;
        self.next += 1;
        Piece {
            range,
            memory,
            slot: PieceSlot {
                whole: self.whole.clone(),
                number,
            },
        }
    }
}

impl<T, S> PieceSlot<T, S> {
    /// Records the outcome of the piece. For the last piece of an item, returns the sums of all
    /// pieces, in order, or the first error.
    pub(super) fn ended(&self, outcome: Result<S, TransferError>) -> Option<Outcome<S>> {
        let mut state = self.whole.state.lock();
        match outcome {
            Ok(sum) => {
                if let Some(slot) = state.sums.get_mut(self.number) {
                    *slot = Some(sum);
                }
            }
            Err(error) => {
                state.failed.get_or_insert(error);
            }
        }
        state.left -= 1;
        if state.left > 0 {
            return None;
        }
        Some(match state.failed.take() {
            Some(error) => Err(error),
            None => Ok(state.sums.drain(..).flatten().collect()),
        })
    }
}

/// The outcome of an item.
pub(super) type Outcome<S> = Result<Vec<S>, TransferError>;

#[cfg(test)]
mod tests;
