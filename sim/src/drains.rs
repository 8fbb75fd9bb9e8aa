//! Nodes that leave in order: because they stop, or because an operator takes them out of service.

use crate::checks::{RING, is_on, leading};
use crate::copies::is_right_so_far;
use crate::dice::{Dice, Stream};
use crate::plan::{Call, Departs, DiskFault, Fault, LATE_DROP, Moment, Plan, Process, Said, Trick};
use crate::sight::Sight;
use crate::world::World;
use kvpool_master::directory::{StoredBlock, Tick};
use kvpool_master::membership::{NodeState, StoreNode};
use kvpool_master::pool::Pool;
use kvpool_master::replica::Replica;
use kvpool_types::{Incarnation, SegmentId, Version};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;

/// Within this time a leader counts the blocks of a node that drains. It does so every second.
const COUNTED: Duration = Duration::from_millis(2_500);

impl Plan {
    /// From a stream of its own: faults that excuse a loss give way to drains, of several nodes at once. Every
    /// acknowledged block must be there at the end.
    pub(crate) fn draw_quiet_drains(&mut self) {
        let dice = Dice::new(self.seed, Stream::Quiet);
        if !self.keeps_all || self.nodes < 2 || !dice.chance(600) {
            return;
        }
        // What excuses a lost block would hide what a drain lost. Drains of all nodes at once leave nobody who stays.
        let drains = |fault: &Fault| matches!(fault, Fault::Drain(..) | Fault::OutOfService(..));
        let stays = |fault: &Fault| fault.loss().is_none() && !drains(fault);
        self.keep_faults(stays);
        self.noise.flipped_writes = 0;
        self.drop_ms = LATE_DROP;
        if dice.chance(700) {
            // On a disk the blocks of a node that left wait for its next life.
            self.disk_bytes = 0;
        }
        // Two may leave, and one stays.
        self.nodes = self.nodes.max(3);
        // Puts are under way when nodes leave.
        self.clients = self.clients.max(2);
        self.tasks = 3;
        self.longest_pause = self.longest_pause.min(40_000);
        self.noise.slow = self.noise.slow.max(50);
        let mut at = 0;
        for _ in 0..dice.between(2, 4) {
            // A node that comes too late finds none that stays, and leaves with its blocks.
            at += dice.between(1_000, 4_000);
            let node = dice.index(self.nodes);
            let down = dice.between(30, 800);
            self.faults.push((at, Fault::Drain(node, down)));
            // Commits wait for the log for longer than the drain waits for them. One of several masters would lose its
            // term.
            if self.electing == 0 && dice.chance(300) {
                let begins = at - dice.below(200);
                self.faults
                    .push((begins, Fault::StoreStalls(0, dice.between(4_300, 6_000))));
            }
            if dice.chance(600) {
                let next = Fault::Drain((node + 1) % self.nodes, down);
                let later = [3, 20, 200][dice.index(3)];
                self.faults.push((at + dice.below(later), next));
            }
        }
        self.length_ms = self.length_ms.max(at + 2_000);
    }

    /// From a stream of its own: an operator takes nodes out of service, in half of the histories all of them. Other
    /// nodes are silent or leave while one is called drained.
    pub(crate) fn draw_operator(&mut self) {
        let dice = Dice::new(self.seed, Stream::Operator);
        if !dice.chance(200) {
            return;
        }
        // Shares and quotas were drawn for the pool as it is.
        let has_settings = self.has_settings();
        if self.disk_bytes >= RING && !has_settings && dice.chance(600) {
            return self.draw_lone_drain(&dice);
        }
        if !has_settings && dice.chance(600) {
            // Each node has a replica of most blocks, and no third one takes any.
            self.nodes = 2;
            self.two_replicas = true;
            if !self.keeps_a_namespace() && !self.has_disks() && dice.chance(500) {
                // A replica on the other node is found wrong once a node is called drained.
                self.noise.flipped = self.noise.flipped.max(1);
                self.noise.flipped_writes = dice.between(20, 80);
                self.raise_calls(&[(Call::Put, 8), (Call::Get, 12)]);
            }
        }
        let mut at = dice.between(500, 3_000);
        for _ in 0..dice.between(1, 2) {
            let node = dice.index(self.nodes);
            let (force, down) = (dice.chance(400), dice.between(30, 1_500));
            self.faults
                .push((at, Fault::OutOfService(node, force, down)));
            let other = (node + 1) % self.nodes;
            let later = at + dice.between(5, [60, 2_500][dice.index(2)]);
            let next = match dice.below(4) {
                0 => Fault::Stop(Process::Node(other), dice.between(900, 2_500)),
                1 => Fault::Drain(other, down),
                _ => Fault::OutOfService(other, true, down),
            };
            if other != node {
                self.faults.push((later, next));
            }
            at = later + dice.between(3_000, 6_000);
        }
        self.length_ms = self.length_ms.max(at);
        if dice.chance(400) {
            self.stops_before_it_hears(&dice);
        }
    }

    /// Nodes out of service stop while the answer to their first report is on its way.
    fn stops_before_it_hears(&mut self, dice: &Dice) {
        let ordered = self.faults.iter().filter_map(|(_, fault)| match fault {
            Fault::OutOfService(node, ..) => Some(*node),
            _ => None,
        });
        let ordered: BTreeSet<usize> = ordered.collect();
        let at = Moment::Says(Said::Demoted);
        let stops = ordered.into_iter().map(|node| {
            let stop = Fault::Drain(node, dice.between(30, 1_500));
            (2, Trick::Fault(stop))
        });
        let late = Trick::Late(dice.between(20, 300));
        for (times, trick) in [(4, late)].into_iter().chain(stops) {
            self.lies_in_wait(at, (600, times), 0, trick);
        }
    }

    /// The only node is taken out of service, and copies its blocks to its disk. Blocks that lie there alone are read
    /// meanwhile. In the end the disk is gone, or fails.
    fn draw_lone_drain(&mut self, dice: &Dice) {
        self.keep_faults(|fault| !fault.harms_disk());
        self.noise.flipped_writes = 0;
        self.nodes = 1;
        let at = dice.between(2_000, 5_000);
        let mut down = dice.between(30, 1_500);
        if dice.chance(800) {
            // The node waits until it is called drained.
            down += u64::from(down.is_multiple_of(3));
            // Blocks that are on the disk alone are read, so that the node notices what happened.
            self.longest_pause = self.longest_pause.min(30_000);
            self.raise_calls(&[(Call::Get, 8), (Call::Hold, 4)]);
            let gone = Fault::Disk(0, DiskFault::IsGone, 0);
            match dice.below(3) {
                // A move without a target is given up after five seconds. The disk takes the blocks then.
                0 => self.faults.push((at + dice.between(5_300, 7_500), gone)),
                1 => self.happens_once_drained(dice, gone),
                _ => {
                    // Readers find wrong bytes, so blocks are read from the disk that are in memory.
                    self.noise.flipped = dice.between(50, 200);
                    // A copy that cannot be read is dropped. It may be the only place of a pinned block.
                    self.pins.clear();
                    self.happens_once_drained(dice, Fault::Disk(0, DiskFault::Fails, 1_200));
                }
            }
        }
        self.faults.push((at, Fault::OutOfService(0, true, down)));
        self.length_ms = self.length_ms.max(at + 9_000);
    }

    /// Something happens a moment after a node was told that its blocks are elsewhere. It goes on for a while then.
    fn happens_once_drained(&mut self, dice: &Dice, fault: Fault) {
        let at = Moment::Says(Said::Demoted);
        let after = dice.between(1_000, 400_000);
        // The first word may be that some blocks have no other place.
        self.lies_in_wait(at, (600, 3), after, Trick::Fault(fault));
    }
}

/// When the writing of each zone ended last.
type Sealed = BTreeMap<SegmentId, Vec<Tick>>;

/// The blocks in the memory of a node that drains, at the last look.
#[derive(Debug, Default)]
pub(crate) struct Stays {
    drains: Option<(u64, Incarnation)>,
    seen: BTreeMap<u64, Version>,
    at: Option<Instant>,
    /// Whether the node had not been told by then that it may leave.
    awaits: bool,
    /// The term and the zones at the last look at which no node drained.
    calm: Option<(u64, Sealed)>,
}

/// Blocks that have left the memory of a node that drains, with the time at which they were seen last.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// They have no copy.
    pub(crate) lost: Vec<(u64, Version, Instant)>,
    /// Their copies are in zones that were full before the drain began, so the drain may empty them.
    pub(crate) doomed: Vec<(u64, Version, Instant)>,
}

impl Stays {
    /// Looks at the only node of a pool whose disk has room and goes right. While it drains, memory is made free there
    /// only for loads, by blocks whose copies stay. So a block that was in its memory is there, or on its disk. Returns
    /// the others.
    pub(crate) fn look(&mut self, sight: &Sight<'_>, world: &World) -> Left {
        let plan = &world.plan;
        let members = sight.pool.members.all();
        let awaits = |one: &Arc<StoreNode>| one.drains() && one.awaits_word();
        let awaits = members.iter().any(awaits);
        let awaited = std::mem::replace(&mut self.awaits, awaits) && awaits;
        if !members.iter().any(|one| one.drains()) {
            self.calm = Some((sight.pool.epoch.0, sight.pool.sealed_zones()));
        }
        let mut draining = members
            .iter()
            .filter(|one| one.drains() && one.is_connected());
        let drains = match plan.nodes == 1 && !world.has_just_lost() {
            true => draining
                .next()
                .map(|one| (sight.pool.epoch.0, one.incarnation)),
            false => None,
        };
        let is_same = drains.is_some() && drains == self.drains;
        self.drains = drains;
        // While the log is full, blocks of an earlier life of the node stay in the directory.
        let node = drains.map(|(_, node)| node);
        let is_here = |block: &StoredBlock| {
            let mut replicas = block.replicas.iter();
            node.is_some_and(|node| replicas.any(|at| is_on(sight.pool, at, node)))
        };
        let blocks = sight.blocks().filter(|(_, block)| is_here(block));
        let now = blocks.map(|(key, block)| (key, block.version)).collect();
        let before = std::mem::replace(&mut self.seen, now);
        let since = self.at.replace(Instant::now());
        let mut left = Left::default();
        let Some(since) = since.filter(|_| is_same) else {
            return left;
        };
        let judges_zones =
            awaited && zones_stay(world) && !world.load.is_over.load(Ordering::Acquire);
        for (key, version) in before {
            let has_version = |form: &&StoredBlock| form.version == version;
            if sight.block(key).is_some_and(|block| has_version(&block)) {
                continue;
            }
            match sight.copy(key).filter(has_version) {
                None if blocks_stay(world) => left.lost.push((key, version, since)),
                Some(copy) if judges_zones && self.is_doomed(sight.pool, copy) => {
                    left.doomed.push((key, version, since));
                }
                None | Some(_) => {}
            }
        }
        left
    }

    /// Whether a copy is in a zone that was full before the drain began, and that was not written since. The drain
    /// keeps the zone that it found half full, and those that it has filled.
    fn is_doomed(&self, pool: &Pool, copy: &StoredBlock) -> bool {
        let calm = self.calm.as_ref();
        let Some((_, before)) = calm.filter(|(term, _)| *term == pool.epoch.0) else {
            return false;
        };
        let now = pool.sealed_zones();
        let media = pool.media();
        copy.replicas.iter().any(|at| {
            let mut records = media.iter().map(|view| &view.record);
            let Some(medium) = records.find(|medium| medium.id == at.segment) else {
                return false;
            };
            let zone = at.offset.0 / medium.zone.0.max(1);
            let at_zone = |zones: &Sealed| {
                let zones = zones.get(&at.segment)?;
                zones.get(usize::try_from(zone).ok()?).copied()
            };
            let was_full = at_zone(before);
            zone != u64::from(medium.cursor) && was_full.is_some() && was_full == at_zone(&now)
        })
    }
}

/// Whether memory is made free for loads alone while the only node drains. An operator's order makes no copies at
/// first, and empties no zone.
fn zones_stay(world: &World) -> bool {
    let is_order = |fault: &Fault| matches!(fault, Fault::OutOfService(..));
    nothing_else_takes_blocks(world) && !world.plan.all_faults().any(is_order)
}

/// Whether nothing but a change of its key takes a block from memory and from the disk at once.
fn blocks_stay(world: &World) -> bool {
    world.plan.disk_bytes >= RING && nothing_else_takes_blocks(world)
}

/// Whether no wrong byte, no fault of the only disk and no administrator takes a block.
fn nothing_else_takes_blocks(world: &World) -> bool {
    let plan = &world.plan;
    plan.noise.flipped_writes == 0
        && is_right_so_far(world, 0)
        && !plan.has_settings()
        && !plan.all_faults().any(Fault::takes_from_namespace)
}

/// Whether an operator's order without force must be refused: the node serves, no other node takes blocks, and a block
/// has its only place on this one.
pub(crate) fn is_last(pool: &Pool, node: Incarnation) -> bool {
    let members = pool.members.all();
    let mut own = members.iter().filter(|one| one.incarnation == node);
    let mut others = members.iter().filter(|one| one.incarnation != node);
    if own.all(|one| one.drains()) || others.any(|one| one.is_placeable() && one.is_connected()) {
        return false;
    }
    let copies = pool.stored_copies().into_iter();
    let copies: BTreeSet<Version> = copies.map(|copy| copy.version).collect();
    let is_only_here = |replicas: &[Replica], version: Version| {
        replicas.iter().any(|at| is_on(pool, at, node)) && !copies.contains(&version)
    };
    let mut blocks = pool.stored_blocks().into_iter();
    blocks.any(|block| is_only_here(&block.replicas, block.version))
}

/// Whether the node drains, as this master sees it.
pub(crate) fn drains(pool: &Pool, node: Incarnation) -> bool {
    let members = pool.members.all();
    let mut own = members.iter().filter(|one| one.incarnation == node);
    own.any(|one| one.drains())
}

/// Whether the leader calls the node drained.
pub(crate) fn is_called_drained(world: &World, node: Incarnation) -> bool {
    leading(world).iter().any(|(_, pool)| {
        let members = pool.members.all();
        let mut own = members.iter().filter(|one| one.incarnation == node);
        own.any(|one| pool.state_label(one) == NodeState::DRAINED)
    })
}

/// Whether copies have stayed on disks until a doubt was raised about drained nodes: zones are not emptied. In a pool
/// of one node a disk that is gone is such a doubt, and so is a copy that is found wrong.
fn copies_stay(world: &World) -> bool {
    let plan = &world.plan;
    let lasts = |fault: &Fault| match fault {
        Fault::Disk(_, DiskFault::IsGone | DiskFault::Fails | DiskFault::IsFull, _) => {
            plan.nodes == 1
        }
        other => !other.harms_disk(),
    };
    let are_right = || (0..plan.nodes).all(|node| is_right_so_far(world, node));
    let is_deleted = || (0..plan.tenants.len()).any(|tenant| plan.deletes(tenant));
    let stay = || !is_deleted() && (plan.all_faults().all(lasts) || are_right());
    !plan.has_disks() || plan.disk_bytes >= RING && stay()
}

/// Drained nodes that wait for no moves, have a medium in use and await a word, each in a term and since when.
///
/// Such a node gets no word while it has no medium, and is called drained then. Once it has one, the next look of its
/// leader ends that, until the node is told.
#[derive(Debug, Default)]
pub(crate) struct Unheard(BTreeMap<(u64, Incarnation), Instant>);

impl Unheard {
    /// Looks at the nodes of a leader.
    fn look(&mut self, pool: &Pool) -> Result<(), String> {
        let before = std::mem::take(&mut self.0);
        for node in pool.members.all() {
            let is_drained = pool.state_label(&node) == NodeState::DRAINED;
            if !is_drained || !node.awaits_word() || !uses_medium(pool, &node) {
                continue;
            }
            let of = (pool.epoch.0, node.incarnation);
            let since = before.get(&of).copied().unwrap_or_else(Instant::now);
            if since.elapsed() > COUNTED {
                return Err(format!(
                    "{} is called drained and has a medium, and was not told that it may leave",
                    node.name
                ));
            }
            self.0.insert(of, since);
        }
        Ok(())
    }

    /// No leader is there to look at.
    pub(crate) fn forget(&mut self) {
        self.0.clear();
    }
}

/// Whether a medium of the node is attached in its present session. An earlier life of the node has the same name.
fn uses_medium(pool: &Pool, node: &StoreNode) -> bool {
    let members = pool.members.all();
    let mut others = members
        .iter()
        .filter(|one| one.incarnation != node.incarnation);
    if !node.is_connected() || others.any(|one| one.name == node.name && one.is_connected()) {
        return false;
    }
    let is_used = |state: &str| matches!(state, "ready" | "read_only" | "slow");
    let mut media = pool.media().into_iter();
    media.any(|medium| medium.record.node == node.name && is_used(medium.state))
}

/// A node that is called drained can stop: no block would be lost with it, and it was told so.
///
/// A node that becomes silent or leaves, a medium that is gone, and a replica or copy that is found wrong end the label
/// at once. A drained node gets no block: its puts and pulls were counted, and a load leaves the copy where it is.
pub(crate) fn labels_are_true(world: &World, sight: &Sight<'_>) -> Result<(), String> {
    let (plan, pool) = (&world.plan, sight.pool);
    let waits_for_moves = plan.departs != Some(Departs::WithoutMoves);
    if !waits_for_moves {
        world.unheard.lock().look(pool)?;
    }
    for node in pool.members.all() {
        if pool.state_label(&node) != NodeState::DRAINED {
            continue;
        }
        if waits_for_moves && node.awaits_word() {
            return Err(format!(
                "{} is called drained, and was not told that it may leave",
                node.name
            ));
        }
        if !copies_stay(world) {
            continue;
        }
        let own = node.segments();
        let gone: Vec<SegmentId> = pool
            .media()
            .into_iter()
            .filter(|medium| medium.state == "gone")
            .map(|medium| medium.record.id)
            .collect();
        let copies: BTreeSet<Version> = sight
            .survey
            .copies
            .iter()
            .filter(|copy| copy.replicas.iter().any(|at| !gone.contains(&at.segment)))
            .map(|copy| copy.version)
            .collect();
        let segments = pool.placement.segments();
        let stays = |at: &Replica| {
            let segment = segments.get(at.segment);
            segment.is_some_and(|one| one.node.is_readable() && !one.node.drains())
        };
        let mut blocks = sight.survey.blocks.iter();
        let lost = blocks.find(|block| {
            block.replicas.iter().any(|at| own.contains(&at.segment))
                && !block.replicas.iter().any(stays)
                && !copies.contains(&block.version)
        });
        if let Some(lost) = lost {
            return Err(format!(
                "{} is called drained, and version {} of {} would be lost with it",
                node.name, lost.version, lost.key
            ));
        }
    }
    Ok(())
}
