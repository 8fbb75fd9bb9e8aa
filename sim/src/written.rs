//! A copy in the log is on its disk.
//!
//! A copy is recorded once it is written. Its range is written again only when the log has its removal. So whoever
//! reads the log finds the copy's header there, also while records are on their way.
//!
//! A disk whose requests fail, or that is full, keeps what is written. A disk that may have lost bytes is not judged
//! any more, and a medium only while its disk has it.

use crate::copies::is_right;
use crate::ssd::Ssd;
use crate::world::World;
use kvpool_master::pool::{MediumView, Pool};
use kvpool_master::standby::Standby;
use kvpool_types::SegmentId;
use std::collections::BTreeMap;

/// The disk of a medium, if the disk must have all copies of the medium. A disk to which nothing happens in this
/// history must also keep its medium.
fn disk_of<'w>(world: &'w World, medium: &MediumView) -> Option<&'w Ssd> {
    let mut disks = world.ssds.iter().enumerate();
    let (node, ssd) = disks.find(|(node, _)| medium.record.node.0 == format!("n{node}"))?;
    let has_medium = is_right(&world.plan, node) || ssd.has_medium(medium.record.medium);
    let is_judged = has_medium && !world.net.media.may_be_wrong(node);
    is_judged.then_some(&**ssd)
}

/// Finds a copy of a standby whose header is not on its disk.
pub(crate) fn copies_are_written(
    world: &World,
    pool: &Pool,
    standby: &Standby,
    which: &str,
) -> Result<(), String> {
    let views = pool.media().into_iter();
    let disks: BTreeMap<SegmentId, &Ssd> = views
        .filter_map(|medium| Some((medium.record.id, disk_of(world, &medium)?)))
        .collect();
    if disks.is_empty() {
        return Ok(());
    }
    for copy in standby.stored_copies() {
        for at in &copy.replicas {
            let ssd = disks.get(&at.segment);
            if ssd.is_some_and(|ssd| !ssd.has_header(at.offset, copy.version)) {
                return Err(format!(
                    "a standby {which} has the copy of version {} of {} at {} of {}, and other bytes are there",
                    copy.version, copy.key, at.offset, at.segment
                ));
            }
        }
    }
    Ok(())
}
