//! Plans transfers as work requests: joins adjacent ranges, and divides long ranges.

use super::sys::Sge;
use super::work::{Remote, Verb};
use std::ops::Range;

/// The limits of one work request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// The most bytes.
    pub(super) slice: u32,
    /// The most parts of local memory.
    pub(super) scatter: u32,
}

/// One item of a submission, by addresses and keys.
#[derive(Clone, Debug)]
pub(super) struct PlanItem {
    pub(super) verb: Verb,
    pub(super) remote: Remote,
    pub(super) parts: Vec<PlanPart>,
}

/// A part of an item's local memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanPart {
    pub(super) address: u64,
    pub(super) length: u64,
    pub(super) lkey: u32,
}

/// A planned work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlannedWork {
    pub(super) verb: Verb,
    pub(super) remote: Remote,
    pub(super) length: u32,
    /// The indices of the items whose bytes it moves.
    pub(super) items: Range<usize>,
    parts: Range<usize>,
}

/// The work requests of one submission, in the order of its items.
#[derive(Debug, Default)]
pub(super) struct Plan {
    works: Vec<PlannedWork>,
    parts: Vec<Sge>,
}

impl Plan {
    /// Plans the next item. A range that continues the previous range at the peer joins its work
    /// request. If it continues the local memory too, it joins the same part.
    pub(super) fn add(&mut self, number: usize, item: &PlanItem, bounds: Bounds) {
        let mut remote = item.remote;
        for part in &item.parts {
            let mut part = *part;
            while part.length > 0 {
                let taken = self.take(number, item.verb, remote, part, bounds);
                remote.address = remote.address.wrapping_add(u64::from(taken));
                part.address = part.address.wrapping_add(u64::from(taken));
                part.length -= u64::from(taken);
            }
        }
    }

    pub(super) fn works(&self) -> &[PlannedWork] {
        &self.works
    }

    /// The parts of local memory that a work request names.
    pub(super) fn parts(&self, work: &PlannedWork) -> &[Sge] {
        &self.parts[work.parts.clone()]
    }

    /// Plans as much of a part as one work request takes. Returns the number of bytes.
    fn take(
        &mut self,
        number: usize,
        verb: Verb,
        remote: Remote,
        part: PlanPart,
        bounds: Bounds,
    ) -> u32 {
        let room = self.room(verb, remote, part, bounds);
        let room = if room == 0 {
            self.works.push(PlannedWork {
                verb,
                remote,
                length: 0,
                items: number..number,
                parts: self.parts.len()..self.parts.len(),
            });
            bounds.slice
        } else {
            room
        };
        let taken = u32::try_from(part.length).map_or(room, |length| length.min(room));
        let Some(work) = self.works.last_mut() else {
            unreachable!("invariant: one was there or has been added")
        };
        work.length += taken;
        work.items.end = number + 1;
        match self.parts[work.parts.clone()].last_mut() {
            Some(last) if continues(last, part) => last.length += taken,
            _ => {
                self.parts.push(Sge {
                    addr: part.address,
                    length: taken,
                    lkey: part.lkey,
                });
                work.parts.end += 1;
            }
        }
        taken
    }

    /// The bytes of a part that the last work request still takes.
    fn room(&self, verb: Verb, remote: Remote, part: PlanPart, bounds: Bounds) -> u32 {
        let Some(work) = self.works.last() else {
            return 0;
        };
        let end = work.remote.address.wrapping_add(u64::from(work.length));
        if work.verb != verb || work.remote.rkey != remote.rkey || end != remote.address {
            return 0;
        }
        let parts = self.parts(work);
        let is_same_part = parts.last().is_some_and(|last| continues(last, part));
        if !is_same_part && parts.len() >= bounds.scatter as usize {
            return 0;
        }
        bounds.slice.saturating_sub(work.length)
    }
}

fn continues(last: &Sge, part: PlanPart) -> bool {
    last.lkey == part.lkey && last.addr.wrapping_add(u64::from(last.length)) == part.address
}

#[cfg(test)]
mod tests;
