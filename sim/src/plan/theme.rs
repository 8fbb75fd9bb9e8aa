//! Themes: a history goes for one kind of meeting of calls, records and faults. Chance alone seldom brings its parts
//! together within the milliseconds that matter.

use super::{Call, DiskFault, Fault, Logged, Moment, Plan, Process, Said, Tenant, Trick};
use crate::dice::{Dice, Stream};

impl Plan {
    /// From a stream of its own.
    pub(super) fn draw_theme(&mut self) {
        let dice = Dice::new(self.seed, Stream::Themes);
        // Each theme removes or replaces blocks, or loses nodes.
        if self.keeps_a_namespace() || !dice.chance(550) {
            return;
        }
        match dice.below(9) {
            0 => self.moves_under_leases(&dice),
            1 => self.pulls_and_departures(&dice),
            2 => self.deaths_after_loads(&dice),
            3 => self.removals_beside_transfers(&dice),
            4 => self.slow_disks(&dice),
            5 => self.damaged_replicas(&dice),
            6 => self.leases_over_restarts(&dice),
            7 => self.reads_over_terms(&dice),
            _ => self.hot_keys(&dice),
        }
    }

    /// Nodes have disks, and blocks leave memory and come back.
    pub(super) fn needs_disks(&mut self, dice: &Dice) {
        if self.has_disks() {
            return;
        }
        self.add_roomy_disks(dice);
        self.halve_memory();
        self.longest_pause = self.longest_pause.min(40_000);
    }

    /// Readers hold leases on blocks that move. The record of the place that a block left is late, and snapshots are
    /// written meanwhile. Other versions are put while the earlier ones are copied.
    fn moves_under_leases(&mut self, dice: &Dice) {
        self.nodes = self.nodes.max(2);
        self.lease_ms = dice.between(2_000, 5_000);
        self.longest_pause = self.longest_pause.min(30_000);
        self.raise_calls(&[
            (Call::ChangeReplicas, 6),
            (Call::Hold, 5),
            (Call::Get, 6),
            (Call::Upsert, 3),
        ]);
        let late = Trick::Late(dice.between(60, 300));
        self.lies_in_wait(Moment::Logs(Logged::ReplicaGone), (400, 8), 0, late);
        if dice.chance(600) {
            let late = Trick::Late(dice.between(10, 60));
            self.lies_in_wait(Moment::Logs(Logged::Block), (300, 20), 0, late);
            let after = [0, 300, 3_000][dice.index(3)];
            let replaces = Trick::Touch(Call::Upsert);
            self.lies_in_wait(Moment::Says(Said::Pulls), (400, 15), after, replaces);
        }
    }

    /// The source of a pull leaves while the target tells that it has the block.
    fn pulls_and_departures(&mut self, dice: &Dice) {
        self.nodes = self.nodes.max(2);
        self.longest_pause = self.longest_pause.min(60_000);
        self.raise_calls(&[(Call::ChangeReplicas, 8), (Call::Get, 4)]);
        // A leader forgets the blocks of a node that left within 20 ms.
        let late = Trick::Late(dice.between(2, 9));
        self.lies_in_wait(Moment::Says(Said::Pulled), (600, 40), 0, late);
        for _ in 0..dice.between(2, 4) {
            let leaves = Fault::Leave(dice.index(self.nodes), dice.between(30, 500));
            let trick = Trick::Fault(leaves);
            self.lies_in_wait(Moment::Says(Said::Pulled), (250, 4), 0, trick);
        }
    }

    /// Leaders die one after the other within one lease, each just after it has given one. So records of loads, and
    /// of places that removed blocks left, are lost with them.
    fn deaths_after_loads(&mut self, dice: &Dice) {
        self.needs_disks(dice);
        self.lease_ms = dice.between(4_000, 6_000);
        self.longest_pause = self.longest_pause.min(30_000);
        self.raise_calls(&[(Call::Hold, 8), (Call::Get, 8), (Call::Remove, 3)]);
        for _ in 0..dice.between(2, 3) {
            let mut at = dice.between(500, self.length_ms);
            for _ in 0..dice.between(2, 3) {
                let dies = Fault::LeaderDies(dice.between(30, 200));
                self.faults.push((at, dies));
                at += dice.between(400, 1_000);
            }
            self.length_ms = self.length_ms.max(at + 1_000);
        }
        if dice.chance(500) {
            let late = Trick::Late(dice.between(50, 400));
            self.lies_in_wait(Moment::Logs(Logged::Leases), (300, 6), 0, late);
        }
    }

    /// Blocks are removed, replaced and read while they come back from a disk, or are copied there. The records of all
    /// that are late. In some of these histories readers find wrong bytes, so blocks come back that are in memory.
    fn removals_beside_transfers(&mut self, dice: &Dice) {
        self.needs_disks(dice);
        self.raise_calls(&[(Call::Hold, 5), (Call::Get, 8)]);
        if dice.chance(300) {
            self.noise.flipped = dice.between(50, 200);
            self.lease_ms = dice.between(300, 700);
            let late = Trick::Late(dice.between(500, 1_200));
            self.lies_in_wait(Moment::Logs(Logged::Block), (100, 3), 0, late);
        }
        let after = |dice: &Dice| [0, 300, 3_000][dice.index(3)];
        for said in [Said::Transfers, Said::TransfersDone] {
            for call in [Call::Remove, Call::Upsert, Call::Hold] {
                if dice.chance(600) {
                    let trick = Trick::Touch(call);
                    self.lies_in_wait(Moment::Says(said), (200, 10), after(dice), trick);
                }
            }
        }
        for logged in [Logged::Removal, Logged::Block, Logged::Copy] {
            if dice.chance(500) {
                let late = Trick::Late(dice.between(10, 120));
                self.lies_in_wait(Moment::Logs(logged), (250, 10), 0, late);
            }
        }
    }

    /// One disk is slow, and the others are not. Blocks leave memory, are removed and put again while the slow one
    /// still writes or reads them. In some of these histories the nodes with the other disks die meanwhile.
    fn slow_disks(&mut self, dice: &Dice) {
        self.nodes = self.nodes.max(2);
        self.needs_disks(dice);
        self.raise_calls(&[
            (Call::Put, 8),
            (Call::Upsert, 3),
            (Call::Remove, 3),
            (Call::Hold, 4),
        ]);
        let slow = dice.index(self.nodes);
        let dies = dice.chance(400);
        for _ in 0..dice.between(2, 4) {
            let at = dice.between(500, self.length_ms);
            let ms = dice.between(500, 2_500);
            self.faults
                .push((at, Fault::Disk(slow, DiskFault::Stalls, ms)));
            if dies {
                let other = Process::Node((slow + 1) % self.nodes);
                let crash = Fault::Crash(other, dice.between(30, 150));
                self.faults.push((at + dice.between(20, 300), crash));
            }
        }
    }

    /// Nodes die and are back at once, while readers hold leases. Their disks are slow then, so blocks stay on them
    /// alone for a while.
    fn leases_over_restarts(&mut self, dice: &Dice) {
        self.needs_disks(dice);
        self.lease_ms = dice.between(3_000, 6_000);
        self.longest_pause = self.longest_pause.min(30_000);
        self.raise_calls(&[(Call::Hold, 12), (Call::Get, 4), (Call::Prefix, 3)]);
        for _ in 0..dice.between(3, 6) {
            let at = dice.between(800, self.length_ms);
            let node = dice.index(self.nodes);
            let down = dice.between(30, 150);
            let slow = down + dice.between(300, 1_200);
            self.faults
                .push((at, Fault::Crash(Process::Node(node), down)));
            self.faults
                .push((at, Fault::Disk(node, DiskFault::Stalls, slow)));
        }
        if dice.chance(300) {
            let node = dice.index(self.nodes);
            let dies = Fault::Crash(Process::Node(node), dice.between(30, 150));
            let trick = Trick::Fault(dies);
            self.lies_in_wait(Moment::Says(Said::TransfersDone), (100, 2), 0, trick);
            let late = Trick::Late(dice.between(20, 150));
            self.lies_in_wait(Moment::Logs(Logged::Removal), (300, 8), 0, late);
        }
    }

    /// Replicas with a wrong byte are found by readers, while others hold leases on their places.
    fn damaged_replicas(&mut self, dice: &Dice) {
        self.nodes = self.nodes.max(2);
        self.lease_ms = dice.between(1_500, 4_000);
        self.longest_pause = self.longest_pause.min(40_000);
        self.noise.flipped = self.noise.flipped.max(1);
        self.noise.flipped_writes = dice.between(40, 150);
        // The other replica keeps the block, and the leases on it go on.
        self.two_replicas = true;
        self.raise_calls(&[(Call::Put, 8), (Call::Hold, 12), (Call::Get, 8)]);
    }

    /// Slow readers show signed locations of large blocks that are replaced. Leases are short, and memory has room for
    /// a few blocks. So the next leader grants what a reader of the last term is still being sent.
    fn reads_over_terms(&mut self, dice: &Dice) {
        self.has_signed_reads = true;
        self.longest_block = 150_000;
        self.one_length = Some(dice.between(70_000, 140_000));
        self.segments = 1;
        self.segment_bytes = (5 * self.longest_block).next_multiple_of(64 << 10);
        self.keys = dice.between(4, 8);
        // Their quotas are drawn for shorter blocks.
        self.tenants = vec![Tenant::default()];
        self.faults
            .retain(|(_, fault)| !fault.takes_from_namespace());
        self.clients = self.clients.max(2);
        self.tasks = 3;
        self.lease_ms = dice.between(300, 400);
        self.longest_pause = self.longest_pause.min(30_000);
        self.noise.slow = self.noise.slow.max(80);
        self.raise_calls(&[(Call::Upsert, 8), (Call::Get, 12)]);
        let mut at = dice.between(600, 1_200);
        while at < self.length_ms {
            let master = dice.index(self.masters());
            let down = dice.between(30, 120);
            let fault = match dice.chance(500) {
                true => Fault::Retire(master, down),
                false => Fault::Crash(Process::Master(master), down),
            };
            self.faults.push((at, fault));
            at += dice.between(600, 1_600);
        }
        // The leases of the last term are over when a node hears of the next one, and puts wait for its room.
        let late = Trick::Late(dice.between(300, 700));
        self.lies_in_wait(Moment::Says(Said::Register), (500, 10), 0, late);
    }

    /// A few keys that all clients put, remove and lease. A removal and leases come while a commit of the key is on its
    /// way.
    fn hot_keys(&mut self, dice: &Dice) {
        self.keys = dice.between(2, 6);
        self.clients = self.clients.max(2);
        self.lease_ms = dice.between(1_000, 3_000);
        self.longest_pause = self.longest_pause.min(30_000);
        self.length_ms = self.length_ms.min(6_000);
        let end = self.length_ms;
        self.faults.retain(|(at, _)| *at <= end);
        self.raise_calls(&[
            (Call::Upsert, 6),
            (Call::Remove, 2),
            (Call::Prefix, 3),
            (Call::Hold, 6),
            (Call::Get, 6),
        ]);
        let commit = Moment::Asks("Commit");
        let late = Trick::Late(dice.between(10, 60));
        self.lies_in_wait(commit, (500, 40), 0, late);
        for (call, after) in [
            (Call::Hold, 0),
            (Call::Prefix, 0),
            (Call::Remove, 3_000),
            (Call::Hold, 70_000),
        ] {
            self.lies_in_wait(commit, (400, 25), after, Trick::Touch(call));
        }
    }
}
