//! Put sessions: a caller writes a block range by range, and the end of the session puts the block.

use super::codes;
use kvpool_client::PutOptions;
use kvpool_transport::Slice;
use kvpool_types::{Key, Offset};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// The put sessions of one store. Their blocks are invisible before the end of the session.
#[derive(Default)]
pub(super) struct PutSessions {
    open: Mutex<HashMap<Key, Arc<Mutex<Staged>>>>,
}

/// A block that is being written.
pub(super) struct Staged {
    bytes: Vec<u8>,
    /// The written ranges, as `(from, to)`.
    written: Vec<(usize, usize)>,
    options: PutOptions,
}

impl PutSessions {
    /// Begins the session of a key.
    pub(super) fn start(&self, key: &Key, size: u64, most: u64, options: &PutOptions) -> i64 {
        let Some(size) = usize::try_from(size)
            .ok()
            .filter(|_| size > 0 && size <= most)
        else {
            return codes::PARAMETERS;
        };
        let mut open = self.open.lock();
        if open.contains_key(key) {
            return codes::BUSY;
        }
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(size).is_err() {
            return codes::NO_SPACE;
        }
        bytes.resize(size, 0);
        let staged = Staged {
            bytes,
            written: Vec::new(),
            options: options.clone(),
        };
        open.insert(key.clone(), Arc::new(Mutex::new(staged)));
        codes::OK
    }

    /// Whether the key has an open session.
    pub(super) fn is_open(&self, key: &Key) -> bool {
        self.open.lock().contains_key(key)
    }

    /// Writes ranges. Returns the number of written bytes, or a code. With a code, no range was written.
    pub(super) fn write(&self, key: &Key, ranges: &[(u64, Slice)]) -> i64 {
        let Some(staged) = self.open.lock().get(key).cloned() else {
            return codes::NOT_FOUND;
        };
        let mut staged = staged.lock();
        let Some(places) = places(ranges, staged.bytes.len()) else {
            return codes::PARAMETERS;
        };
        let mut count = 0;
        for ((from, to), (_, slice)) in places.iter().zip(ranges) {
            if let Some(target) = staged.bytes.get_mut(*from..*to) {
                slice.read_at(Offset(0), target);
                count += to - from;
            }
        }
        staged.written.extend(places);
        i64::try_from(count).unwrap_or(i64::MAX)
    }

    /// Ends the session. Returns the block's bytes and the options of its put, or a code. Drops a block that
    /// was not written completely.
    pub(super) fn end(&self, key: &Key) -> Result<(Vec<u8>, PutOptions), i64> {
        let staged = self.open.lock().remove(key).ok_or(codes::NOT_FOUND)?;
        let mut staged = staged.lock();
        if !covers(&mut staged.written.clone(), staged.bytes.len()) {
            return Err(codes::INVALID_WRITE);
        }
        Ok((std::mem::take(&mut staged.bytes), staged.options.clone()))
    }

    /// Drops the session. Returns false when the key has none.
    pub(super) fn revoke(&self, key: &Key) -> bool {
        self.open.lock().remove(key).is_some()
    }
}

/// The ranges within a block of `size` bytes; `None` if one of them lies outside.
fn places(ranges: &[(u64, Slice)], size: usize) -> Option<Vec<(usize, usize)>> {
    ranges
        .iter()
        .map(|(from, slice)| {
            let from = usize::try_from(*from).ok()?;
            let to = from.checked_add(usize::try_from(slice.length().0).ok()?)?;
            (to <= size).then_some((from, to))
        })
        .collect()
}

/// Whether the ranges together cover all of `0..size`.
fn covers(ranges: &mut [(usize, usize)], size: usize) -> bool {
    ranges.sort_unstable();
    let mut end = 0;
    for (from, to) in ranges {
        if *from > end {
            return false;
        }
        end = end.max(*to);
    }
    end == size
}
