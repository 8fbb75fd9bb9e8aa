//! A copy on a disk that has gone right so far, and has room, stays until its key changes.

use crate::plan::{Fault, Loss, Plan, Trick};
use crate::sight::Sight;
use crate::world::World;
use kvpool_master::directory::{StoredBlock, Tick};
use kvpool_master::pool::Pool;
use kvpool_types::{Epoch, SegmentId, Version};
use std::collections::{BTreeMap, BTreeSet};
use tokio::time::Instant;

/// The copies that should stay at the last look, by the numbers of their keys. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    seen: BTreeMap<u64, Seen>,
    at: Option<Instant>,
    /// The zones that were being written at the last look.
    cursors: BTreeMap<SegmentId, u32>,
    /// The term of the last look, and when each zone was full then.
    sealed: (Epoch, BTreeMap<SegmentId, Vec<Tick>>),
    /// The media whose zones are written a second time, or soon will be.
    turned: BTreeSet<SegmentId>,
    /// The media that were seen, with their nodes.
    media: BTreeMap<SegmentId, String>,
}

/// A copy that should stay.
#[derive(Clone, Copy, Debug)]
struct Seen {
    version: Version,
    medium: SegmentId,
    /// Whether another node with a disk that loses copies has had the block in memory since the copy was seen first.
    may_move: bool,
}

/// A copy that has left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lost {
    pub(crate) key: u64,
    pub(crate) version: Version,
    /// When it was seen last.
    pub(crate) since: Instant,
}

/// Whether nothing in this history takes copies from the disk of the node.
pub(crate) fn is_right(plan: &Plan, node: usize) -> bool {
    let mut losses = plan.losses();
    losses.all(|(who, loss)| who != node || loss < Loss::Writes)
}

/// Whether nothing has taken copies from the disk of the node so far. A fault that comes later excuses nothing now.
pub(crate) fn is_right_so_far(world: &World, node: usize) -> bool {
    let is_harmed = || world.ssds.get(node).is_some_and(|ssd| ssd.is_harmed());
    is_right(&world.plan, node) || !is_harmed()
}

/// Whether a copy of another disk at this node, if there is one, is all that happens to the node's disk. An old image
/// takes nothing from the node that has the original, and an equal one stays where it is.
fn keeps_clone(plan: &Plan, node: usize) -> bool {
    let clones = plan.all_faults();
    let clones = clones.filter(|fault| matches!(fault, Fault::Cloned(_, to, _) if *to == node));
    let waits = plan
        .ambushes
        .iter()
        .any(|ambush| matches!(ambush.trick, Trick::Fault(Fault::Cloned(_, to, _)) if to == node));
    let losses = plan.losses();
    let losses = losses.filter(|(who, loss)| *who == node && *loss >= Loss::Writes);
    match clones.count() {
        0 => true,
        count => count == 1 && !waits && losses.count() == 1,
    }
}

/// Whether the blocks of a namespace stay but for changes of their keys.
fn is_kept(plan: &Plan, tenant: usize) -> bool {
    let mut faults = plan.all_faults();
    !faults.any(
        |fault| matches!(fault, Fault::Delete(who, _) | Fault::Quota(who, _) if *who == tenant),
    )
}

/// Whether one of the nodes but the copy's own has the block in memory. Two nodes may store one block. The later copy
/// replaces the earlier one, and may leave its disk with a zone before the next look.
fn is_in_memory_of(
    nodes: &BTreeSet<String>,
    sight: &Sight<'_>,
    (key, version): (u64, Version),
    own: Option<&str>,
) -> bool {
    let segments = sight.pool.placement.segments();
    let block = sight.block(key).filter(|block| block.version == version);
    let mut replicas = block.iter().flat_map(|block| block.replicas.iter());
    let is_other = |name: &str| nodes.contains(name) && own != Some(name);
    replicas.any(|at| {
        let segment = segments.get(at.segment);
        segment.is_some_and(|segment| is_other(&segment.node.name.0))
    })
}

impl Copies {
    /// A medium that goes right stays known, with its copies, whichever process starts again.
    pub(crate) fn media_stay(&mut self, pool: &Pool, plan: &Plan) -> Result<(), String> {
        // Of two equal disks either may be taken. The medium then belongs to the copy's node, and goes with it.
        if plan.ssd_drop_ms.is_some() || !(0..plan.nodes).all(|node| keeps_clone(plan, node)) {
            return Ok(());
        }
        let right = (0..plan.nodes).filter(|node| is_right(plan, *node));
        let right: BTreeSet<String> = right.map(|node| format!("n{node}")).collect();
        let now: BTreeMap<SegmentId, String> = pool
            .media()
            .into_iter()
            .map(|medium| (medium.record.id, medium.record.node.0))
            .collect();
        let mut gone = self.media.iter();
        if let Some((id, node)) =
            gone.find(|(id, node)| right.contains(*node) && !now.contains_key(id))
        {
            return Err(format!(
                "the medium {id} of {node} is forgotten, and nothing happened to it"
            ));
        }
        self.media = now;
        Ok(())
    }

    /// Looks at the leader's copies. Returns those that have left since the last look.
    pub(crate) fn look(&mut self, sight: &Sight<'_>, world: &World) -> Vec<Lost> {
        let plan = &world.plan;
        let names_of = |is_it: &dyn Fn(usize) -> bool| -> Vec<String> {
            let nodes = (0..plan.nodes).filter(|node| is_it(*node));
            nodes.map(|node| format!("n{node}")).collect()
        };
        let right = names_of(&|node| is_right_so_far(world, node));
        // A disk that loses copies later may do so before the next look.
        let stays_right = names_of(&|node| is_right(plan, node));
        let media = sight.pool.media();
        // The zones are written in a ring. The first is emptied when the last one is being written.
        let sealed = (sight.pool.epoch, sight.pool.sealed_zones());
        let was_sealed = std::mem::replace(&mut self.sealed, sealed.clone());
        // All zones of a small disk may be written between two looks, and the first again. Then the next zone to be
        // written was full at another time. A leader empties no zone in its first moments.
        let is_round = |medium: SegmentId, cursor: u32| {
            let of = |(_, sealed): &(Epoch, BTreeMap<SegmentId, Vec<Tick>>)| {
                let zones = sealed.get(&medium)?;
                let next = (cursor as usize + 1) % zones.len().max(1);
                zones.get(next).copied()
            };
            was_sealed.0 == sealed.0 && of(&was_sealed).is_some_and(|at| of(&sealed) != Some(at))
        };
        let turns = media.iter().map(|medium| &medium.record).filter(|medium| {
            let zones = medium.size.0 / medium.zone.0.max(1);
            let before = self.cursors.insert(medium.id, medium.cursor);
            // A drain may write many zones between two looks.
            let has_turned = before.is_some_and(|before| before > medium.cursor);
            has_turned
                || is_round(medium.id, medium.cursor)
                || u64::from(medium.cursor) + 1 >= zones
        });
        self.turned.extend(turns.map(|medium| medium.id));
        let records: Vec<_> = media.into_iter().map(|medium| medium.record).collect();
        let is_fresh = |medium: &SegmentId| !self.turned.contains(medium);
        let counted = records
            .iter()
            .filter(|medium| right.contains(&medium.node.0));
        let media: BTreeMap<SegmentId, String> = counted
            .filter(|medium| is_fresh(&medium.id))
            .map(|medium| (medium.id, medium.node.0.clone()))
            .collect();
        let others = records
            .iter()
            .filter(|medium| !stays_right.contains(&medium.node.0) || !is_fresh(&medium.id));
        let others: BTreeSet<String> = others.map(|medium| medium.node.0.clone()).collect();
        let on = |copy: &StoredBlock| {
            let mut places = copy.replicas.iter().map(|at| at.segment);
            places.find(|medium| media.contains_key(medium))
        };
        // A medium that was absent for too long loses all copies, and is forgotten a moment later.
        let is_emptied = |medium: &SegmentId| {
            let mut copies = sight.survey.copies.iter();
            plan.ssd_drop_ms.is_some() && !copies.any(|copy| on(copy) == Some(*medium))
        };
        let (mut now, mut stay) = (BTreeMap::new(), BTreeMap::new());
        let tenants = (0..plan.tenants.len()).filter(|tenant| is_kept(plan, *tenant));
        let kept: Vec<_> = tenants.map(|tenant| plan.keys_of(tenant)).collect();
        for (key, copy) in sight.copies() {
            if !kept.iter().any(|keys| keys.contains(&key)) {
                continue;
            }
            now.insert(key, copy.version);
            if let Some(medium) = on(copy) {
                let version = copy.version;
                let before = self.seen.get(&key).filter(|seen| seen.version == version);
                let own = media.get(&medium).map(String::as_str);
                let may_move = before.is_some_and(|seen| seen.may_move)
                    || is_in_memory_of(&others, sight, (key, version), own);
                let seen = Seen {
                    version,
                    medium,
                    may_move,
                };
                stay.insert(key, seen);
            }
        }
        let since = self.at.replace(Instant::now());
        let before = std::mem::replace(&mut self.seen, stay);
        let lost = before.into_iter().filter_map(|(key, seen)| {
            let Seen {
                version,
                medium,
                may_move,
            } = seen;
            // A disk that was written much since the last look may have taken the copy's zone.
            let has_left = media.contains_key(&medium)
                && now.get(&key) != Some(&version)
                && !is_emptied(&medium)
                && !may_move;
            has_left.then_some(Lost {
                key,
                version,
                since: since?,
            })
        });
        lost.collect()
    }
}
