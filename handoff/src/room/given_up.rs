//! Notes of requests that one side gave up, for the side that has not named them yet.
//!
//! ```text
//!  prefill ends a room ────────────► a later offer of any process is refused
//!  decode aborts or declines ──────► judged when prefill names the request: how many places it has,
//!                                    and who asked for them, is known only then
//! ```

use super::RoomId;
use crate::Moment;
use kvpool_types::{Code, Incarnation};
use std::collections::BTreeMap;
use std::time::Duration;

/// What a process of decode gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeftWhat {
    /// One attempt. The next attempt of the process goes on.
    Attempt,
    /// The whole request.
    Request,
}

/// One process of decode gave a request up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    /// The process.
    pub(super) session: Incarnation,
    pub(super) what: LeftWhat,
    /// The place among the request's receivers that the process had asked for. `None` for a process that had
    /// not asked.
    pub(super) place: Option<u32>,
    pub(super) code: Code,
}

#[derive(Clone, Copy, Debug)]
struct Until<T> {
    what: T,
    until: Moment,
}

/// The notes of one desk. Both kinds are bounded in number and time. A process that gives up many requests makes the
/// desk forget its own notes, not those of a process that has few.
#[derive(Clone, Debug)]
pub(super) struct GivenUps {
    most: usize,
    /// The rooms that prefill ended, and why.
    refused: BTreeMap<RoomId, Until<Code>>,
    left: BTreeMap<(RoomId, Incarnation), Until<Left>>,
}

impl GivenUps {
    /// At most `most` notes of each kind.
    pub(super) const fn new(most: usize) -> Self {
        Self {
            most,
            refused: BTreeMap::new(),
            left: BTreeMap::new(),
        }
    }

    /// Notes that prefill ended a room.
    pub(super) fn refuse(&mut self, now: Moment, room: RoomId, code: Code, keep: Duration) {
        insert(&mut self.refused, self.most, now, room, (code, keep));
    }

    /// Notes that a process gave a request up. A process that had asked keeps its place in the note, and one that
    /// declined the request has declined it still.
    pub(super) fn leave(&mut self, now: Moment, room: RoomId, mut left: Left, keep: Duration) {
        let key = (room, left.session);
        let known = self.left.get(&key).filter(|known| now < known.until);
        if let Some(Until { what: known, .. }) = known {
            left.place = left.place.or(known.place);
            if known.what == LeftWhat::Request {
                (left.what, left.code) = (LeftWhat::Request, known.code);
            }
        }
        if self.left.len() >= self.most && !self.left.contains_key(&key) {
            self.left.retain(|_, it| now < it.until);
            self.make_room(left.session);
        }
        insert(&mut self.left, self.most, now, key, (left, keep));
    }

    /// Forgets the oldest note of the process with the most, where this process has few.
    fn make_room(&mut self, of: Incarnation) {
        let all = self.left.keys().map(|(_, session)| *session);
        let Some(most) = crowded(all, of).filter(|_| self.left.len() >= self.most) else {
            return;
        };
        let notes = self.left.iter();
        let notes = notes.filter(|((_, session), _)| *session == most);
        let oldest = notes.min_by_key(|(_, it)| it.until).map(|(key, _)| *key);
        if let Some(oldest) = oldest {
            self.left.remove(&oldest);
        }
    }

    /// Why prefill ended a room, while that is kept.
    pub(super) fn refused(&self, now: Moment, room: RoomId) -> Option<Code> {
        let refused = self.refused.get(&room).filter(|it| now < it.until);
        refused.map(|it| it.what)
    }

    /// Forgets that prefill ended a room.
    pub(super) fn admit(&mut self, room: RoomId) {
        self.refused.remove(&room);
    }

    /// A process asks for a room. Returns the reason to refuse it: it declined the request before. An attempt that
    /// it gave up before is forgotten.
    pub(super) fn asks_again(
        &mut self,
        now: Moment,
        room: RoomId,
        session: Incarnation,
    ) -> Option<Code> {
        let key = (room, session);
        let left = self.left.get(&key)?;
        if left.what.what == LeftWhat::Request && now < left.until {
            return Some(left.what.code);
        }
        self.left.remove(&key);
        None
    }

    /// Takes the notes of decode's processes about a room.
    pub(super) fn take_left(&mut self, now: Moment, room: RoomId) -> Vec<Left> {
        let last = Incarnation(u128::MAX);
        let of_room = self.left.range((room, Incarnation(0))..=(room, last));
        let keys: Vec<(RoomId, Incarnation)> = of_room.map(|(key, _)| *key).collect();
        let taken = keys.iter().filter_map(|key| self.left.remove(key));
        let taken = taken.filter(|it| now < it.until);
        taken.map(|it| it.what).collect()
    }
}

/// The process that has to give up an entry for one more of `own`: the one with the most entries. `None` where `own`
/// would have as many.
pub(super) fn crowded(
    entries: impl Iterator<Item = Incarnation>,
    own: Incarnation,
) -> Option<Incarnation> {
    let mut counts: BTreeMap<Incarnation, usize> = BTreeMap::new();
    for session in entries {
        *counts.entry(session).or_default() += 1;
    }
    let with_one_more = counts.get(&own).copied().unwrap_or(0) + 1;
    let most = counts.into_iter().max_by_key(|(_, count)| *count);
    most.filter(|(_, count)| *count > with_one_more)
        .map(|(session, _)| session)
}

/// Adds a note, unless too many others are kept.
fn insert<K: Ord, T>(
    notes: &mut BTreeMap<K, Until<T>>,
    most: usize,
    now: Moment,
    key: K,
    (what, keep): (T, Duration),
) {
    if notes.len() >= most {
        notes.retain(|_, it| now < it.until);
    }
    if notes.len() < most || notes.contains_key(&key) {
        let until = now + keep;
        notes.insert(key, Until { what, until });
    }
}
