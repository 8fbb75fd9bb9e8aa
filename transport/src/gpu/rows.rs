//! Pieces of device memory that one call of the driver copies.

use super::DeviceRange;
use kvpool_types::{Length, Offset};

/// The largest distance of two rows that the driver copies together, in bytes.
const MAX_PITCH: u64 = (1 << 31) - 1;

/// Equal pieces at equal distances, such as a block's bytes in each layer of a cache. One copy moves them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    /// The address of the first piece.
    pub(super) address: u64,
    /// The distance from one piece to the next; not less than `width`.
    pub(super) pitch: u64,
    /// The bytes of one piece.
    pub(super) width: u64,
    /// The number of pieces.
    pub(super) height: u64,
    /// Where the first piece's bytes lie in the block.
    pub(super) from: Offset,
}

impl Rows {
    const fn one(piece: DeviceRange, from: Offset) -> Self {
        Self {
            address: piece.address,
            pitch: piece.length.0,
            width: piece.length.0,
            height: 1,
            from,
        }
    }

    /// The bytes of all pieces.
    pub(super) const fn length(&self) -> Length {
        Length(self.width * self.height)
    }

    /// These rows and one more piece, if the piece continues them.
    fn and(self, piece: DeviceRange) -> Option<Self> {
        let last = self.address + (self.height - 1) * self.pitch;
        let pitch = piece.address.checked_sub(last)?;
        let fits = piece.length.0 == self.width
            && (self.width..=MAX_PITCH).contains(&pitch)
            && (self.height == 1 || pitch == self.pitch);
        fits.then_some(Self {
            pitch,
            height: self.height + 1,
            ..self
        })
    }
}

/// The first `length` bytes of the pieces, in order, as the fewest rows. All rows lie inside one allocation:
/// `allocation_end` returns the end of an address's allocation.
pub(super) fn rows(
    pieces: &[DeviceRange],
    length: Length,
    mut allocation_end: impl FnMut(u64) -> u64,
) -> Vec<Rows> {
    let mut all: Vec<Rows> = Vec::new();
    // The end of the allocation of the last rows, asked for once they could have a second piece.
    let mut end: Option<u64> = None;
    let mut from = 0;
    for piece in pieces {
        let piece = DeviceRange {
            length: Length(piece.length.0.min(length.0 - from)),
            ..*piece
        };
        if piece.length.0 == 0 {
            continue;
        }
        let joined = all.last().and_then(|last| {
            let joined = last.and(piece)?;
            let end = *end.get_or_insert_with(|| allocation_end(last.address));
            (piece.address + piece.length.0 <= end).then_some(joined)
        });
        match (joined, all.last_mut()) {
            (Some(joined), Some(last)) => *last = joined,
            _ => {
                end = None;
                all.push(Rows::one(piece, Offset(from)));
            }
        }
        from += piece.length.0;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(list: &[(u64, u64)]) -> Vec<DeviceRange> {
        let piece = |&(address, length)| DeviceRange {
            address,
            length: Length(length),
        };
        list.iter().map(piece).collect()
    }

    /// The rows as (address, pitch, width, height, from), in one allocation up to `end`.
    fn found(list: &[(u64, u64)], length: u64, end: u64) -> Vec<(u64, u64, u64, u64, u64)> {
        let rows = rows(&pieces(list), Length(length), |_| end);
        let rows = rows.iter();
        rows.map(|row| (row.address, row.pitch, row.width, row.height, row.from.0))
            .collect()
    }

    #[test]
    fn equal_pieces_at_equal_distances_are_one_copy() {
        let layers = [(1000, 16), (2000, 16), (3000, 16)];
        assert_eq!(found(&layers, 48, u64::MAX), [(1000, 1000, 16, 3, 0)]);
        // Pieces that touch are rows too.
        assert_eq!(found(&[(0, 8), (8, 8)], 16, 16), [(0, 8, 8, 2, 0)]);
    }

    #[test]
    fn other_lengths_distances_and_orders_are_copies_of_their_own() {
        let list = [(100, 8), (200, 8), (350, 8), (500, 8), (450, 8), (600, 9)];
        let expected = [
            (100, 100, 8, 2, 0),
            (350, 150, 8, 2, 16),
            (450, 8, 8, 1, 32),
            (600, 9, 9, 1, 40),
        ];
        assert_eq!(found(&list, 49, u64::MAX), expected);
        // The second overlaps the first.
        let overlap = [(100, 8), (104, 8)];
        assert_eq!(found(&overlap, 16, u64::MAX).len(), 2);
        let far = [(0, 8), (MAX_PITCH + 1, 8)];
        assert_eq!(found(&far, 16, u64::MAX).len(), 2);
    }

    #[test]
    fn a_block_that_is_shorter_than_its_pieces_ends_inside_one() {
        let layers = [(1000, 16), (2000, 16), (3000, 16), (4000, 16)];
        let expected = [(1000, 1000, 16, 2, 0), (3000, 3, 3, 1, 32)];
        assert_eq!(found(&layers, 35, u64::MAX), expected);
        assert_eq!(found(&layers, 0, u64::MAX), []);
    }

    #[test]
    fn rows_end_with_their_allocation() {
        let layers = [(1000, 16), (2000, 16), (3000, 16), (4000, 16)];
        let expected = [
            (1000, 1000, 16, 2, 0),
            (3000, 16, 16, 1, 32),
            (4000, 16, 16, 1, 48),
        ];
        // All asked-for allocations end at 2016; the later pieces lie in others.
        assert_eq!(found(&layers, 64, 2016), expected);
        assert_eq!(found(&layers, 64, 2015).len(), 4);
    }
}
