//! A batch of writes: announced, copied, ended.
//!
//! ```text
//! WriteBegin ──answer──► copy threads ──► WriteEnd with the sums ──answer──► ok
//!                └ deadline, or no mapping ──► WriteEnd without sums: aborted
//! ```

use super::link::OpenShmLink;
use crate::checksum::{BlockSums, Private, copy_with_sum};
use crate::control::{Control, ControlAnswer, admitted, codes};
use crate::copiers::{Job, by_segment, grouped};
use crate::frame::status;
use crate::link::{TransferError, WriteOp};
use crate::memory::Region;
use crate::outcomes::{Batch, deadline_exceeded};
use kvpool_types::wire::data::{WriteEnd, WriteRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Checksum, Code, Epoch, Extent, GrantId, Length};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;

/// The bytes copied before the node is told. Each message takes the node's time on a core that
/// copies could use.
const END_BYTES: u64 = 4 << 20;

/// One frame of a batch of writes.
pub(super) struct Writes {
    pub(super) batch: Arc<Batch<Checksum>>,
    /// Each write and its index in the batch. The batch keeps the source memory.
    pub(super) items: Vec<(usize, WriteOp)>,
    pub(super) deadline: Instant,
}

/// Announces the writes; the copies start when the answers arrive.
pub(super) fn start(open: &Arc<OpenShmLink>, writes: Writes) {
    let epoch = writes
        .items
        .iter()
        .map(|(_, write)| write.grant.epoch)
        .max()
        .unwrap_or_default();
    // Requested first, so that the mapping exists when the copies start.
    if let Some((_, write)) = writes.items.first() {
        open.segments
            .with(write.grant.extent.segment, true, |_mapped| {});
    }
    let request = WriteRequest {
        incarnation: open.incarnation,
        grants: writes.items.iter().map(|(_, write)| write.grant).collect(),
    };
    let asked = open.clone();
    open.control
        .request(Op::WriteBegin, epoch, &request, move |answer| {
            begun(&asked, writes, answer);
        });
}

/// Lets the copy threads copy the admitted writes, in groups, and ends the others.
fn begun(open: &Arc<OpenShmLink>, writes: Writes, answer: Result<ControlAnswer, TransferError>) {
    let Writes {
        batch,
        items,
        deadline,
    } = writes;
    let admitted = admitted(answer, &batch, items);
    for (segment, writes) in by_segment(admitted, |(_, write)| write.grant.extent.segment) {
        let (batch, asked) = (batch.clone(), open.clone());
        open.segments.with(segment, true, move |mapped| {
            submit(&asked, &mapped, &batch, writes, deadline);
        });
    }
}

/// Queues the writes to one segment. Small writes are copied together.
fn submit(
    open: &Arc<OpenShmLink>,
    mapped: &Result<Region, TransferError>,
    batch: &Arc<Batch<Checksum>>,
    writes: Vec<(usize, WriteOp)>,
    deadline: Instant,
) {
    let groups = grouped(writes, |(_, write)| write.grant.extent.length);
    let ends = Arc::new(Mutex::new(SegmentEnds {
        copied: Vec::new(),
        bytes: 0,
        groups: groups.len(),
    }));
    open.copiers.submit(groups.into_iter().map(|group| -> Job {
        // The link stays open until the last of its writes has ended.
        let (open, mapped, batch, ends) =
            (open.clone(), mapped.clone(), batch.clone(), ends.clone());
        Box::new(move || {
            let copied = group.into_iter().map(|(item, write)| WriteEnding {
                item,
                grant: write.grant.id,
                length: write.grant.extent.length,
                sums: copy(&mapped, &batch, item, write.grant.extent, deadline),
            });
            let copied: Vec<WriteEnding> = copied.collect();
            let due = ends.lock().add(copied);
            if !due.is_empty() {
                end(&open.control, &batch, due);
            }
        })
    }));
}

/// The copied writes of one segment that the node has not been told about.
struct SegmentEnds {
    copied: Vec<WriteEnding>,
    bytes: u64,
    /// The number of groups that are not copied yet.
    groups: usize,
}

impl SegmentEnds {
    /// Adds a group. Returns the writes to tell the node about now.
    fn add(&mut self, copied: Vec<WriteEnding>) -> Vec<WriteEnding> {
        self.groups -= 1;
        self.bytes += copied.iter().map(|end| end.length.0).sum::<u64>();
        self.copied.extend(copied);
        if self.groups > 0 && self.bytes < END_BYTES {
            return Vec::new();
        }
        self.bytes = 0;
        std::mem::take(&mut self.copied)
    }
}

/// A write to end, with checksums when its bytes are in place.
struct WriteEnding {
    item: usize,
    grant: GrantId,
    length: Length,
    sums: Option<BlockSums>,
}

/// Copies one block; `None` when the item has ended without a copy.
fn copy(
    mapped: &Result<Region, TransferError>,
    batch: &Batch<Checksum>,
    item: usize,
    extent: Extent,
    deadline: Instant,
) -> Option<BlockSums> {
    let target = match mapped {
        Ok(region) => region.slice(extent.offset, extent.length),
        Err(error) => {
            batch.end(item, Err(error.clone()));
            return None;
        }
    };
    let Some(target) = target else {
        batch.end(item, Err(status(Code::OutOfRange)));
        return None;
    };
    let from = batch.take(item)?;
    let in_time = || Instant::now() < deadline;
    let copied = copy_with_sum(&from, &[target], Private::Source, in_time);
    drop(from);
    if copied.is_none() {
        batch.end(item, Err(deadline_exceeded()));
    } else if !batch.pause(item) {
        return None;
    }
    copied
}

/// Tells the node that a group of writes has ended. Aborted writes are included, so that the node
/// does not wait for them.
fn end(control: &Control, batch: &Arc<Batch<Checksum>>, ends: Vec<WriteEnding>) {
    let mut items = Vec::with_capacity(ends.len());
    let mut done = Vec::with_capacity(ends.len());
    for WriteEnding {
        item, grant, sums, ..
    } in ends
    {
        let (chunks, whole) = match sums {
            Some(sums) => (sums.chunks, Some(sums.whole)),
            None => (Vec::new(), None),
        };
        items.push((grant, chunks));
        done.push((item, whole));
    }
    let batch = batch.clone();
    control.request(
        Op::WriteEnd,
        Epoch::default(),
        &WriteEnd { items },
        move |answer| match codes(answer, done.len()) {
            Ok(codes) => {
                for ((item, whole), code) in done.into_iter().zip(codes) {
                    if let Some(whole) = whole {
                        let outcome = match code {
                            Code::Ok => Ok(whole),
                            code => Err(status(code)),
                        };
                        batch.end(item, outcome);
                    }
                }
            }
            Err(error) => {
                for (item, _) in done {
                    batch.end(item, Err(error.clone()));
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::{END_BYTES, SegmentEnds, WriteEnding};
    use kvpool_types::{GrantId, Length};

    fn group(items: std::ops::Range<usize>, bytes: u64) -> Vec<WriteEnding> {
        items
            .map(|item| WriteEnding {
                item,
                grant: GrantId(item as u64),
                length: Length(bytes),
                sums: None,
            })
            .collect()
    }

    #[test]
    fn the_node_is_told_about_every_group_in_few_messages() {
        let mut ends = SegmentEnds {
            copied: Vec::new(),
            bytes: 0,
            groups: 7,
        };
        let told: Vec<Vec<usize>> = (0..7)
            .map(|group_number| {
                let first = group_number * 4;
                let due = ends.add(group(first..first + 4, END_BYTES / 4 / 3 + 1));
                due.iter().map(|end| end.item).collect()
            })
            .collect();
        let none = Vec::new();
        let expected = [
            none.clone(),
            none.clone(),
            (0..12).collect(),
            none.clone(),
            none,
            (12..24).collect(),
            (24..28).collect(),
        ];
        assert_eq!(told, expected);
    }
}
