//! Blocks that move from node to node while their keys change, and while nodes leave.

use super::{Call, Fault, Logged, Moment, Plan, Process, Said, Trick};
use crate::dice::{Dice, Stream};

impl Plan {
    /// From a stream of its own. Few keys, whose blocks move often. Records are late on their way to the log, and nodes
    /// leave just then.
    pub(super) fn draw_moves(&mut self) {
        let dice = Dice::new(self.seed, Stream::Moves);
        // Shares were drawn for as many replicas as there are nodes.
        if self.keeps_all || self.has_settings() && self.nodes < 2 || !dice.chance(200) {
            return;
        }
        self.nodes = self.nodes.max(2);
        self.keys = self.keys.min(14);
        self.two_replicas = dice.chance(500);
        self.noise.flipped_writes = 0;
        self.longest_pause = self.longest_pause.min(30_000);
        self.raise_calls(&[
            (Call::Put, 6),
            (Call::Upsert, 3),
            (Call::ChangeReplicas, 12),
        ]);
        let (at, share, longest) = match dice.below(3) {
            // An upsert is on its way to the log when a replica of the earlier version arrives.
            0 => (Moment::Logs(Logged::Block), 300, 300),
            1 => (Moment::Logs(Logged::ReplicaAdded), 400, 600),
            _ => (Moment::Says(Said::Pulled), 400, 600),
        };
        let late = Trick::Late(dice.between(20, longest));
        self.lies_in_wait(at, (share, 12), 0, late);
        // A target leaves while the record of its replica is on its way.
        if dice.chance(600) {
            let late = Trick::Late(dice.between(20, 300));
            self.lies_in_wait(Moment::Logs(Logged::ReplicaAdded), (400, 12), 0, late);
        }
        let node = dice.index(self.nodes);
        let down = dice.between(30, 1_000);
        let trick = match dice.below(5) {
            0 | 1 => Trick::Fault(Fault::Leave(node, down)),
            2 => Trick::Fault(Fault::Drain(node, down)),
            3 => Trick::Fault(Fault::Crash(Process::Node(node), down)),
            _ => Trick::Touch(Call::Upsert),
        };
        let at = match dice.chance(700) {
            true => Moment::Logs(Logged::ReplicaAdded),
            false => Moment::Says(Said::Pulls),
        };
        let after = [0, 300, 3_000][dice.index(3)];
        self.lies_in_wait(at, (150, 5), after, trick);
        // A node that died a moment ago still counts as one that can be read.
        for _ in 0..dice.below(3) {
            let crash = Fault::Crash(Process::Node(dice.index(self.nodes)), down);
            self.faults.push((dice.between(500, self.length_ms), crash));
        }
    }
}
