//! Blocks that move from node to node while their keys change, and while nodes leave.

use super::{Ambush, Call, Fault, Logged, Moment, Plan, Process, Said, Trick};
use crate::dice::{Dice, Stream};

impl Plan {
    /// From a stream of its own. Few keys, whose blocks move often. Records are late on their way to the log, and nodes
    /// leave just then.
    pub(super) fn draw_moves(&mut self) {
        let dice = Dice::new(self.seed, Stream::Moves);
        // Shares were drawn for as many replicas as there are nodes.
        let has_settings = self.tenants.iter().any(|one| !one.settings.is_empty());
        if self.keeps_all || has_settings && self.nodes < 2 || !dice.chance(200) {
            return;
        }
        self.nodes = self.nodes.max(2);
        self.keys = self.keys.min(14);
        self.two_replicas = dice.chance(500);
        self.noise.flipped_writes = 0;
        self.longest_pause = self.longest_pause.min(30_000);
        self.mix.raise(Call::Put, 6);
        self.mix.raise(Call::Upsert, 3);
        self.mix.raise(Call::ChangeReplicas, 12);
        let late = |at, share, most| Ambush {
            at,
            share,
            times: 12,
            after: 0,
            trick: Trick::Late(dice.between(20, most)),
        };
        let mut ambushes = vec![match dice.below(3) {
            // An upsert is on its way to the log when a replica of the earlier version arrives.
            0 => late(Moment::Logs(Logged::Block), 300, 300),
            1 => late(Moment::Logs(Logged::ReplicaAdded), 400, 600),
            _ => late(Moment::Says(Said::Pulled), 400, 600),
        }];
        // A target leaves while the record of its replica is on its way.
        if dice.chance(600) {
            ambushes.push(late(Moment::Logs(Logged::ReplicaAdded), 400, 300));
        }
        let node = dice.index(self.nodes);
        let down = dice.between(30, 1_000);
        let trick = match dice.below(5) {
            0 | 1 => Trick::Fault(Fault::Leave(node, down)),
            2 => Trick::Fault(Fault::Drain(node, down)),
            3 => Trick::Fault(Fault::Crash(Process::Node(node), down)),
            _ => Trick::Touch(Call::Upsert),
        };
        ambushes.push(Ambush {
            at: match dice.chance(700) {
                true => Moment::Logs(Logged::ReplicaAdded),
                false => Moment::Says(Said::Pulls),
            },
            share: 150,
            times: 5,
            after: [0, 300, 3_000][dice.index(3)],
            trick,
        });
        // A node that died a moment ago still counts as one that can be read.
        for _ in 0..dice.below(3) {
            let crash = Fault::Crash(Process::Node(dice.index(self.nodes)), down);
            self.faults.push((dice.between(500, self.length_ms), crash));
        }
        self.ambushes.append(&mut ambushes);
    }
}
