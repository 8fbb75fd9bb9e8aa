//! What the next leader would have if the present one died now.
//!
//! A history has few changes of the leader. So the checks keep standbys beside the pool:
//!
//! | standby | begins with | its clock |
//! |---|---|---|
//! | follower | the term | the machine's |
//! | paused | a load, and is replaced at later loads | leaps before each group: its machine pauses |
//! | midway | a load just behind the end of a segment | as the paused one's |
//!
//! Whenever the log has everything that the leader did, each must have the leader's blocks, and the follower must keep
//! shut what the leader promised to readers. So must a standby that reads the snapshots and the log anew.
//!
//! While records are on their way, the log is behind the leader. Also then a standby that is loaded may not give away
//! what readers read. And the leader may not give away what a block has in the log: a crash would bring the block back.

use crate::chains::{Behind, links_of};
use crate::checks;
use crate::clock::MachineClock;
use crate::removed;
use crate::sight::Sight;
use crate::store::Frozen;
use crate::world::World;
use crate::written::copies_are_written;
use futures::FutureExt;
use kvpool_master::clock::{BootInstant, Clock};
use kvpool_master::directory::StoredBlock;
use kvpool_master::pool::Pool;
use kvpool_master::pool::audit::Use;
use kvpool_master::replica::Replica;
use kvpool_master::standby::Standby;
use kvpool_master::store::LogSeq;
use kvpool_types::{Epoch, SegmentId, Version};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// One in so many comparisons reads the snapshots and the log anew.
const LOADS: u64 = 8;
/// One in so many looks at a leader with records on their way reads the snapshots and the log. So does each look behind
/// a new snapshot.
const BUSY: u64 = 4;
/// How long a machine pauses. It is longer than a standby keeps the replicas of a segment that is gone.
const PAUSE_MS: u64 = 60_000;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Successors {
    follower: Option<Follower>,
    paused: Option<Follower>,
    midway: Option<Follower>,
    /// The position of the log at the last comparison.
    compared: Option<LogSeq>,
    comparisons: u64,
    /// How many looks found records on their way.
    busy: u64,
    /// How many snapshots had been written at the last load at such a look.
    snapshots: u64,
}

/// A standby of a term.
#[derive(Debug)]
struct Follower {
    epoch: Epoch,
    standby: Standby,
    /// Its clock, if its machine pauses.
    leaps: Option<Arc<Leaping>>,
}

/// The clock of a machine that pauses.
#[derive(Debug)]
struct Leaping {
    machine: Arc<MachineClock>,
    ahead_ms: AtomicU64,
}

impl Leaping {
    fn leap(&self) {
        self.ahead_ms.fetch_add(PAUSE_MS, Ordering::Relaxed);
    }
}

impl Clock for Leaping {
    fn now(&self) -> BootInstant {
        let ahead = Duration::from_millis(self.ahead_ms.load(Ordering::Relaxed));
        self.machine.now().after(ahead)
    }
}

impl Follower {
    fn load(
        world: &World,
        epoch: Epoch,
        store: &Frozen,
        clock: Arc<dyn Clock>,
        leaps: Option<Arc<Leaping>>,
    ) -> Result<Self, String> {
        let config = &crate::master::config(&world.plan);
        let loaded = Standby::load(store, config, clock).now_or_never();
        let loaded = loaded.ok_or("a load from a store that answers at once waits")?;
        let standby =
            loaded.map_err(|error| format!("what is stored cannot be loaded: {error}"))?;
        Ok(Self {
            epoch,
            standby,
            leaps,
        })
    }

    /// Loads one whose machine pauses from then on.
    fn load_leaping(
        world: &World,
        epoch: Epoch,
        store: &Frozen,
        machine: Arc<MachineClock>,
    ) -> Result<Self, String> {
        let clock = Arc::new(Leaping {
            machine,
            ahead_ms: AtomicU64::new(0),
        });
        let its = Arc::clone(&clock) as Arc<dyn Clock>;
        Self::load(world, epoch, store, its, Some(clock))
    }

    /// Applies what the log has beyond. False when the log was cut meanwhile.
    fn follow(&mut self, world: &World) -> Result<bool, String> {
        let Some(groups) = world.disk.groups_behind(self.standby.applied()) else {
            return Ok(false);
        };
        for (seq, group) in groups {
            if let Some(clock) = &self.leaps {
                clock.leap();
            }
            let applied = self.standby.apply(seq, &group);
            applied.map_err(|error| format!("a standby cannot go on: {error}"))?;
        }
        Ok(true)
    }
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

/// Compares the leader's state with that of its successors.
pub(crate) fn has_all(world: &World, number: usize, sight: &Sight<'_>) -> Result<(), String> {
    let pool = sight.pool;
    let logged = pool.logged();
    let whole = logged.filter(|logged| world.disk.ends_at(pool.epoch, *logged));
    if whole.is_some() {
        world.net.promises.are_logged(sight);
    }
    let mut successors = world.successors.lock();
    if whole.is_some() && successors.compared == whole {
        return Ok(());
    }
    let Some(clock) = world.clock_of(number) else {
        return Ok(());
    };
    let Some(logged) = whole else {
        return one_loads_meanwhile(world, sight, &mut successors, &clock);
    };
    let follower = successors.follower.take();
    let follower = match follower.filter(|one| one.epoch == pool.epoch) {
        Some(mut follower) => match follower.follow(world)? {
            true => follower,
            false => anew(world, pool, &clock)?,
        },
        None => anew(world, pool, &clock)?,
    };
    let follower = &*successors.follower.insert(follower);
    is_like(world, sight, &follower.standby, "that follows the log")?;
    promises_hold(world, pool, &follower.standby, "that follows the log")?;
    copies_are_written(world, pool, &follower.standby, "that follows the log")?;
    successors.compared = Some(logged);
    successors.comparisons += 1;
    let which = "that follows the log after a pause";
    let paused = successors.paused.take();
    if let Some(mut one) = paused.filter(|one| one.epoch == pool.epoch)
        && one.follow(world)?
    {
        is_like(world, sight, &one.standby, which)?;
        successors.paused = Some(one);
    }
    let which = "that was loaded just behind the end of a segment";
    let midway = successors.midway.take();
    if let Some(mut one) = midway.filter(|one| one.epoch == pool.epoch)
        && one.follow(world)?
    {
        is_like(world, sight, &one.standby, which)?;
    }
    match successors.comparisons.is_multiple_of(LOADS) {
        true => one_reads_anew(world, sight, &mut successors, clock),
        false => Ok(()),
    }
}

/// Compares the leader with a standby that reads the snapshots and the log anew, and keeps it.
fn one_reads_anew(
    world: &World,
    sight: &Sight<'_>,
    successors: &mut Successors,
    clock: Arc<MachineClock>,
) -> Result<(), String> {
    let pool = sight.pool;
    let is_second = successors.comparisons.is_multiple_of(2 * LOADS);
    let store = if world.plan.electing == 0 {
        // After a crash of the only master a snapshot that was not flushed may be the old one.
        world.disk.frozen(is_second)
    } else if is_second {
        // A leader goes on while a standby loads.
        world.disk.frozen_late()
    } else {
        world.disk.frozen(false)
    };
    let which = "that reads the log anew";
    let loaded = Follower::load_leaping(world, pool.epoch, &store, clock)?;
    is_like(world, sight, &loaded.standby, which)?;
    promises_hold(world, pool, &loaded.standby, which)?;
    successors.paused = Some(loaded);
    Ok(())
}

/// While records are on their way to the log, a standby is loaded now and then. It gives nothing away, and its copies
/// are written.
fn one_loads_meanwhile(
    world: &World,
    sight: &Sight<'_>,
    successors: &mut Successors,
    clock: &Arc<MachineClock>,
) -> Result<(), String> {
    let pool = sight.pool;
    // A later term may have begun, and has written then.
    if world.disk.end_of(pool.epoch).is_none() {
        return Ok(());
    }
    successors.busy += 1;
    let written = world.disk.snapshots_written();
    if written == successors.snapshots && !successors.busy.is_multiple_of(BUSY) {
        return Ok(());
    }
    successors.snapshots = written;
    let loaded = anew(world, pool, clock)?;
    is_safe(world, sight, &loaded.standby)?;
    let which = "that reads the log while records are on their way";
    copies_are_written(world, pool, &loaded.standby, which)
}

/// Loads a standby from what is stored now.
fn anew(world: &World, pool: &Pool, clock: &Arc<MachineClock>) -> Result<Follower, String> {
    let clock = Arc::clone(clock) as Arc<dyn Clock>;
    Follower::load(world, pool.epoch, &world.disk.frozen(false), clock, None)
}

/// A segment has just ended in the log: a standby is loaded, and follows from there.
pub(crate) fn loads_midway(world: &World) -> Result<(), String> {
    let leading = checks::leading(world);
    let Some((number, pool)) = leading.first() else {
        return Ok(());
    };
    let Some(clock) = world.clock_of(*number) else {
        return Ok(());
    };
    if world.disk.end_of(pool.epoch).is_none() {
        return Ok(());
    }
    let store = world.disk.frozen(false);
    let loaded = Follower::load_leaping(world, pool.epoch, &store, clock)?;
    world.successors.lock().midway = Some(loaded);
    Ok(())
}

/// While records are on their way: a standby that is loaded now gives away nothing that a reader reads, and the leader
/// nothing that a block has in the log. The leader frees a place only once the log has the removal of its block. A
/// standby keeps what the log says was freed shut for a lease from its load on.
///
/// One that followed before may have heard of a removal long before its leader did, whose store was slow to answer.
fn is_safe(world: &World, sight: &Sight<'_>, standby: &Standby) -> Result<(), String> {
    let (pool, which) = (
        sight.pool,
        "that reads the log while records are on their way",
    );
    promises_hold(world, pool, standby, which)?;
    removed::stay_out_of_the_log(world, sight, standby)?;
    let segments = pool.placement.segments();
    for block in standby.stored_blocks() {
        let length = block.length.0;
        for at in &block.replicas {
            let Some(segment) = segments.get(at.segment) else {
                continue;
            };
            let range = at.offset.0..at.offset.0 + length;
            let meets = |start: u64, end: u64| start < range.end && range.start < end;
            let is_other = |one: &&Use| {
                one.segment == at.segment
                    && one.version != block.version
                    && meets(one.range.start, one.range.end)
            };
            let said = |what: &str| {
                format!(
                    "a standby {which} has version {} of {} at {range:?} of segment {}, and {what}",
                    block.version, block.key, at.segment
                )
            };
            if let Some(other) = sight.survey.uses.iter().find(is_other) {
                return Err(said(&format!("{other} has these bytes")));
            }
            let extents = segment.extents();
            let mut free = extents.longest_free();
            if free.any(|free| meets(free.offset.0, free.offset.0 + free.length.0)) {
                return Err(said("these bytes are free"));
            }
        }
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
    let its: BTreeSet<SegmentId> = pool.media().iter().map(|view| view.record.id).collect();
    let standbys: BTreeSet<SegmentId> = standby.media().into_iter().collect();
    if its != standbys {
        return Err(format!(
            "a standby {which} has the media {standbys:?}, and the leader {its:?}"
        ));
    }
    if standby.settings() != pool.settings() {
        return Err(format!(
            "a standby {which} has the settings {:?}, and the leader {:?}",
            standby.settings(),
            pool.settings()
        ));
    }
    Ok(())
}

/// A standby keeps shut what readers may still read.
fn promises_hold(world: &World, pool: &Pool, standby: &Standby, which: &str) -> Result<(), String> {
    match world.net.promises.broken_by_standby(pool, standby) {
        Some(broken) => Err(format!("{broken} at a standby {which}")),
        None => Ok(()),
    }
}
