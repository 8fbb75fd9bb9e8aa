//! Records the writes into a room, so that the close of the room need not read all its bytes again.

use kvpool_types::checksum::combine;
use kvpool_types::{Checksum, Length, Offset};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most writes that are recorded for one room. Beyond it, the room's memory is read at the close.
const MAX_NOTED: usize = 1 << 20;

/// A range that was written: its length, and the checksum of its last write.
#[derive(Clone, Copy, Debug)]
struct Written {
    length: u64,
    sum: Option<Checksum>,
    under_way: u32,
}

/// The writes into one room, by view and offset.
///
/// A recorded checksum is that of the memory only if no other write could touch the same bytes after it was
/// computed. Two concurrent writes that overlap make the record void. So do two ranges that overlap in part.
#[derive(Clone, Debug, Default)]
pub(super) struct RoomWrites {
    by_place: BTreeMap<(u32, u64), Written>,
    is_void: bool,
}

/// A write that is under way.
pub(super) struct RoomWrite {
    writes: Arc<Mutex<RoomWrites>>,
    place: (u32, u64),
    sum: Option<Checksum>,
}

impl RoomWrites {
    /// Records that a write may touch bytes from now on.
    pub(super) fn begin(
        writes: &Arc<Mutex<Self>>,
        view: u32,
        from: Offset,
        length: Length,
    ) -> RoomWrite {
        let place = (view, from.0);
        writes.lock().enter(place, length.0);
        RoomWrite {
            writes: Arc::clone(writes),
            place,
            sum: None,
        }
    }

    fn enter(&mut self, place: (u32, u64), length: u64) {
        if self.is_void {
            return;
        }
        if let Some(known) = self.by_place.get_mut(&place) {
            self.is_void = known.length != length || known.under_way > 0;
            known.under_way += 1;
            known.sum = None;
        } else {
            let (view, from) = place;
            let before = self.by_place.range((view, 0)..place).next_back();
            let after = self.by_place.range(place..=(view, u64::MAX)).next();
            self.is_void = before.is_some_and(|((_, other), known)| other + known.length > from)
                || after.is_some_and(|((_, other), _)| *other < from + length)
                || self.by_place.len() >= MAX_NOTED;
            let written = Written {
                length,
                sum: None,
                under_way: 1,
            };
            self.by_place.insert(place, written);
        }
        if self.is_void {
            self.by_place.clear();
        }
    }

    fn leave(&mut self, place: (u32, u64), sum: Option<Checksum>) {
        if let Some(known) = self.by_place.get_mut(&place) {
            known.under_way -= 1;
            known.sum = sum;
        }
    }

    /// The checksum of a range that whole writes have covered exactly once.
    pub(super) fn sum(&self, view: u32, from: Offset, length: Length) -> Option<Checksum> {
        let end = from.0.checked_add(length.0)?;
        let (mut at, mut whole) = (from.0, Checksum(0));
        for ((_, begin), written) in self.by_place.range((view, from.0)..(view, end)) {
            let sum = written.sum.filter(|_| *begin == at)?;
            at = begin.checked_add(written.length)?;
            whole = combine(whole, sum, Length(written.length));
        }
        (at == end).then_some(whole)
    }
}

impl RoomWrite {
    /// Records that all bytes of the write are in place, with this checksum.
    pub(super) fn done(mut self, sum: Checksum) {
        self.sum = Some(sum);
    }
}

impl Drop for RoomWrite {
    fn drop(&mut self) {
        self.writes.lock().leave(self.place, self.sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::checksum;

    fn write(writes: &Arc<Mutex<RoomWrites>>, from: u64, bytes: &[u8]) {
        let length = Length(bytes.len() as u64);
        RoomWrites::begin(writes, 0, Offset(from), length).done(checksum(bytes));
    }

    fn sum(writes: &Arc<Mutex<RoomWrites>>, from: u64, length: u64) -> Option<Checksum> {
        writes.lock().sum(0, Offset(from), Length(length))
    }

    #[test]
    fn a_range_of_whole_writes_has_a_known_checksum() {
        let writes = Arc::default();
        write(&writes, 5, b"56789");
        write(&writes, 0, b"01234");
        assert_eq!(sum(&writes, 0, 10), Some(checksum(b"0123456789")));
        assert_eq!(sum(&writes, 5, 5), Some(checksum(b"56789")));
        for (from, length) in [(0, 11), (1, 4), (0, 9), (4, 2), (10, 1)] {
            assert_eq!(sum(&writes, from, length), None, "{from} {length}");
        }
        // A repeated write takes the place of the first.
        write(&writes, 0, b"abcde");
        assert_eq!(sum(&writes, 0, 10), Some(checksum(b"abcde56789")));
    }

    #[test]
    fn writes_that_overlap_leave_no_checksum() {
        for (from, bytes) in [(3, &b"xyz"[..]), (0, b"0"), (0, b"0123456789"), (4, b"x")] {
            let writes = Arc::default();
            write(&writes, 0, b"01234");
            write(&writes, 5, b"56789");
            write(&writes, from, bytes);
            assert_eq!(sum(&writes, 5, 5), None, "{from}");
        }
        let writes = Arc::default();
        let late = RoomWrites::begin(&writes, 0, Offset(0), Length(5));
        write(&writes, 0, b"01234");
        assert_eq!(sum(&writes, 0, 5), None, "another write is under way");
        drop(late);
        assert_eq!(sum(&writes, 0, 5), None, "it may have changed a byte");
    }

    #[test]
    fn a_write_that_was_given_up_leaves_no_checksum_until_it_is_repeated() {
        let writes = Arc::default();
        write(&writes, 0, b"01234");
        drop(RoomWrites::begin(&writes, 0, Offset(0), Length(5)));
        assert_eq!(sum(&writes, 0, 5), None);
        write(&writes, 0, b"43210");
        assert_eq!(sum(&writes, 0, 5), Some(checksum(b"43210")));
    }
}
