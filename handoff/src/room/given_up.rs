//! Notes of requests that one side gave up and that the other side has not named yet.
//!
//! ```text
//!  prefill ends a room ────────────► a later offer of any process is refused
//!  decode aborts or declines ──────► judged when prefill names the request: only then are its places
//!                                    and the processes that asked for them known
//! ```

use super::RoomId;
use crate::Moment;
use kvpool_types::{Code, Incarnation};
use std::collections::BTreeMap;
use std::time::Duration;

/// The part of a request that a process of decode gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeftWhat {
    /// One attempt. The process may ask again with its next attempt.
    Attempt,
    /// The whole request.
    Request,
}

/// The note that one process of decode gave a request up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    /// The process.
    pub(super) session: Incarnation,
    pub(super) what: LeftWhat,
    /// The place among the request's receivers that the process had asked for. `None` if the process had not
    /// asked.
    pub(super) place: Option<u32>,
    pub(super) code: Code,
}

#[derive(Clone, Copy, Debug)]
struct Until<T> {
    what: T,
    until: Moment,
}

/// The notes of one desk. Both kinds are bounded in number and time. A process that gives up many requests
/// loses notes of its own, not those of a process that has few.
#[derive(Clone, Debug)]
pub(super) struct GivenUps {
    most: usize,
    /// The rooms that prefill ended, with the reasons.
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

    /// Notes that a process gave a request up. The note keeps the place that the process had asked for before.
    /// A decline of the request stays a decline.
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

    /// Forgets the oldest note of the process with the most notes, if that process has more than `of` would
    /// have.
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

    /// The reason for which prefill ended a room, while the note is kept.
    pub(super) fn refused(&self, now: Moment, room: RoomId) -> Option<Code> {
        let refused = self.refused.get(&room).filter(|it| now < it.until);
        refused.map(|it| it.what)
    }

    /// Forgets that prefill ended a room, because a room of this number may open.
    pub(super) fn admit(&mut self, room: RoomId) {
        self.refused.remove(&room);
    }

    /// A process asks for a room. Returns the reason to refuse the process if it declined the request before.
    /// Forgets the note of an attempt that the process gave up.
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

    /// Takes the notes of decode's processes about one room.
    pub(super) fn take_left(&mut self, now: Moment, room: RoomId) -> Vec<Left> {
        let last = Incarnation(u128::MAX);
        let of_room = self.left.range((room, Incarnation(0))..=(room, last));
        let keys: Vec<(RoomId, Incarnation)> = of_room.map(|(key, _)| *key).collect();
        let taken = keys.iter().filter_map(|key| self.left.remove(key));
        let taken = taken.filter(|it| now < it.until);
        taken.map(|it| it.what).collect()
    }
}

/// The process that must give up an entry for one more of `own`: the process with the most entries. `None` if
/// `own` would then have as many.
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

/// Adds a note, unless the limit of notes is reached.
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
