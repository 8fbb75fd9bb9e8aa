//! Nodes that leave while their disks are being attached, and while puts are under way.

use super::{Call, Fault, Logged, Moment, Plan, Said, Trick};
use crate::dice::{Dice, Stream};

impl Plan {
    /// From a stream of its own. Records of media and commits are late. A node begins to drain when its disk is
    /// attached and the record of that is on its way. Nothing else loses a block.
    pub(super) fn draw_late_media(&mut self) {
        let dice = Dice::new(self.seed, Stream::LateMedia);
        if !self.keeps_all || !dice.chance(150) {
            return;
        }
        let drains = |fault: &Fault| matches!(fault, Fault::Drain(..) | Fault::OutOfService(..));
        self.keep_faults(|fault| fault.loss().is_none() && !drains(fault));
        self.keep_nodes_and_disks();
        self.add_roomy_disks(&dice);
        self.nodes = if dice.chance(700) { 1 } else { 2 };
        self.clients = self.clients.max(2);
        self.tasks = 3;
        self.longest_pause = self.longest_pause.min(30_000);
        self.length_ms = self.length_ms.max(8_000);
        self.raise_calls(&[(Call::Put, 12)]);
        let node = dice.index(self.nodes);
        let leaves = Fault::Drain(node, dice.between(30, 300));
        let late = Trick::Late(dice.between(300, 900));
        self.lies_in_wait(Moment::Logs(Logged::Medium), (800, 12), 0, late);
        let late = Trick::Late(dice.between(200, 800));
        self.lies_in_wait(Moment::Asks("Commit"), (400, 80), 0, late);
        let after = dice.between(10_000, 150_000);
        let attached = Moment::Says(Said::MediumAttached);
        self.lies_in_wait(attached, (600, 4), after, Trick::Fault(leaves));
    }
}
