//! Divides ranges into the batches of a link: adjacent ranges are joined, and large ranges are cut.

use crate::memory::Slice;
use kvpool_types::{Extent, Length, Offset};
use std::ops::Range;

use super::host::MEMORY;

/// The largest joined run, in bytes: a larger batch gains nothing.
const RUN_BYTES: u64 = 64 << 20;
/// The most bytes that one connection moves as one operation. Several connections share a larger range. A
/// range that exceeds registered memory is found before its first byte is sent.
pub(super) const PIECE_BYTES: u64 = 16 << 20;

/// A move of bytes between this process's memory and a peer's.
#[derive(Clone, Debug)]
pub struct Move {
    /// The local memory.
    pub local: Slice,
    /// The first address in the peer's address space.
    pub remote: u64,
}

impl Move {
    /// The address after the last byte; `None` past the end of the address space.
    pub(super) fn end(&self) -> Option<u64> {
        self.remote.checked_add(self.local.length().0)
    }
}

/// A contiguous range of the peer's memory, and the local memory that goes with it.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) extent: Extent,
    pub(super) local: Vec<Slice>,
    /// The indices of the joined moves.
    pub(super) moves: Range<usize>,
}

/// A part of a run that is its own operation.
#[derive(Clone, Debug)]
pub(super) struct RunPiece {
    pub(super) extent: Extent,
    pub(super) local: Vec<Slice>,
}

fn extent(from: u64, length: u64) -> Extent {
    Extent {
        segment: MEMORY,
        offset: Offset(from),
        length: Length(length),
    }
}

/// Joins moves that are adjacent at the peer, and skips empty moves. The caller has checked that no
/// move exceeds the address space.
pub(super) fn joined(moves: &[Move]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (index, each) in moves.iter().enumerate() {
        let length = each.local.length().0;
        if length == 0 {
            continue;
        }
        if let Some(run) = runs.last_mut()
            && run.extent.end() == Some(Offset(each.remote))
            && run.extent.length.0 + length <= RUN_BYTES
        {
            run.extent.length.0 += length;
            run.local.push(each.local.clone());
            run.moves.end = index + 1;
            continue;
        }
        runs.push(single(index, each));
    }
    runs
}

/// A run of one move.
pub(super) fn single(index: usize, each: &Move) -> Run {
    Run {
        extent: extent(each.remote, each.local.length().0),
        local: vec![each.local.clone()],
        moves: index..index + 1,
    }
}

impl Run {
    /// Whether the run needs several pieces.
    pub(super) fn is_cut(&self) -> bool {
        self.extent.length.0 > PIECE_BYTES
    }

    /// Whether bytes may be copied into the local memory.
    pub(super) fn is_writable(&self) -> bool {
        self.local.iter().all(Slice::is_writable)
    }

    /// The run's pieces of at most `most` bytes, in order.
    pub(super) fn pieces(&self, most: u64) -> Vec<RunPiece> {
        let mut pieces = Vec::new();
        let mut open = RunPiece {
            extent: extent(self.extent.offset.0, 0),
            local: Vec::new(),
        };
        for slice in &self.local {
            let mut at = 0;
            while at < slice.length().0 {
                let room = most - open.extent.length.0;
                let taken = room.min(slice.length().0 - at);
                let part = slice.slice(Offset(at), Length(taken));
                open.local.extend(part);
                open.extent.length.0 += taken;
                at += taken;
                if open.extent.length.0 == most {
                    let next = open.extent.offset.0.saturating_add(most);
                    let full = std::mem::replace(
                        &mut open,
                        RunPiece {
                            extent: extent(next, 0),
                            local: Vec::new(),
                        },
                    );
                    pieces.push(full);
                }
            }
        }
        if open.extent.length.0 > 0 {
            pieces.push(open);
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Region, total_length};

    fn moves(of: &[(u64, u64)]) -> Vec<Move> {
        of.iter()
            .map(|(remote, length)| Move {
                local: Region::allocate(Length(*length)).whole(),
                remote: *remote,
            })
            .collect()
    }

    fn extents(runs: &[Run]) -> Vec<(u64, u64, Range<usize>)> {
        let of = |run: &Run| {
            assert_eq!(total_length(&run.local), run.extent.length);
            (run.extent.offset.0, run.extent.length.0, run.moves.clone())
        };
        runs.iter().map(of).collect()
    }

    #[test]
    fn neighbours_are_joined_and_others_are_not() {
        let runs = joined(&moves(&[
            (100, 10),
            (110, 5),
            (120, 1),
            (0, 0),
            (121, 1),
            (100, 1),
        ]));
        assert_eq!(
            extents(&runs),
            [(100, 15, 0..2), (120, 2, 2..5), (100, 1, 5..6)]
        );
    }

    #[test]
    fn the_pieces_of_a_run_are_all_of_it() {
        let of = moves(&[
            (4096, PIECE_BYTES / 2),
            (4096 + PIECE_BYTES / 2, 2 * PIECE_BYTES + 3),
        ]);
        let runs = joined(&of);
        let [run] = runs.as_slice() else {
            panic!("two neighbours are one run")
        };
        assert!(run.is_cut());
        let pieces = run.pieces(PIECE_BYTES);
        let mut next = 4096;
        for piece in &pieces {
            assert_eq!(piece.extent.offset.0, next);
            assert_eq!(total_length(&piece.local), piece.extent.length);
            next += piece.extent.length.0;
        }
        assert_eq!(next, 4096 + run.extent.length.0);
        assert_eq!(pieces.len(), 3);
    }
}
