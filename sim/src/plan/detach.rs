//! Disks that an operator has the pool forget while their nodes are away.

use super::{Ambush, DiskFault, Fault, Logged, Moment, NARROW, Plan, Process, Said, Tenant, Trick};
use crate::dice::{Dice, Stream};

impl Plan {
    /// From a stream of its own. Records of media are late. So a disk is forgotten while the record of its attachment
    /// is on its way to the log.
    pub(super) fn draw_detachments(&mut self) {
        let dice = Dice::new(self.seed, Stream::Detachments);
        let keeps = self.keeps_all || self.tenants.iter().any(Tenant::keeps_all);
        let has_room = self.has_disks() && self.disk_bytes != NARROW;
        // A format takes both superblocks, and one of them may be damaged already.
        let loses = |fault: &Fault| matches!(fault, Fault::Disk(_, DiskFault::LosesFlushes, _));
        let loses_flushes = self.all_faults().any(loses);
        if keeps || !has_room || loses_flushes || !dice.chance(80) {
            return;
        }
        self.ssd_drop_ms = None;
        let node = dice.index(self.nodes);
        let late = dice.between(300, 800);
        let mut lies_in_wait = |at, share, after, trick| {
            self.ambushes.push(Ambush {
                at,
                share,
                times: 6,
                after,
                trick,
            });
        };
        lies_in_wait(Moment::Logs(Logged::Medium), 500, 0, Trick::Late(late));
        // The master has heard of the attachment by then.
        let dies = Fault::Crash(Process::Node(node), late + 400);
        let attached = Moment::Says(Said::MediumAttached);
        lies_in_wait(attached, 700, 20_000, Trick::Fault(dies));
        let forgets = Trick::Fault(Fault::Detach(node));
        lies_in_wait(attached, 700, dice.between(60_000, 200_000), forgets);
        for _ in 0..dice.between(1, 3) {
            let at = dice.between(1_000, self.length_ms);
            self.faults.push((at, Fault::Detach(node)));
        }
    }
}
