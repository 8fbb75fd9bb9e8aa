//! What each fault may take from a node. Rules ask here which loss a fault excuses.

use super::{DiskFault, Fault, Process};

/// What a fault may take from a node. Each one takes more from the disk than those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Loss {
    /// What is in memory.
    Memory,
    /// For a while, all answers of the disk.
    Answers,
    /// What is being written to the disk.
    Writes,
    /// What is on the disk.
    Disk,
}

impl Fault {
    /// The node that the fault may take something from, and what.
    pub(crate) const fn loss(&self) -> Option<(usize, Loss)> {
        let (node, loss) = match *self {
            Self::Crash(Process::Node(node), _)
            | Self::Leave(node, _)
            | Self::LittleMemory(node, ..) => (node, Loss::Memory),
            Self::Disk(node, DiskFault::Stalls, _) => (node, Loss::Answers),
            Self::Disk(node, DiskFault::Fails | DiskFault::IsFull, _) => (node, Loss::Writes),
            Self::Disk(
                node,
                DiskFault::IsGone
                | DiskFault::Rots
                | DiskFault::LosesFlushes
                | DiskFault::BadSector,
                _,
            )
            | Self::PowerCut(node, _)
            | Self::RolledBack(node, _)
            | Self::Cloned(_, node, _)
            | Self::NewDisk(node, _)
            | Self::Detach(node) => (node, Loss::Disk),
            // Nodes keep their blocks, or hand them over.
            Self::Crash(Process::Master(_) | Process::Client(_), _)
            | Self::Drain(..)
            | Self::OutOfService(..)
            | Self::Retire(..)
            | Self::LeaderDies(_)
            | Self::Stop(..)
            | Self::Cut(..)
            | Self::StoreStalls(..)
            | Self::StoreUnknown(..)
            | Self::StoreFull(_)
            | Self::ClockJumps(..)
            | Self::Intruder(_) => return None,
            // The blocks of a namespace leave by order.
            Self::Quota(..) | Self::Delete(..) => return None,
        };
        Some((node, loss))
    }

    /// Whether the fault may take something from a disk, or keep it from being written.
    pub(crate) fn harms_disk(&self) -> bool {
        self.loss().is_some_and(|(_, loss)| loss >= Loss::Writes)
    }

    /// Whether the node of the fault has less memory from then on.
    pub(crate) const fn takes_memory(&self) -> bool {
        matches!(self, Self::LittleMemory(..))
    }

    /// Whether the fault is an administrator's order after which blocks of a namespace leave.
    pub(crate) const fn takes_from_namespace(&self) -> bool {
        matches!(self, Self::Quota(..) | Self::Delete(..))
    }
}

impl super::Plan {
    /// The faults that may take something from a node, and what.
    pub(crate) fn losses(&self) -> impl Iterator<Item = (usize, Loss)> {
        self.all_faults().filter_map(Fault::loss)
    }

    /// Whether an administrator deletes this namespace.
    pub(crate) fn deletes(&self, tenant: usize) -> bool {
        let mut faults = self.all_faults();
        faults.any(|fault| matches!(fault, Fault::Delete(who, _) if *who == tenant))
    }
}
