//! Meetings of several records, orders and faults that are all under way at once. A history may have one of them beside
//! its theme.

use super::{Call, DiskFault, Fault, Logged, Moment, Plan, Process, Said, Tenant, Trick};
use crate::dice::{Dice, Stream};

impl Plan {
    /// From a stream of its own.
    pub(super) fn draw_meeting(&mut self) {
        let dice = Dice::new(self.seed, Stream::Meetings);
        // Each one removes or replaces blocks, or loses nodes.
        if self.keeps_a_namespace() || !dice.chance(400) {
            return;
        }
        match dice.below(7) {
            0 => self.short_terms(&dice),
            1 => self.deletions_beside_stores(&dice),
            2 => self.snapshots_beside_moves(&dice),
            3 => self.pulls_of_lost_blocks(&dice),
            4 => self.changes_of_stored_blocks(&dice),
            5 => self.commits_on_lost_nodes(&dice),
            _ => self.removals_beside_loads(&dice),
        }
    }

    /// Leaders die soon after their election, and stay away. Whoever lost against them hears of no leader meanwhile.
    /// Nobody else is left to lead.
    fn short_terms(&mut self, dice: &Dice) {
        self.electing = 3;
        self.drift.resize(3, 0);
        self.clients = self.clients.max(2);
        self.length_ms = self.length_ms.max(15_000);
        self.longest_pause = self.longest_pause.min(60_000);
        self.raise_calls(&[(Call::Put, 8), (Call::Get, 12), (Call::Hold, 3)]);
        let late = Trick::Late(dice.between(2_600, 3_800));
        self.lies_in_wait(Moment::Loses, (1_000, 4), 0, late);
        let dies = Trick::Fault(Fault::LeaderDies(dice.between(11_000, 13_000)));
        self.lies_in_wait(Moment::Loses, (1_000, 2), 0, dies);
    }

    /// A namespace is deleted while its only blocks are being copied to slow disks and have left memory. They were put
    /// just after an earlier deletion, and blocks of other namespaces have taken their places.
    fn deletions_beside_stores(&mut self, dice: &Dice) {
        self.needs_disks(dice);
        self.tenants = vec![Tenant::default(); 3];
        self.keep_faults(|fault| !fault.takes_from_namespace());
        self.clients = 3;
        self.tasks = 2;
        // A lease keeps a block in memory.
        self.lease_ms = self.lease_ms.min(dice.between(300, 600));
        self.longest_pause = self.longest_pause.min(80_000);
        self.raise_calls(&[(Call::Put, 10), (Call::Upsert, 4)]);
        let mut at = dice.between(800, 1_500);
        for _ in 0..2 {
            let stalls = dice.between(2_000, 3_500);
            self.faults.push((at, Fault::Delete(0, 1)));
            at += dice.between(60, 150);
            for node in 0..self.nodes {
                self.faults
                    .push((at, Fault::Disk(node, DiskFault::Stalls, stalls)));
            }
            // No other client puts blocks into this namespace.
            let quiet = at + dice.between(150, 500);
            let crash = Fault::Crash(Process::Client(0), stalls);
            self.faults.push((quiet, crash));
            let deleted = at + stalls - dice.between(100, 900);
            self.faults.push((deleted, Fault::Delete(0, 1)));
            at += stalls + dice.between(1_500, 2_500);
        }
        self.length_ms = self.length_ms.max(at);
    }

    /// Blocks move while readers hold leases on them. Snapshots are written while the records of the places that the
    /// blocks left are on their way.
    fn snapshots_beside_moves(&mut self, dice: &Dice) {
        self.nodes = self.nodes.max(2);
        self.keys = self.keys.min(16);
        self.lease_ms = dice.between(2_000, 5_000);
        self.longest_pause = self.longest_pause.min(40_000);
        self.raise_calls(&[(Call::ChangeReplicas, 12), (Call::Hold, 8), (Call::Get, 6)]);
        // Several shards are written before the record is there.
        let late = Trick::Late(dice.between(90, 180));
        self.lies_in_wait(Moment::Logs(Logged::ReplicaGone), (500, 40), 0, late);
    }

    /// The only place of a block is lost while the block is pulled from there. The log is slow, so the replica and the
    /// loss wait for it together. Then the block is removed, or comes back from the disk of the pull's target.
    fn pulls_of_lost_blocks(&mut self, dice: &Dice) {
        self.nodes = self.nodes.max(2);
        self.needs_disks(dice);
        self.segments = 1;
        self.keys = self.keys.min(20);
        self.noise.flipped_writes = 0;
        self.longest_pause = self.longest_pause.min(40_000);
        self.raise_calls(&[(Call::ChangeReplicas, 12), (Call::Put, 10), (Call::Get, 6)]);
        let late = Trick::Late(dice.between(80, 250));
        for (logged, share) in [
            (Logged::Block, 250),
            (Logged::Copy, 250),
            (Logged::ReplicaAdded, 400),
        ] {
            self.lies_in_wait(Moment::Logs(logged), (share, 20), 0, late);
        }
        let late = Trick::Late(dice.between(60, 250));
        self.lies_in_wait(Moment::Logs(Logged::ReplicaGone), (800, 40), 0, late);
        for _ in 0..dice.between(3, 5) {
            let leaves = Fault::Leave(dice.index(self.nodes), dice.between(30, 300));
            let after = [0, 1_000, 3_000][dice.index(3)];
            let trick = Trick::Fault(leaves);
            self.lies_in_wait(Moment::Says(Said::Pulled), (200, 3), after, trick);
        }
        let call = match dice.chance(500) {
            true => Call::Remove,
            false => Call::Get,
        };
        // The leader forgets the blocks of a node that left within 20 ms.
        let touch = Trick::Touch(call);
        self.lies_in_wait(Moment::Says(Said::Pulled), (800, 80), 40_000, touch);
    }

    /// A block leaves memory while slow disks still write its copies. At once its key is put again. Or it is removed
    /// when the disk of one node has written its copy, and that of another node has not.
    fn changes_of_stored_blocks(&mut self, dice: &Dice) {
        self.nodes = self.nodes.max(2);
        self.needs_disks(dice);
        // Shares were drawn for blocks with fewer replicas.
        self.two_replicas |= !self.has_settings() && dice.chance(600);
        self.lease_ms = self.lease_ms.min(dice.between(300, 600));
        self.longest_pause = self.longest_pause.min(40_000);
        self.raise_calls(&[(Call::Put, 10), (Call::Get, 4)]);
        let slow = dice.index(self.nodes);
        let mut at = dice.between(500, 1_500);
        let short = dice.between(200, 500);
        for _ in 0..dice.between(3, 5) {
            for node in 0..self.nodes {
                let ms = match node == slow {
                    true => 2 * short + dice.between(100, 500),
                    false => short,
                };
                let stalls = Fault::Disk(node, DiskFault::Stalls, ms);
                self.faults.push((at, stalls));
            }
            at += dice.between(1_800, 2_600);
        }
        self.length_ms = self.length_ms.max(at);
        let soon = [300, 3_000, 20_000][dice.index(3)];
        for (call, after) in [(Call::Put, soon), (Call::Remove, 1_000 * short)] {
            let touch = Trick::Touch(call);
            self.lies_in_wait(Moment::Logs(Logged::Leaving), (250, 60), after, touch);
        }
    }

    /// The only node leaves for a while, just when the commit of a block there is on its way to the log. No put of the
    /// key succeeds for longer than clients try. The copy of the key's earlier block was on the node's disk.
    fn commits_on_lost_nodes(&mut self, dice: &Dice) {
        self.keep_faults(|fault| !fault.harms_disk() && !fault.takes_from_namespace());
        self.needs_disks(dice);
        self.add_roomy_disks(dice);
        // Shares were drawn for the memory of more nodes.
        self.tenants = vec![Tenant::default()];
        self.nodes = 1;
        self.noise.flipped_writes = 0;
        self.clients = self.clients.max(2);
        self.longest_pause = self.longest_pause.min(40_000);
        self.length_ms = self.length_ms.max(14_000);
        self.raise_calls(&[(Call::Put, 8), (Call::Upsert, 16)]);
        let commits = Moment::Logs(Logged::Block);
        let late = Trick::Late(dice.between(80, 300));
        self.lies_in_wait(commits, (700, 60), 0, late);
        let leaves = Trick::Fault(Fault::Leave(0, dice.between(3_500, 4_500)));
        self.lies_in_wait(commits, (60, 3), 1_000, leaves);
    }

    /// A block that is only on a disk is removed while a reader lets it come back to memory. The record of the removal
    /// is late.
    fn removals_beside_loads(&mut self, dice: &Dice) {
        self.needs_disks(dice);
        self.longest_pause = self.longest_pause.min(40_000);
        self.raise_calls(&[(Call::Put, 6), (Call::Get, 14)]);
        let after = [0, 300, 2_000][dice.index(3)];
        let touch = Trick::Touch(Call::Remove);
        self.lies_in_wait(Moment::Says(Said::Transfers), (300, 60), after, touch);
        let late = Trick::Late(dice.between(4, 15));
        self.lies_in_wait(Moment::Says(Said::TransfersDone), (500, 80), 0, late);
        let late = Trick::Late(dice.between(20, 120));
        self.lies_in_wait(Moment::Logs(Logged::Removal), (700, 60), 0, late);
    }
}
