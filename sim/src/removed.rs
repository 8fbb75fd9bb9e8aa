//! An answered removal holds until somebody puts the key. The leader has no block of the key. A standby that reads the
//! log has none either: after a crash of the leader it would bring the block back.

use crate::sight::Sight;
use crate::world::World;
use kvpool_master::replica::Replica;
use kvpool_master::standby::Standby;

/// No removed key has a block in memory, or a copy on a disk.
pub(crate) fn stay_away(world: &World, sight: &Sight<'_>) -> Result<(), String> {
    let history = world.load.history.lock();
    let in_memory = sight.blocks().map(|(key, block)| (key, block, "in memory"));
    let on_disks = sight.copies().map(|(key, copy)| (key, copy, "on a disk"));
    let mut all = in_memory.chain(on_disks);
    match all.find(|(key, ..)| history.is_removed(*key)) {
        Some((key, block, at)) => Err(format!(
            "key {key} was removed, and version {} of it is {at}",
            block.version
        )),
        None => Ok(()),
    }
}

/// A standby that reads the log now has no removed block in memory. A segment that is gone may still be listed.
pub(crate) fn stay_out_of_the_log(
    world: &World,
    sight: &Sight<'_>,
    standby: &Standby,
) -> Result<(), String> {
    let history = world.load.history.lock();
    let segments = sight.pool.placement.segments();
    let is_there = |at: &Replica| segments.get(at.segment).is_some();
    for block in standby.stored_blocks() {
        let key = sight.key_of(&block, &world.plan);
        if let Some(key) = key.filter(|key| history.is_removed(*key))
            && block.replicas.iter().any(is_there)
        {
            return Err(format!(
                "key {key} was removed, and a standby that reads the log has version {} of it",
                block.version
            ));
        }
    }
    Ok(())
}
