//! Disks of two zones. Each zone is emptied soon after the other one was written, and pinned copies fill much of both.

use super::{Call, DiskFault, Fault, Logged, Moment, Plan, Process, Said, Trick};
use crate::dice::{Dice, Stream};

/// The bytes of two zones.
pub(crate) const NARROW: u64 = 2 << 20;

impl Plan {
    /// From a stream of its own. What takes copies from disks gives way, so that pinned blocks must stay.
    pub(super) fn draw_narrow_disks(&mut self) {
        let dice = Dice::new(self.seed, Stream::Narrow);
        if !self.has_disks() || self.keeps_all || self.has_settings() || !dice.chance(350) {
            return;
        }
        self.keep_faults(|fault| !fault.takes_memory() && !fault.harms_disk());
        self.noise.slow_disk = [20, 60, 150][dice.index(3)];
        if dice.chance(300) {
            self.break_sessions(&dice);
        }
        self.keep_nodes_and_disks();
        self.disk_bytes = NARROW;
        self.nodes = if dice.chance(600) { 1 } else { 2 };
        // Seven blocks fill a zone, and more of them are pinned.
        self.longest_block = 150_000;
        self.one_length = Some(dice.between(110_000, 145_000));
        self.keys = self.keys.clamp(24, 48);
        self.segment_bytes = dice.between(40, 52) << 16;
        self.segments = 1;
        self.longest_pause = 30_000;
        self.raise_calls(&[(Call::Upsert, 4), (Call::Get, 12)]);
        // Memory is lost, and the copies of pinned blocks are their only places.
        for _ in 0..dice.between(1, 3) {
            let node = dice.index(self.nodes);
            let down = dice.between(30, 300);
            let fault = match dice.below(5) {
                0 => Fault::Drain(node, down),
                1 => Fault::Stop(Process::Node(node), dice.between(900, 2_500)),
                2 => Fault::Disk(node, DiskFault::Stalls, dice.between(300, 2_500)),
                _ => Fault::Crash(Process::Node(node), down),
            };
            self.faults
                .push((dice.between(1_500, self.length_ms), fault));
        }
        self.lose_memory_twice(&dice);
        // Copies are written, moved and read while their records, or removals of their keys, are on their way to the
        // log.
        let fails = dice.chance(300);
        if !fails && dice.chance(500) {
            let logged = [Logged::Removal, Logged::Copy, Logged::Block][dice.index(3)];
            let late = Trick::Late(dice.between(40, [400, 1_200][dice.index(2)]));
            self.lies_in_wait(Moment::Logs(logged), (250, 16), 0, late);
        }
        if fails {
            self.read_moving_copies(&dice);
        }
    }

    /// Sessions break while records are on their way to the log. Or the master hears late of the end of a session, and
    /// of the media in the next one.
    fn break_sessions(&mut self, dice: &Dice) {
        self.noise.lost = self.noise.lost.max(30);
        // A message that is sent again over a cut breaks its session now and then.
        let node = Process::Node(0);
        for _ in 0..dice.between(5, 9) {
            let (at, ms) = (dice.between(800, self.length_ms), dice.between(150, 450));
            for master in (0..self.masters()).map(Process::Master) {
                self.faults.push((at, Fault::Cut(node, master, ms)));
                self.faults.push((at, Fault::Cut(master, node, ms)));
            }
        }
        if dice.chance(500) {
            let late = Trick::Late(dice.between(300, 900));
            self.lies_in_wait(Moment::Logs(Logged::ReplicaGone), (60, 15), 0, late);
            return;
        }
        let late = Trick::Late(dice.between(400, 1_000));
        self.lies_in_wait(Moment::Says(Said::TransfersDone), (40, 20), 0, late);
        let late = Trick::Late(dice.between(200, 900));
        self.lies_in_wait(Moment::Says(Said::Media), (1_000, 20), 0, late);
    }

    /// A copy that moves is read at its old place, where single ranges cannot be read, while the record of its new
    /// place is on its way to the log.
    fn read_moving_copies(&mut self, dice: &Dice) {
        // Delays must last until the disk fails, and leave room for many of them.
        for trick in [
            Trick::Late(dice.between(12, 60)),
            Trick::Touch(Call::Get),
            Trick::Touch(Call::Get),
        ] {
            self.lies_in_wait(Moment::Logs(Logged::Copy), (400, 250), 0, trick);
        }
        for _ in 0..dice.between(2, 4) {
            let node = dice.index(self.nodes);
            let fault = Fault::Disk(node, DiskFault::Fails, dice.between(500, 3_000));
            self.faults
                .push((dice.between(1_500, self.length_ms), fault));
        }
    }

    /// Memory is lost. Its pinned blocks come back from their disk before their zone is emptied, to memory that leaves
    /// soon or is silent.
    fn lose_memory_twice(&mut self, dice: &Dice) {
        let mut end = self.length_ms;
        for _ in 0..dice.between(1, 3) {
            let node = dice.index(self.nodes);
            let at = dice.between(1_500, self.length_ms);
            let down = dice.between(30, 150);
            let again = at + down + dice.between(60, 1_200);
            let next = match dice.chance(650) {
                true => Fault::Drain(node, down),
                false => Fault::Stop(Process::Node(node), dice.between(900, 2_000)),
            };
            let crash = Fault::Crash(Process::Node(node), down);
            self.faults.extend([(at, crash), (again, next)]);
            end = end.max(again + 1_000);
        }
        self.length_ms = end;
        if dice.chance(600) {
            // A node leaves while copies move to another zone, and the zone that they leave is emptied next.
            let leaves = Fault::Drain(dice.index(self.nodes), dice.between(30, 300));
            let orders = Moment::Says(Said::Transfers);
            self.lies_in_wait(orders, (40, 2), 0, Trick::Fault(leaves));
        }
    }
}
