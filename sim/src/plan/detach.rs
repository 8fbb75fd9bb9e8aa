//! Disks that an operator has the pool forget while their nodes are away.

use super::{DiskFault, Fault, Logged, Moment, Plan, Process, Said, Trick};
use crate::dice::{Dice, Stream};

impl Plan {
    /// From a stream of its own. Records of media are late. So a disk is forgotten while the record of its attachment
    /// is on its way to the log.
    pub(super) fn draw_detachments(&mut self) {
        let dice = Dice::new(self.seed, Stream::Detachments);
        // A format takes both superblocks, and one of them may be damaged already.
        let loses = |fault: &Fault| matches!(fault, Fault::Disk(_, DiskFault::LosesFlushes, _));
        let loses_flushes = self.all_faults().any(loses);
        let keeps = self.keeps_a_namespace();
        if keeps || !self.has_wide_disks() || loses_flushes || !dice.chance(80) {
            return;
        }
        self.ssd_drop_ms = None;
        let node = dice.index(self.nodes);
        let late = dice.between(300, 800);
        let logged = Moment::Logs(Logged::Medium);
        // Each attachment has two records, and each node that starts again attaches its disk anew.
        self.lies_in_wait(logged, (700, 24), 0, Trick::Late(late));
        // The master has heard of the attachment by then.
        let dies = Fault::Crash(Process::Node(node), late + 400);
        let attached = Moment::Says(Said::MediumAttached);
        self.lies_in_wait(attached, (700, 6), 20_000, Trick::Fault(dies));
        let forgets = Trick::Fault(Fault::Detach(node));
        let after = dice.between(60_000, 200_000);
        self.lies_in_wait(attached, (700, 6), after, forgets);
        for _ in 0..dice.between(1, 3) {
            let at = dice.between(1_000, self.length_ms);
            self.faults.push((at, Fault::Detach(node)));
        }
    }
}
