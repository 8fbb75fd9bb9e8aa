//! The records that remain of ended rooms, so that late messages cannot reopen them.

use super::{RoomGeneration, RoomTag};
use kvpool_types::{Code, Incarnation};
use std::collections::{BTreeMap, VecDeque};

/// How a room ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoomOutcome {
    /// All bytes were verified.
    Success,
    /// The room failed, for this reason.
    Failed(Code),
}

/// The rooms that have ended, by receiver. The number of tombstones is bounded. For forgotten rooms only the
/// highest generation of each receiver is kept. A receiver's generations rise, so its new rooms are above this
/// one.
///
/// The desk refuses a room whose generation is not above the forgotten ones of its receiver. So a receiver that
/// ends many rooms makes the desk forget its own tombstones, not those of a receiver that has few.
#[derive(Clone, Debug)]
pub struct Tombstones {
    capacity: usize,
    ended: BTreeMap<(Incarnation, RoomTag), RoomOutcome>,
    /// The attempts of each receiver that have tombstones, oldest first.
    order: BTreeMap<Incarnation, VecDeque<RoomTag>>,
    floors: BTreeMap<Incarnation, RoomGeneration>,
}

impl Tombstones {
    /// Tombstones for the last `capacity` rooms.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            ended: BTreeMap::new(),
            order: BTreeMap::new(),
            floors: BTreeMap::new(),
        }
    }

    /// Records the end of a room. A second outcome of the same room is ignored.
    pub fn bury(&mut self, receiver: Incarnation, tag: RoomTag, outcome: RoomOutcome) {
        if self.ended.contains_key(&(receiver, tag)) {
            return;
        }
        self.ended.insert((receiver, tag), outcome);
        self.order.entry(receiver).or_default().push_back(tag);
        while self.ended.len() > self.capacity {
            let of = self.crowded(receiver);
            self.forget_oldest(of);
        }
    }

    /// The receiver that loses its oldest tombstone: this receiver if it has its share of them, else the
    /// receiver with the most.
    fn crowded(&self, receiver: Incarnation) -> Incarnation {
        let own = self.order.get(&receiver).map_or(0, VecDeque::len);
        if own * self.order.len() >= self.ended.len() {
            return receiver;
        }
        let most = self.order.iter().max_by_key(|(_, tags)| tags.len());
        most.map_or(receiver, |(of, _)| *of)
    }

    fn forget_oldest(&mut self, of: Incarnation) {
        let Some(tags) = self.order.get_mut(&of) else {
            return;
        };
        if let Some(oldest) = tags.pop_front() {
            self.ended.remove(&(of, oldest));
            let floor = self.floors.entry(of).or_default();
            *floor = oldest.generation.max(*floor);
        }
        if tags.is_empty() {
            self.order.remove(&of);
        }
    }

    /// The outcome of a room, while its tombstone is kept.
    pub fn outcome(&self, receiver: Incarnation, tag: RoomTag) -> Option<RoomOutcome> {
        self.ended.get(&(receiver, tag)).copied()
    }

    /// Whether a room that is not open may begin. False for a room that has ended, or may have ended. False for
    /// an attempt below an attempt at the same room that has ended.
    pub fn admits(&self, receiver: Incarnation, tag: RoomTag) -> bool {
        let last = RoomTag {
            generation: RoomGeneration(u64::MAX),
            ..tag
        };
        let mut ended = self.ended.range((receiver, tag)..=(receiver, last));
        let floor = self.floors.get(&receiver);
        ended.next().is_none() && floor.is_none_or(|floor| tag.generation > *floor)
    }

    /// Forgets a receiver whose process has ended: none of its messages can arrive any more.
    pub fn forget(&mut self, receiver: Incarnation) {
        self.ended.retain(|(of, _), _| *of != receiver);
        self.order.remove(&receiver);
        self.floors.remove(&receiver);
    }
}
