use super::*;
use crate::memory::{Region, total_length};
use kvpool_types::SegmentId;
use proptest::prelude::*;

fn item(number: usize, from: u64, lengths: &[u64]) -> PieceItem<()> {
    let memory: Vec<Slice> = lengths
        .iter()
        .map(|length| Region::allocate(Length(*length)).whole())
        .collect();
    PieceItem {
        number,
        tag: (),
        range: Extent {
            segment: SegmentId(1),
            offset: Offset(from),
            length: total_length(&memory),
        },
        memory,
    }
}

fn groups(items: Vec<PieceItem<()>>) -> Vec<Vec<Piece<(), u64>>> {
    let mut cutter = Cutter::new(items);
    let mut groups = Vec::new();
    while !cutter.is_empty() {
        groups.push(cutter.next_group(|_| true));
    }
    assert!(cutter.next_group(|_| true).is_empty());
    groups
}

fn lengths(groups: &[Vec<Piece<(), u64>>]) -> Vec<Vec<u64>> {
    let of_group = |group: &Vec<Piece<(), u64>>| group.iter().map(|p| p.range.length.0).collect();
    groups.iter().map(of_group).collect()
}

#[test]
fn large_blocks_are_cut_and_small_neighbours_go_together() {
    let mib = PIECE_BYTES;
    let items = [2 * mib + 5, 3, mib, mib / 2, mib / 2, 7];
    let items = items.iter().enumerate();
    let groups = groups(items.map(|(n, length)| item(n, 0, &[*length])).collect());
    assert_eq!(
        lengths(&groups),
        [
            vec![mib],
            vec![mib],
            vec![5, 3, mib],
            vec![mib / 2, mib / 2],
            vec![7]
        ]
    );
}

#[test]
fn an_ended_item_is_skipped_and_its_neighbours_are_not() {
    let items = (0..4).map(|number| item(number, 0, &[10])).collect();
    let mut cutter: Cutter<(), u64> = Cutter::new(items);
    let group = cutter.next_group(|item| item.number % 2 == 1);
    let numbers: Vec<usize> = group.iter().map(|p| p.slot.whole.number).collect();
    assert_eq!(numbers, [1, 3]);
    assert!(cutter.is_empty());
}

#[test]
fn memory_is_released_with_its_pieces() {
    let whole = item(0, 0, &[PIECE_BYTES + 1]);
    let memory = whole.memory[0].region().downgrade();
    let mut cutter: Cutter<(), u64> = Cutter::new(vec![whole]);
    let first = cutter.next_group(|_| true);
    let second = cutter.next_group(|_| true);
    drop(first);
    assert!(memory.is_alive());
    drop(second);
    assert!(!memory.is_alive());
}

fn error(message: &str) -> TransferError {
    TransferError {
        code: kvpool_types::Code::Unreachable,
        message: message.to_owned(),
    }
}

#[test]
fn a_block_ends_with_its_last_piece_and_with_the_sums_in_order() {
    let pieces: Vec<_> = groups(vec![item(0, 0, &[3 * PIECE_BYTES])])
        .into_iter()
        .flatten()
        .collect();
    assert_eq!(pieces[2].slot.ended(Ok(2)), None);
    assert_eq!(pieces[0].slot.ended(Ok(0)), None);
    assert_eq!(pieces[1].slot.ended(Ok(1)), Some(Ok(vec![0, 1, 2])));
}

/// A failed item's memory may be in use until the last of its pieces has ended.
#[test]
fn a_failed_block_ends_with_its_last_piece_too() {
    let pieces: Vec<_> = groups(vec![item(0, 0, &[3 * PIECE_BYTES])])
        .into_iter()
        .flatten()
        .collect();
    assert_eq!(pieces[1].slot.ended(Err(error("first"))), None);
    assert_eq!(pieces[0].slot.ended(Err(error("second"))), None);
    assert_eq!(pieces[2].slot.ended(Ok(2)), Some(Err(error("first"))));
}

proptest! {
    #[test]
    fn pieces_cover_every_byte_of_both_sides_once_and_in_order(
        items in prop::collection::vec(prop::collection::vec(0_u64..3 * PIECE_BYTES, 1..5), 1..5)
    ) {
        // Items are never empty, like the reads and writes of a link.
        let items: Vec<Vec<u64>> = items
            .into_iter()
            .map(|mut slices| { slices[0] += 1; slices })
            .collect();
        let made: Vec<PieceItem<()>> = items
            .iter()
            .enumerate()
            .map(|(number, slices)| item(number, 1000 * number as u64, slices))
            .collect();
        let memory: Vec<Vec<Slice>> = made.iter().map(|item| item.memory.clone()).collect();
        let mut next = vec![0_u64; items.len()];
        for piece in groups(made).into_iter().flatten() {
            let number = piece.slot.whole.number;
            let (range, done) = (piece.range, next[number]);
            prop_assert_eq!(range.offset.0, 1000 * number as u64 + done);
            prop_assert!(range.length.0 > 0 && range.length.0 <= PIECE_BYTES);
            // All pieces but the last are whole chunks, so their chunks are the block's.
            prop_assert!(done % CHUNK == 0);
            let mut at = done;
            for part in &piece.memory {
                // Finds this byte of the item in its memory.
                let mut skip = at;
                let mut slices = memory[number].iter();
                let slice = slices
                    .find(|slice| {
                        let is_here = skip < slice.length().0;
                        skip -= if is_here { 0 } else { slice.length().0 };
                        is_here
                    })
                    .unwrap();
                prop_assert_eq!(part.slice.as_ptr(), slice.as_ptr().wrapping_add(Length(skip).as_usize()));
                prop_assert!(part.slice.length().0 <= slice.length().0 - skip);
                prop_assert_eq!(part.of.as_ptr(), slice.as_ptr());
                at += part.slice.length().0;
            }
            prop_assert_eq!(at - done, range.length.0);
            next[number] = at;
        }
        let lengths: Vec<u64> = items.iter().map(|slices| slices.iter().sum()).collect();
        prop_assert_eq!(next, lengths);
    }
}
