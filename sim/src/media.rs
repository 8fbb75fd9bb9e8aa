//! What a disk returns for a copy that a master recorded.
//!
//! A copy is recorded once its bytes are on the disk. Nothing writes there while the master knows the copy at this
//! place. So a read that succeeds finds the right bytes for it, on a disk that has lost no bytes.

use kvpool_master::directory::StoredBlock;
use kvpool_master::pool::Pool;
use kvpool_proto::{self as proto, master_message, node_message};
use kvpool_types::medium::{self, DATA_START};
use kvpool_types::{Code, Length, Offset, SegmentId, Version};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// An order to read a copy from a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskRead {
    node: usize,
    version: Version,
    segment: SegmentId,
    offset: Offset,
    length: Length,
    /// Whether the master had no copy at this place when it sent the order.
    is_late: bool,
    /// Whether the device could not read bytes of this range since then.
    has_failed: bool,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Media {
    /// The open orders that read a disk, by the session and the ticket. A node answers in the session of the order.
    reads: Mutex<BTreeMap<(u64, u64), DiskRead>>,
    /// The nodes whose disks may return wrong bytes.
    damaged: Mutex<BTreeSet<usize>>,
}

impl Media {
    /// From now on the disk of a node may return wrong bytes.
    pub(crate) fn note_damage(&self, node: usize) {
        self.damaged.lock().insert(node);
    }

    /// A node that does not run has a new disk.
    pub(crate) fn note_new_disk(&self, node: usize) {
        self.damaged.lock().remove(&node);
    }

    /// The device of a node cannot read these bytes now. The answer to whoever ordered that has the code of wrong
    /// bytes.
    pub(crate) fn cannot_read(&self, node: usize, range: &Range<u64>) {
        let mut reads = self.reads.lock();
        let failed = reads.values_mut().filter(|read| read.takes(node, range));
        failed.for_each(|read| read.has_failed = true);
    }

    /// Whether these bytes of a node's device are read for a copy that has left them. A load that waited for room reads
    /// the place that it knew, where another block may be written by now.
    pub(crate) fn is_late(&self, node: usize, range: &Range<u64>) -> bool {
        let reads = self.reads.lock();
        let mut late = reads.values().filter(|read| read.is_late);
        late.any(|read| read.takes(node, range))
    }

    /// A master orders something of a node, in a session. `pool` is the master's.
    pub(crate) fn orders(
        &self,
        session: u64,
        node: usize,
        message: &proto::MasterMessage,
        pool: impl FnOnce() -> Option<Arc<Pool>>,
    ) {
        let Some(master_message::Body::Transfers(orders)) = &message.body else {
            return;
        };
        let mut ranges = orders
            .transfers
            .iter()
            .filter_map(|order| order.from.as_ref());
        let reads_disk = ranges.any(|from| SegmentId(from.segment).is_on_medium());
        let copies = match reads_disk {
            true => pool().map_or_else(Vec::new, |pool| pool.stored_copies()),
            false => Vec::new(),
        };
        let mut reads = self.reads.lock();
        // A node offers its disk in a session once all transfers of earlier sessions have ended.
        reads.retain(|(of, _), read| read.node != node || *of >= session);
        for order in &orders.transfers {
            let Some(from) = &order.from else { continue };
            let segment = SegmentId(from.segment);
            if segment.is_on_medium() {
                let mut read = DiskRead {
                    node,
                    version: Version(order.version),
                    segment,
                    offset: Offset(from.offset),
                    length: Length(from.length),
                    is_late: false,
                    has_failed: false,
                };
                read.is_late = !read.is_of(&copies);
                reads.insert((session, order.ticket), read);
            }
        }
    }

    /// A node answers a master, in a session. Returns a read that found wrong bytes on a disk that has lost
    /// none. A block in memory may change while it is stored, so only reads of disks are judged. A device that is gone
    /// or full has other codes.
    pub(crate) fn wrong_read(
        &self,
        session: u64,
        message: &proto::NodeMessage,
    ) -> Option<DiskRead> {
        let Some(node_message::Body::TransfersDone(done)) = &message.body else {
            return None;
        };
        let wrong = u32::from(Code::ChecksumMismatch.to_wire());
        let mut found = None;
        let mut reads = self.reads.lock();
        for done in &done.transfers {
            let read = reads.remove(&(session, done.ticket));
            if done.code == wrong {
                found = read.filter(|read| !read.has_failed).or(found);
            }
        }
        found.filter(|read| !self.may_be_wrong(read.node))
    }

    /// Whether the disk of a node may return wrong bytes.
    pub(crate) fn may_be_wrong(&self, node: usize) -> bool {
        self.damaged.lock().contains(&node)
    }
}

impl DiskRead {
    /// Whether it reads these bytes of the device of a node.
    fn takes(&self, node: usize, range: &Range<u64>) -> bool {
        let start = DATA_START + self.offset.0;
        let taken = medium::footprint(self.length).unwrap_or(self.length);
        self.node == node && start <= range.start && range.end <= start + taken.0
    }

    /// Whether one of these copies is read.
    fn is_of(&self, copies: &[StoredBlock]) -> bool {
        copies.iter().any(|copy| {
            let mut places = copy.replicas.iter();
            copy.version == self.version
                && places.any(|at| at.segment == self.segment && at.offset == self.offset)
        })
    }

    /// What is wrong, if the master still has the copy at this place. A copy that has left it may be written over.
    pub(crate) fn judge(self, pool: &Pool) -> Option<String> {
        let is_there = self.is_of(&pool.stored_copies());
        let Self {
            node,
            version,
            segment,
            offset,
            ..
        } = self;
        is_there.then(|| {
            format!(
                "n{node} finds wrong bytes for the copy of version {version} at {offset} of {segment}, and its disk \
                 has lost none"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The node with the disk.
    const NODE: usize = 1;

    fn orders(media: &Media, session: u64, ticket: u64, offset: u64) {
        let from = proto::ExtentRange {
            segment: SegmentId::on_medium(4).0,
            offset,
            length: 100,
        };
        let order = proto::Transfer {
            ticket,
            from: Some(from),
            ..proto::Transfer::default()
        };
        let orders = proto::Transfers {
            transfers: vec![order],
        };
        let message = proto::MasterMessage {
            body: Some(master_message::Body::Transfers(orders)),
        };
        media.orders(session, NODE, &message, || None);
    }

    /// Whether the answer that the bytes are wrong is to be judged.
    fn is_wrong(media: &Media, session: u64, ticket: u64) -> bool {
        let done = proto::TransferDone {
            ticket,
            code: Code::ChecksumMismatch.to_wire().into(),
            takes_no_writes: false,
        };
        let done = proto::TransfersDone {
            transfers: vec![done],
        };
        let message = proto::NodeMessage {
            body: Some(node_message::Body::TransfersDone(done)),
        };
        media.wrong_read(session, &message).is_some()
    }

    #[test]
    fn a_read_that_failed_excuses_itself_alone() {
        let media = Media::default();
        orders(&media, 7, 1, 0);
        orders(&media, 7, 2, 1 << 20);
        media.cannot_read(NODE + 1, &(DATA_START..DATA_START + 100));
        media.cannot_read(NODE, &(DATA_START..DATA_START + 100));
        assert!(!is_wrong(&media, 7, 1));
        assert!(is_wrong(&media, 7, 2));
        assert!(!is_wrong(&media, 7, 2), "it was answered");
        orders(&media, 7, 3, 0);
        assert!(is_wrong(&media, 7, 3), "the device can read it again");
        orders(&media, 7, 4, 0);
        media.note_damage(NODE);
        assert!(!is_wrong(&media, 7, 4));
        media.note_new_disk(NODE);
        orders(&media, 8, 1, 0);
        assert!(is_wrong(&media, 8, 1));
    }

    #[test]
    fn an_answer_is_to_an_order_of_its_session() {
        let media = Media::default();
        orders(&media, 7, 1, 0);
        assert!(!is_wrong(&media, 8, 1));
        orders(&media, 8, 1, 1 << 20);
        assert!(!is_wrong(&media, 7, 1), "this session is over");
        assert!(is_wrong(&media, 8, 1));
    }
}
