//! A copy in the log is on its disk.
//!
//! A copy is recorded once it is written. Its range is written again only when the log has its removal. So whoever
//! reads the log finds the copy's header there, also while records are on their way.

use crate::copies::is_right;
use crate::world::World;
use kvpool_master::pool::Pool;
use kvpool_master::standby::Standby;
use kvpool_types::SegmentId;
use std::collections::BTreeMap;

/// Finds a copy of a standby whose header is not on its disk. Disks that may lose bytes are not judged.
pub(crate) fn copies_are_written(
    world: &World,
    pool: &Pool,
    standby: &Standby,
    which: &str,
) -> Result<(), String> {
    let is_judged =
        |node: &usize| is_right(&world.plan, *node) && !world.net.media.may_be_wrong(*node);
    let names: BTreeMap<String, usize> = (0..world.ssds.len())
        .filter(is_judged)
        .map(|node| (format!("n{node}"), node))
        .collect();
    if names.is_empty() {
        return Ok(());
    }
    let views = pool.media().into_iter().map(|view| view.record);
    let disks: BTreeMap<SegmentId, usize> = views
        .filter_map(|medium| Some((medium.id, *names.get(&medium.node.0)?)))
        .collect();
    for copy in standby.stored_copies() {
        for at in &copy.replicas {
            let disk = disks.get(&at.segment);
            let ssd = disk.and_then(|node| world.ssds.get(*node));
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
