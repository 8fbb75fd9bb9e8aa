//! Which calls the load makes, and how often. In some histories a few kinds of calls and of faults come often. So a
//! fault that needs two of them is met sooner.

use super::Plan;
use crate::dice::{Dice, Stream};
use std::fmt;
use std::mem::discriminant;

/// A call of a task of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the variants say it")]
pub enum Call {
    Put,
    Upsert,
    Remove,
    Exist,
    Prefix,
    ChangeReplicas,
    Hold,
    Get,
}

impl Call {
    const ALL: [Self; 8] = [
        Self::Put,
        Self::Upsert,
        Self::Remove,
        Self::Exist,
        Self::Prefix,
        Self::ChangeReplicas,
        Self::Hold,
        Self::Get,
    ];
    /// Those that an ambush makes for one key, or for some.
    pub(super) const TOUCHES: [Self; 7] = [
        Self::Put,
        Self::Upsert,
        Self::Remove,
        Self::Remove,
        Self::Hold,
        Self::Get,
        Self::ChangeReplicas,
    ];
}

/// The weight of each call, in the order of `Call::ALL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix([u64; 8]);

impl Mix {
    /// What engines do, and a little of everything else.
    pub(crate) const USUAL: Self = Self([7, 1, 1, 1, 1, 1, 2, 8]);

    /// Makes a call no rarer than this.
    fn raise(&mut self, call: Call, least: u64) {
        let mut weights = Call::ALL.into_iter().zip(&mut self.0);
        if let Some((_, weight)) = weights.find(|(one, _)| *one == call) {
            *weight = least.max(*weight);
        }
    }

    /// What a task does next.
    pub(crate) fn draw(&self, dice: &Dice) -> Call {
        let mut left = dice.below(self.0.iter().sum());
        for (call, weight) in Call::ALL.into_iter().zip(self.0) {
            match left.checked_sub(weight) {
                Some(rest) => left = rest,
                None => return call,
            }
        }
        Call::Get
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = Call::ALL.into_iter().zip(self.0);
        let all = all.map(|(call, weight)| format!("{call:?} {weight}"));
        f.write_str(&all.collect::<Vec<_>>().join(", "))
    }
}

impl Plan {
    /// Makes these calls no rarer than their weights.
    pub(crate) fn raise_calls(&mut self, calls: &[(Call, u64)]) {
        for (call, least) in calls {
            self.mix.raise(*call, *least);
        }
    }

    /// From a stream of its own. Some calls are made often, and others never.
    pub(super) fn draw_mix(&mut self) {
        let dice = Dice::new(self.seed, Stream::Mix);
        if !dice.chance(500) {
            return;
        }
        for weight in &mut self.mix.0 {
            *weight *= [0, 1, 1, 4, 8][dice.index(5)];
        }
        // Without blocks nothing happens.
        self.raise_calls(&[(Call::Put, 3), (Call::Get, 1)]);
    }

    /// From a stream of its own. One or two kinds of faults come often, some of them within moments.
    pub(super) fn draw_bursts(&mut self) {
        let dice = Dice::new(self.seed, Stream::Bursts);
        if !dice.chance(350) {
            return;
        }
        for _ in 0..dice.between(1, 2) {
            let kind = discriminant(&self.draw_fault(&dice));
            let mut at = dice.between(200, self.length_ms);
            for _ in 0..dice.between(2, 6) {
                let alike = loop {
                    let fault = self.draw_fault(&dice);
                    if discriminant(&fault) == kind {
                        break fault;
                    }
                };
                self.faults.push((at, alike));
                at += dice.between(5, [100, 600, 2_500][dice.index(3)]);
            }
            self.length_ms = self.length_ms.max(at + 500);
        }
    }
}
