//! What the next leader would have if the present one died now.
//!
//! A history has few changes of the leader. So the checks keep two standbys beside the pool. One has followed the log
//! since the term began. One reads the snapshots and the log anew. Whenever the log has everything that the leader did,
//! both must have the leader's blocks, and must keep shut what it promised to readers.

use crate::chains::{Behind, links_of};
use crate::sight::Sight;
use crate::world::World;
use futures::FutureExt;
use kvpool_master::clock::Clock;
use kvpool_master::directory::StoredBlock;
use kvpool_master::pool::Pool;
use kvpool_master::replica::Replica;
use kvpool_master::standby::Standby;
use kvpool_master::store::LogSeq;
use kvpool_types::{Epoch, SegmentId, Version};
use std::collections::BTreeSet;
use std::sync::Arc;

/// One in so many comparisons reads the snapshots and the log anew.
const LOADS: u64 = 8;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Successors {
    /// The standby that has followed the log of a term.
    follower: Option<(Epoch, Standby)>,
    /// The position of the log at the last comparison.
    compared: Option<LogSeq>,
    comparisons: u64,
}

/// Every block or copy, with its places, but for replicas on segments that are gone.
pub(crate) fn lines<'b>(
    pool: &Pool,
    kind: &str,
    blocks: impl IntoIterator<Item = &'b StoredBlock>,
) -> BTreeSet<String> {
    let segments = pool.placement.segments();
    let is_there = |at: &&Replica| at.segment.is_on_medium() || segments.get(at.segment).is_some();
    let place = |at: &Replica| format!("{} in {}", at.offset, at.segment);
    let line = |block: &StoredBlock| {
        let there = block.replicas.iter().filter(is_there);
        let mut places: Vec<String> = there.map(place).collect();
        places.sort();
        let (namespace, key, version) = (block.namespace, &block.key, block.version);
        (!places.is_empty()).then(|| {
            format!(
                "{kind} {namespace:?} {key} {version} at {places:?}, pinned: {}",
                block.hard_pin
            )
        })
    };
    blocks.into_iter().filter_map(line).collect()
}

/// Compares the leader's state with that of its successors, if the log has everything that the leader did.
pub(crate) fn has_all(world: &World, number: usize, sight: &Sight<'_>) -> Result<(), String> {
    let pool = sight.pool;
    let Some(logged) = pool.logged() else {
        return Ok(());
    };
    if !world.disk.ends_at(pool.epoch, logged) {
        return Ok(());
    }
    world.net.promises.are_logged(sight);
    let mut successors = world.successors.lock();
    if successors.compared == Some(logged) {
        return Ok(());
    }
    let Some(clock) = world.clock_of(number) else {
        return Ok(());
    };
    successors.compared = Some(logged);
    successors.comparisons += 1;
    let load = |reverts| {
        let config = &crate::master::config(&world.plan);
        let clock = Arc::clone(&clock) as Arc<dyn Clock>;
        let store = world.disk.frozen(reverts);
        let loaded = Standby::load(&store, config, clock).now_or_never();
        let loaded = loaded.ok_or("a load from a store that answers at once waits")?;
        loaded.map_err(|error| format!("what is stored cannot be loaded: {error}"))
    };
    let follower = match successors.follower.take() {
        Some((epoch, mut standby)) if epoch == pool.epoch => {
            match world.disk.groups_behind(standby.applied()) {
                Some(groups) => {
                    for (seq, group) in groups {
                        let applied = standby.apply(seq, &group);
                        applied.map_err(|error| format!("a standby cannot go on: {error}"))?;
                    }
                    standby
                }
                None => load(false)?,
            }
        }
        _ => load(false)?,
    };
    is_like(world, sight, &follower, "that follows the log")?;
    successors.follower = Some((pool.epoch, follower));
    if successors.comparisons.is_multiple_of(LOADS) {
        // After a crash of the only master a snapshot that was not flushed may be the old one.
        let reverts = successors.comparisons.is_multiple_of(2 * LOADS);
        is_like(world, sight, &load(reverts)?, "that reads the log anew")?;
    }
    Ok(())
}

/// Compares a leader with a standby.
fn is_like(world: &World, sight: &Sight<'_>, standby: &Standby, which: &str) -> Result<(), String> {
    let (pool, survey) = (sight.pool, &sight.survey);
    let blocks = standby.stored_blocks();
    let copies = standby.stored_copies();
    for (kind, its, standbys) in [
        ("block", &survey.blocks, &blocks),
        ("copy", &survey.copies, &copies),
    ] {
        let (its, standbys) = (lines(pool, kind, its), lines(pool, kind, standbys));
        if let Some(lost) = its.difference(&standbys).next() {
            return Err(format!("a standby {which} lacks the {lost}"));
        }
        if let Some(other) = standbys.difference(&its).next() {
            return Err(format!(
                "a standby {which} has the {other}, which the leader has not"
            ));
        }
    }
    let links: Behind = links_of(&pool.stored_blocks());
    if let Some((child, parent)) = world.chains.lock().lost_at(&blocks, &links) {
        return Err(format!(
            "at a standby {which} the block of version {child} is not behind the one of version {parent}"
        ));
    }
    let uses = survey.uses.iter().map(|one| one.version);
    let versions = uses.chain(survey.copies.iter().map(|copy| copy.version));
    let (first, last) = (standby.first_version(), versions.max());
    if last.is_some_and(|last: Version| first <= last) {
        return Err(format!(
            "a standby {which} would give version {first}, and the leader has given {last:?}"
        ));
    }
    let known = world.segments.lock();
    let last = known.keys().map(|id: &SegmentId| id.number()).max();
    let first = standby.next_segment().number();
    if last.is_some_and(|last| first <= last) {
        return Err(format!(
            "a standby {which} would give the id {first} to a segment, and {last:?} was given before"
        ));
    }
    if standby.settings() != pool.settings() {
        return Err(format!(
            "a standby {which} has the settings {:?}, and the leader {:?}",
            standby.settings(),
            pool.settings()
        ));
    }
    match world.net.promises.broken_by_standby(pool, standby) {
        Some(broken) => Err(format!("{broken} at a standby {which}")),
        None => Ok(()),
    }
}
