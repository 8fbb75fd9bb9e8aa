//! Blocks that leave memory and come back from disks, while readers hold leases on them.

use super::{Call, DiskFault, Fault, Logged, Moment, NARROW, Plan, Process, Said, Tenant, Trick};
use crate::dice::{Dice, Stream};

impl Plan {
    /// From a stream of its own.
    pub(super) fn draw_returns(&mut self) {
        let dice = Dice::new(self.seed, Stream::Returns);
        if self.keeps_a_namespace() || self.disk_bytes == NARROW || !dice.chance(180) {
            return;
        }
        self.keep_faults(|fault| !fault.takes_from_namespace());
        // Several clients know the same few blocks.
        self.tenants = vec![Tenant::default()];
        self.settings_late_ms = 0;
        // A damaged replica would take leases along.
        self.noise.flipped_writes = 0;
        self.clients = self.clients.max(2);
        self.tasks = 3;
        self.longest_pause = self.longest_pause.min(30_000);
        match dice.below(5) {
            0 => self.leases_on_copies(&dice),
            1 => self.late_returns(&dice),
            2 => self.returns_without_records(&dice),
            3 => self.puts_beside_stores(&dice),
            _ => self.lookups_that_wait(&dice),
        }
    }

    /// Disks, and a few keys for each of at most two nodes. Memory has room for most of their blocks, so all of them
    /// are copied.
    fn has_few_keys(&mut self, of_a_node: u64) {
        if !self.has_disks() {
            self.disk_bytes = 48 << 20;
        }
        self.nodes = self.nodes.min(2);
        self.writes_per_day = None;
        self.keys = of_a_node * self.nodes as u64;
        self.longest_block = self.longest_block.max(40_000);
        let length = self.longest_block / 2;
        self.one_length = self.one_length.map(|_| length);
        let bytes = (of_a_node * length * 4 / 5).max(3 * self.longest_block);
        self.segment_bytes = bytes.next_multiple_of(64 << 10);
        self.segments = 1;
    }

    /// Nodes die and are back at once, and their disks are slow then. Readers have leases from before, and others take
    /// leases on the copies. In some of these histories all masters die too. In others puts of the keys are under way.
    fn leases_on_copies(&mut self, dice: &Dice) {
        self.has_few_keys(dice.between(8, 12));
        self.lease_ms = dice.between(3_000, 6_000);
        self.raise_calls(&[(Call::Hold, 16), (Call::Put, 6), (Call::Upsert, 2)]);
        let with_masters = dice.chance(400);
        if with_masters {
            self.raise_calls(&[(Call::Remove, 4)]);
        } else {
            let commits = Moment::Asks("Commit");
            let late = Trick::Late(dice.between(20, 200));
            self.lies_in_wait(commits, (500, 40), 0, late);
            for _ in 0..2 {
                self.lies_in_wait(commits, (400, 40), 0, Trick::Touch(Call::Hold));
            }
        }
        let mut at = dice.between(800, 1_600);
        while at < self.length_ms {
            let down = dice.between(30, 120);
            let slow = down + dice.between(500, 1_400);
            for node in 0..self.nodes {
                let dies = Fault::Crash(Process::Node(node), down);
                // The leader and its nodes are back within this time.
                let slow = if with_masters { slow + 1_500 } else { slow };
                self.faults.push((at, dies));
                self.faults
                    .push((at, Fault::Disk(node, DiskFault::Stalls, slow)));
            }
            if with_masters {
                for master in (0..self.masters()).map(Process::Master) {
                    self.faults.push((at, Fault::Crash(master, down)));
                }
                at += 1_500;
            }
            at += dice.between(1_500, 3_000);
        }
    }

    /// Blocks come back while the log is slow. Their node leaves before its leader has published them. In some of these
    /// histories readers find wrong bytes, so blocks come back that are in memory.
    fn late_returns(&mut self, dice: &Dice) {
        self.has_few_keys(dice.between(8, 14));
        self.raise_calls(&[(Call::Hold, 10), (Call::Get, 8)]);
        if dice.chance(400) {
            // A place that such a block left is free before the log says so.
            self.noise.flipped = dice.between(50, 200);
            self.lease_ms = dice.between(300, 600);
            let late = Trick::Late(dice.between(800, 1_200));
            self.lies_in_wait(Moment::Logs(Logged::Return), (250, 6), 0, late);
            return;
        }
        self.lease_ms = dice.between(3_000, 6_000);
        self.raise_calls(&[(Call::Hold, 16), (Call::Remove, 2)]);
        // A leader publishes no block before the earlier records of copies and removals are durable.
        for logged in [Logged::Copy, Logged::Removal] {
            let late = Trick::Late(dice.between(40, 250));
            self.lies_in_wait(Moment::Logs(logged), (600, 30), 0, late);
        }
        for node in 0..self.nodes {
            let leaves = Fault::Leave(node, dice.between(30, 100));
            let done = Moment::Says(Said::TransfersDone);
            self.lies_in_wait(done, (150, 5), 0, Trick::Fault(leaves));
        }
    }

    /// Blocks come back to places of others, longer or shorter, and readers get their new places. Leaders die before
    /// the log has that, one after the other within one lease.
    fn returns_without_records(&mut self, dice: &Dice) {
        self.one_length = None;
        self.has_few_keys(dice.between(9, 16));
        self.lease_ms = dice.between(5_000, 7_000);
        self.raise_calls(&[(Call::Upsert, 5), (Call::Get, 10), (Call::Hold, 6)]);
        let returns = Moment::Logs(Logged::Return);
        let late = Trick::Late(dice.between(80, 400));
        self.lies_in_wait(returns, (500, 20), 0, late);
        let dies = Fault::LeaderDies(dice.between(30, 120));
        self.lies_in_wait(returns, (200, 6), 0, Trick::Fault(dies));
    }

    /// Blocks leave memory while a slow disk still writes their copies, and their keys are put again. Readers take
    /// leases on such a copy before that put ends.
    fn puts_beside_stores(&mut self, dice: &Dice) {
        self.has_few_keys(dice.between(10, 16));
        self.lease_ms = dice.between(1_500, 3_000);
        self.noise.slow_disk = dice.between(150, 400);
        self.raise_calls(&[(Call::Put, 14), (Call::Upsert, 3), (Call::Hold, 8)]);
        let late = Trick::Late(dice.between(300, 1_200));
        self.lies_in_wait(Moment::Asks("Commit"), (300, 40), 0, late);
        let stores = Moment::Says(Said::Transfers);
        for after in [40_000, 200_000] {
            let puts = Trick::Touch(Call::Put);
            self.lies_in_wait(stores, (400, 30), after, puts);
        }
        let done = Moment::Says(Said::TransfersDone);
        for _ in 0..2 {
            let holds = Trick::Touch(Call::Hold);
            self.lies_in_wait(done, (500, 40), 5_000, holds);
        }
    }

    /// Lookups wait for a slow disk, and have other blocks already. These are lost and come back, or are removed and
    /// put again.
    fn lookups_that_wait(&mut self, dice: &Dice) {
        self.nodes = self.nodes.max(2);
        self.has_few_keys(dice.between(8, 10));
        self.raise_calls(&[(Call::Put, 8), (Call::Get, 8), (Call::Hold, 8)]);
        let are_lost = dice.chance(500);
        if are_lost {
            // The leases of a block that was lost are over before the lookup ends.
            self.lease_ms = dice.between(300, 400);
        } else {
            self.lease_ms = dice.between(1_500, 3_000);
            self.raise_calls(&[(Call::Remove, 5)]);
        }
        let mut at = dice.between(800, 1_600);
        while at < self.length_ms {
            let slow = dice.index(self.nodes);
            let wait = dice.between(900, 1_400);
            self.faults
                .push((at, Fault::Disk(slow, DiskFault::Stalls, wait)));
            if are_lost {
                let other = Process::Node((slow + 1) % self.nodes);
                let dies = Fault::Crash(other, dice.between(30, 80));
                self.faults.push((at + dice.between(60, 250), dies));
            }
            at += wait + dice.between(300, 900);
        }
    }
}
