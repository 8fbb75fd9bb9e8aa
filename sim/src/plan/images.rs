//! Old images of disks: one comes into another node while the node that has the original is away.

use super::{Fault, Plan, Process};
use crate::dice::{Dice, Stream};

impl Plan {
    /// From a stream of its own. Nothing else takes bytes from disks, so the original must stay known.
    pub(super) fn draw_old_images(&mut self) {
        let dice = Dice::new(self.seed, Stream::Images);
        let may_have_another = self.nodes > 1 || !self.has_settings();
        let keeps = self.keeps_a_namespace();
        if keeps || !self.has_wide_disks() || !may_have_another || !dice.chance(100) {
            return;
        }
        self.keep_faults(|fault| !fault.harms_disk());
        self.ssd_drop_ms = None;
        self.nodes = self.nodes.max(2);
        let holder = dice.index(self.nodes);
        let other = (holder + 1 + dice.index(self.nodes - 1)) % self.nodes;
        // The disk of the first life was blank at its begin. The second life has attached it once more.
        let mut at = dice.between(800, 2_500);
        let restarts = Fault::Crash(Process::Node(holder), dice.between(30, 200));
        self.faults.push((at, restarts));
        at += dice.between(1_000, 2_500);
        let down = dice.between(60, 400);
        self.faults.push((at, Fault::Cloned(holder, other, down)));
        let away = 2 * down + dice.between(500, 3_000);
        let leaves = Fault::Crash(Process::Node(holder), away);
        self.faults.push((at + dice.below(down), leaves));
        self.length_ms = self.length_ms.max(at + away);
    }
}
