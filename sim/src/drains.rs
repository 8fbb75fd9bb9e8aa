//! Nodes that leave in order, in histories where nothing else loses a block.

use crate::dice::{Dice, Stream};
use crate::plan::{Fault, Plan, Process};

impl Plan {
    /// From a stream of its own: faults that excuse a loss give way to drains, of several nodes at once. Every
    /// acknowledged block must be there at the end.
    pub(crate) fn draw_quiet_drains(&mut self) {
        let dice = Dice::new(self.seed, Stream::Quiet);
        if !self.keeps_all || self.nodes < 2 || !dice.chance(600) {
            return;
        }
        self.faults.retain(|(_, fault)| !may_lose_blocks(fault));
        // Puts are under way when nodes leave.
        self.clients = self.clients.max(2);
        self.tasks = 3;
        self.longest_pause = self.longest_pause.min(40_000);
        self.noise.slow = self.noise.slow.max(50);
        let mut at = 0;
        for _ in 0..dice.between(1, 4) {
            at += dice.between(300, 3_000);
            let node = dice.index(self.nodes);
            let down = dice.between(30, 1_500);
            self.faults.push((at, Fault::Drain(node, down)));
            if self.nodes > 2 && dice.chance(600) {
                let next = Fault::Drain((node + 1) % self.nodes, down);
                self.faults.push((at + dice.below(200), next));
            }
        }
        self.length_ms = self.length_ms.max(at + 2_000);
    }
}

/// Whether a node may lose blocks that have no other replica.
pub(crate) fn may_lose_blocks(fault: &Fault) -> bool {
    matches!(
        fault,
        Fault::Crash(Process::Node(_), _)
            | Fault::Leave(..)
            | Fault::LittleMemory(..)
            | Fault::PowerCut(..)
            | Fault::RolledBack(..)
            | Fault::Cloned(..)
            | Fault::NewDisk(..)
            | Fault::Disk(..)
    )
}
