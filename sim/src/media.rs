//! What a disk returns for a copy that a master recorded.
//!
//! A copy is recorded once its bytes are on the disk. Nothing writes there while the master knows the copy at this
//! place. So a disk to which nothing happened returns the right bytes for it.

use kvpool_master::pool::Pool;
use kvpool_proto::{self as proto, master_message, node_message};
use kvpool_types::{Code, Offset, SegmentId, Version};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};

/// An order to read a copy from a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskRead {
    node: usize,
    version: Version,
    segment: SegmentId,
    offset: Offset,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Media {
    /// The open orders that read a disk, by the master, the node and the ticket.
    reads: Mutex<BTreeMap<(usize, usize, u64), DiskRead>>,
    /// The nodes whose disks may return wrong bytes, or errors for single ranges.
    damaged: Mutex<BTreeSet<usize>>,
}

impl Media {
    /// From now on the disk of a node may return wrong bytes.
    pub(crate) fn is_damaged(&self, node: usize) {
        self.damaged.lock().insert(node);
    }

    /// A master orders something of a node.
    pub(crate) fn orders(&self, master: usize, node: usize, message: &proto::MasterMessage) {
        let Some(master_message::Body::Transfers(orders)) = &message.body else {
            return;
        };
        let mut reads = self.reads.lock();
        for order in &orders.transfers {
            // A later term, or a later life of the master, gives its tickets anew.
            reads.remove(&(master, node, order.ticket));
            let Some(from) = &order.from else { continue };
            let segment = SegmentId(from.segment);
            if segment.is_on_medium() {
                let read = DiskRead {
                    node,
                    version: Version(order.version),
                    segment,
                    offset: Offset(from.offset),
                };
                reads.insert((master, node, order.ticket), read);
            }
        }
    }

    /// A node answers a master. Returns a read that found wrong bytes on a disk to which nothing happened. A block in
    /// memory may change while it is stored, so only reads of disks are judged. A device that is gone or full has
    /// other codes.
    pub(crate) fn wrong_read(
        &self,
        master: usize,
        node: usize,
        message: &proto::NodeMessage,
    ) -> Option<DiskRead> {
        let Some(node_message::Body::TransfersDone(done)) = &message.body else {
            return None;
        };
        let wrong = u32::from(Code::ChecksumMismatch.to_wire());
        let mut found = None;
        let mut reads = self.reads.lock();
        for done in &done.transfers {
            let read = reads.remove(&(master, node, done.ticket));
            if done.code == wrong {
                found = read.or(found);
            }
        }
        found.filter(|_| !self.damaged.lock().contains(&node))
    }
}

impl DiskRead {
    /// What is wrong, if the master still has the copy at this place. A copy that has left it may be written over: a
    /// load that waited for room reads the place that it knew.
    pub(crate) fn judge(self, pool: &Pool) -> Option<String> {
        let Self {
            node,
            version,
            segment,
            offset,
        } = self;
        let mut copies = pool.stored_copies().into_iter();
        let is_there = copies.any(|copy| {
            let mut places = copy.replicas.iter();
            copy.version == version && places.any(|at| at.segment == segment && at.offset == offset)
        });
        is_there.then(|| {
            format!(
                "n{node} finds wrong bytes for the copy of version {version} at {offset} of {segment}, and nothing \
                 happened to its disk"
            )
        })
    }
}
