//! Faults and calls that wait for a moment: a record on its way to the log, a message of a session, or a call. Chance
//! alone seldom meets the milliseconds between an order and its outcome.

use super::{Call, DiskFault, Fault, Plan};
use crate::dice::{Dice, Stream};
use std::fmt;

/// When something is said that an ambush waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// A leader hands such a record to the store.
    Logs(Logged),
    /// A node or its master sends such a message in their session.
    Says(Said),
    /// A client's call of this name reaches a master.
    Asks(&'static str),
    /// The store tells a candidate that another master leads.
    Loses,
}

/// A kind of record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logged {
    /// The commit of a block in memory.
    Block,
    /// The same, if the block came back from a medium. Such a commit counts as [`Logged::Block`] too.
    Return,
    /// A copy on a medium.
    Copy,
    /// The removal of a block.
    Removal,
    /// A block leaves some of its places.
    Leaving,
    /// A replica or a copy is gone.
    ReplicaGone,
    /// A block has one more replica.
    ReplicaAdded,
    /// A node leaves, or a segment of it.
    NodeGone,
    /// A medium is attached, or its zones change.
    Medium,
    /// Leases on freed places, or their end.
    Leases,
}

/// A kind of message in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// To a node: copy blocks to or from a medium.
    Transfers,
    /// From a node: such copies have ended.
    TransfersDone,
    /// To a node: copy blocks from another node.
    Pulls,
    /// From a node: such copies have ended.
    Pulled,
    /// To a node: close grants.
    Fence,
    /// From a node: they are closed.
    Fenced,
    /// From a node: it begins a session.
    Register,
    /// From a node: the media that it has.
    Media,
    /// To a node: a medium is to be attached.
    AttachMedium,
    /// From a node: it is.
    MediumAttached,
    /// From a node: it leaves.
    Draining,
    /// To a node that leaves: how many blocks leave with it.
    Demoted,
}

/// What happens then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trick {
    /// The message waits for so many milliseconds, and those behind it too. A candidate that lost hears of no change of
    /// the leader for so long.
    Late(u64),
    /// A fault.
    Fault(Fault),
    /// A client makes this call for a key of the message, or for any.
    Touch(Call),
}

/// See the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ambush {
    /// The moment.
    pub at: Moment,
    /// Of 1000 such moments so many are used.
    pub share: u64,
    /// How often it happens at most.
    pub times: u64,
    /// How many microseconds later.
    pub after: u64,
    /// What happens.
    pub trick: Trick,
}

impl Moment {
    const LOGGED: [Logged; 9] = [
        Logged::Block,
        Logged::Copy,
        Logged::Removal,
        Logged::Leaving,
        Logged::ReplicaGone,
        Logged::ReplicaAdded,
        Logged::NodeGone,
        Logged::Medium,
        Logged::Leases,
    ];
    const SAID: [Said; 11] = [
        Said::Transfers,
        Said::TransfersDone,
        Said::Pulls,
        Said::Pulled,
        Said::Fence,
        Said::Fenced,
        Said::Register,
        Said::Media,
        Said::AttachMedium,
        Said::MediumAttached,
        Said::Draining,
    ];
    const ASKED: [&'static str; 7] = [
        "Reserve",
        "Commit",
        "Lookup",
        "Renew",
        "Remove",
        "ReportReplicas",
        "ChangeReplicas",
    ];

    fn drawn(dice: &Dice) -> Self {
        match dice.below(5) {
            0 | 1 => Self::Logs(Self::LOGGED[dice.index(Self::LOGGED.len())]),
            2 | 3 => Self::Says(Self::SAID[dice.index(Self::SAID.len())]),
            _ => Self::Asks(Self::ASKED[dice.index(Self::ASKED.len())]),
        }
    }
}

impl fmt::Display for Ambush {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            at,
            share,
            times,
            after,
            trick,
        } = self;
        write!(
            f,
            "at {at:?}, in {share} of 1000 cases and at most {times} times, {after} us later: "
        )?;
        match trick {
            Trick::Late(ms) => write!(f, "it waits for {ms} ms"),
            Trick::Fault(fault) => write!(f, "{fault}"),
            Trick::Touch(call) => write!(f, "a client calls {call:?}"),
        }
    }
}

impl Plan {
    /// At this moment the trick happens, in `share` of 1000 cases and at most so many `times`. It comes `after` so many
    /// microseconds.
    pub(crate) fn lies_in_wait(
        &mut self,
        at: Moment,
        (share, times): (u64, u64),
        after: u64,
        trick: Trick,
    ) {
        self.ambushes.push(Ambush {
            at,
            share,
            times,
            after,
            trick,
        });
    }

    /// From a stream of its own.
    pub(super) fn draw_ambushes(&mut self) {
        let dice = Dice::new(self.seed, Stream::Ambushes);
        if !dice.chance(400) {
            return;
        }
        for _ in 0..dice.between(1, 3) {
            let at = Moment::drawn(&dice);
            // Several tricks at one moment meet each other.
            for _ in 0..dice.between(1, 2) {
                let ambush = Ambush {
                    at,
                    share: [1_000, 300, 60][dice.index(3)],
                    times: dice.between(1, 6),
                    after: [0, 300, 3_000, 40_000][dice.index(4)],
                    trick: self.draw_trick(&dice),
                };
                self.ambushes.push(ambush);
            }
        }
    }

    fn draw_trick(&self, dice: &Dice) -> Trick {
        match dice.below(10) {
            0 | 1 => Trick::Late(dice.between(20, [200, 2_000][dice.index(2)])),
            2..=5 => Trick::Touch(Call::TOUCHES[dice.index(Call::TOUCHES.len())]),
            _ => Trick::Fault(self.draw_sudden_fault(dice)),
        }
    }

    /// A fault that is the more likely to matter the better its moment.
    fn draw_sudden_fault(&self, dice: &Dice) -> Fault {
        let ms = dice.between(30, [300, 1_500][dice.index(2)]);
        let node = dice.index(self.nodes);
        if dice.chance(150) {
            return Fault::StoreFull(ms);
        }
        if self.has_disks() && dice.chance(300) {
            let fault = match dice.below(3) {
                0 => DiskFault::Stalls,
                1 => DiskFault::Fails,
                _ => DiskFault::IsGone,
            };
            return Fault::Disk(node, fault, ms);
        }
        loop {
            let fault = self.draw_fault(dice);
            let is_sudden = !matches!(fault, Fault::ClockJumps(..) | Fault::Intruder(_));
            if is_sudden {
                return fault;
            }
        }
    }

    /// The faults that come at their times, and those that wait for a moment.
    pub(crate) fn all_faults(&self) -> impl Iterator<Item = &Fault> {
        let waiting = self
            .ambushes
            .iter()
            .filter_map(|ambush| match &ambush.trick {
                Trick::Fault(fault) => Some(fault),
                _ => None,
            });
        self.faults.iter().map(|(_, fault)| fault).chain(waiting)
    }

    /// For how many milliseconds the store may be full, all in all.
    pub(crate) fn full_ms(&self) -> u64 {
        let of = |fault: &Fault| match fault {
            Fault::StoreFull(ms) => *ms,
            _ => 0,
        };
        let timed = self.faults.iter().map(|(_, fault)| of(fault));
        let waiting = self.ambushes.iter().map(|ambush| match &ambush.trick {
            Trick::Fault(fault) => of(fault) * ambush.times,
            _ => 0,
        });
        timed.chain(waiting).sum()
    }
}
