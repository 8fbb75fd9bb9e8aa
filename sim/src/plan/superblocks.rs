//! Disks that lose flushes while a node formats or attaches them. The superblock that was written last may then be
//! damaged.

use super::{DiskFault, Fault, Plan, Process};
use crate::dice::{Dice, Stream};

/// How long the disk loses flushes once its node has died. The node starts and attaches the disk meanwhile.
const LOSES: u64 = 500;
/// How much later the node dies again.
const LATER: u64 = 900;
/// How long the node is away.
const DOWN: u64 = 30;

impl Plan {
    /// From a stream of its own. No other fault damages a superblock, so each node starts again.
    pub(super) fn draw_superblocks(&mut self) {
        let dice = Dice::new(self.seed, Stream::Superblocks);
        if self.keeps_a_namespace() || !self.has_wide_disks() || !dice.chance(130) {
            return;
        }
        self.keep_faults(|fault| !fault.harms_disk());
        // A medium that is forgotten is formatted again.
        self.ssd_drop_ms = None;
        let mut at = dice.between(1_500, 3_000);
        for _ in 0..dice.between(3, 5) {
            let node = dice.index(self.nodes);
            at = match dice.chance(400) {
                true => self.fail_first_format(node, at),
                false => self.fail_two_attachments(node, at),
            };
            at += dice.between(300, 900);
        }
        self.length_ms = self.length_ms.max(at);
    }

    fn lose_flushes(&mut self, node: usize, at: u64) {
        let loses = Fault::Disk(node, DiskFault::LosesFlushes, LOSES);
        self.faults.push((at, loses));
    }

    /// The first superblock of a blank disk is damaged, and nothing follows it. Returns when this has ended.
    fn fail_first_format(&mut self, node: usize, at: u64) -> u64 {
        self.faults.push((at, Fault::NewDisk(node, DOWN)));
        self.lose_flushes(node, at);
        let dies = Fault::Crash(Process::Node(node), DOWN);
        self.faults.push((at + LATER, dies));
        at + LATER
    }

    /// One superblock is damaged. In the next life its place takes no writes, and flushes are lost again. Returns when
    /// this has ended.
    fn fail_two_attachments(&mut self, node: usize, at: u64) -> u64 {
        let dies = Fault::Crash(Process::Node(node), DOWN);
        let bad = Fault::Disk(node, DiskFault::BadSector, LOSES);
        self.faults.push((at, dies));
        self.lose_flushes(node, at);
        self.faults.push((at + LATER, dies));
        self.faults.push((at + LATER, bad));
        self.lose_flushes(node, at + LATER);
        self.faults.push((at + 2 * LATER, dies));
        at + 2 * LATER
    }
}
