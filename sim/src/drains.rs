//! Nodes that leave in order, in histories where nothing else loses a block.

use crate::dice::{Dice, Stream};
use crate::plan::{Ambush, Fault, LATE_DROP, Plan, Trick};

impl Plan {
    /// From a stream of its own: faults that excuse a loss give way to drains, of several nodes at once. Every
    /// acknowledged block must be there at the end.
    pub(crate) fn draw_quiet_drains(&mut self) {
        let dice = Dice::new(self.seed, Stream::Quiet);
        if !self.keeps_all || self.nodes < 2 || !dice.chance(600) {
            return;
        }
        // What excuses a lost block would hide what a drain lost. Drains of all nodes at once leave nobody who stays.
        let stays = |fault: &Fault| fault.loss().is_none() && !matches!(fault, Fault::Drain(..));
        self.faults.retain(|(_, fault)| stays(fault));
        let is_calm = |ambush: &Ambush| match &ambush.trick {
            Trick::Fault(fault) => stays(fault),
            _ => true,
        };
        self.ambushes.retain(is_calm);
        self.noise.flipped_writes = 0;
        self.drop_ms = LATE_DROP;
        if dice.chance(700) {
            // On a disk the blocks of a node that left wait for its next life.
            self.disk_bytes = 0;
        }
        // Two may leave, and one stays.
        self.nodes = self.nodes.max(3);
        // Puts are under way when nodes leave.
        self.clients = self.clients.max(2);
        self.tasks = 3;
        self.longest_pause = self.longest_pause.min(40_000);
        self.noise.slow = self.noise.slow.max(50);
        let mut at = 0;
        for _ in 0..dice.between(2, 4) {
            // A node that comes too late finds none that stays, and leaves with its blocks.
            at += dice.between(1_000, 4_000);
            let node = dice.index(self.nodes);
            let down = dice.between(30, 800);
            self.faults.push((at, Fault::Drain(node, down)));
            if dice.chance(600) {
                let next = Fault::Drain((node + 1) % self.nodes, down);
                let later = [3, 20, 200][dice.index(3)];
                self.faults.push((at + dice.below(later), next));
            }
        }
        self.length_ms = self.length_ms.max(at + 2_000);
    }
}
