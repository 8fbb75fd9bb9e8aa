//! Hard pins: some keys are put with one. Their blocks stay, in memory or on a disk, until the key changes or the last
//! place of the block is lost.

use crate::copies::is_right_so_far;
use crate::dice::{Dice, Stream};
use crate::load::{Task, name, parent_of};
use crate::plan::{DiskFault, Fault, Loss, NARROW, Plan, Tenant};
use crate::sight::Sight;
use crate::world::World;
use kvpool_client::Remove;
use kvpool_master::pool::Pool;
use kvpool_master::replica::Replica;
use kvpool_types::{Extent, Incarnation, Offset, SegmentId, Setting, Version};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use tokio::time::Instant;

/// One of so many keys is pinned.
const KEYS: u64 = 16;
/// The same with disks of two zones: pinned copies fill more than one of them.
const KEYS_OF_NARROW: u64 = 3;

/// A pinned block at the last look.
#[derive(Clone, Debug)]
struct Seen {
    version: Version,
    memory: Vec<SegmentId>,
    media: Vec<SegmentId>,
    /// Whether all of its nodes in `memory` leave.
    leaves: bool,
    /// Whether none of these nodes can be read.
    is_hidden: bool,
    /// Whether one of these nodes can be read, has a session and stays.
    stays: bool,
}

/// What was seen of pinned blocks, by the numbers of their keys. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    seen: BTreeMap<u64, Seen>,
    /// The blocks with a byte that became wrong on its way.
    damaged: BTreeSet<Version>,
    at: Option<Instant>,
    /// The nodes of the segments in memory at the last look.
    nodes: BTreeMap<SegmentId, Incarnation>,
    /// The term of the last look.
    epoch: u64,
    /// How many nodes had been lost by then.
    losses: u64,
}

/// A pinned block that has left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unpinned {
    pub(crate) key: u64,
    pub(crate) version: Version,
    /// When it was seen last.
    pub(crate) since: Instant,
}

/// The disks of the nodes for which `is_wanted` is true.
fn disks_of(plan: &Plan, pool: &Pool, is_wanted: impl Fn(usize) -> bool) -> Vec<SegmentId> {
    let wanted = (0..plan.nodes).filter(|node| is_wanted(*node));
    let wanted: Vec<String> = wanted.map(|node| format!("n{node}")).collect();
    let views = pool.media().into_iter().map(|view| view.record);
    let disks = views.filter(|medium| wanted.contains(&medium.node.0));
    disks.map(|medium| medium.id).collect()
}

/// Whether an administrator deletes the namespace of the key.
fn is_deleted(plan: &Plan, key: u64) -> bool {
    let mut tenants = 0..plan.tenants.len();
    tenants.any(|tenant| plan.keys_of(tenant).contains(&key) && plan.deletes(tenant))
}

impl Tenant {
    fn may_pin(&self) -> bool {
        let limits = [
            Setting::MemoryHard,
            Setting::BlocksHard,
            Setting::MediaHard,
            Setting::Guaranteed,
        ];
        !self.keeps_all() && limits.iter().all(|one| self.settings.get(*one).is_none())
    }
}

impl Plan {
    /// From a stream of its own. Pinned blocks fill at most half of a node's memory.
    pub(crate) fn draw_pins(&mut self) {
        let dice = Dice::new(self.seed, Stream::Pins);
        let is_scarce = self.all_faults().any(Fault::takes_memory);
        // A copy that cannot be read is dropped, and may be the only place of its block.
        let fails = |fault: &Fault| matches!(fault, Fault::Disk(_, DiskFault::Fails, _));
        let has_failing = self.disk_bytes == NARROW && self.all_faults().any(fails);
        if self.keeps_all || is_scarce || has_failing || !dice.chance(600) {
            return;
        }
        let mut most = self.segment_bytes / 2 / self.longest_block;
        for (number, tenant) in self.tenants.iter().enumerate() {
            let changes_it =
                |fault: &Fault| matches!(fault, Fault::Quota(who, _) if *who == number);
            let changes = self.all_faults().any(changes_it);
            if changes || !tenant.may_pin() {
                continue;
            }
            // With policy `prefix` a pinned block holds those before it in its chain.
            let keys = self.keys_of(number);
            let share = match self.disk_bytes {
                NARROW => KEYS_OF_NARROW,
                _ => KEYS,
            };
            let count = ((keys.end - keys.start) / share).clamp(1, most.max(1));
            let mut first: Vec<u64> = keys.filter(|key| parent_of(*key).is_none()).collect();
            for _ in 0..count.min(most) {
                if !first.is_empty() {
                    self.pins.push(first.swap_remove(dice.index(first.len())));
                    most -= 1;
                }
            }
        }
    }

    /// Whether blocks of the key are hard-pinned.
    pub(crate) fn pins(&self, key: u64) -> bool {
        self.pins.contains(&key)
    }

    /// Whether nothing in this history takes what is on the disk of the node.
    fn keeps_disk(&self, node: usize) -> bool {
        let mut losses = self.losses();
        losses.all(|(who, loss)| who != node || loss < Loss::Disk)
    }
}

impl Task {
    /// A removal without force takes no pinned block.
    pub(crate) async fn remove_pinned(&self, key: u64) -> String {
        let keys = Remove::Keys(vec![name(key)]);
        let said = match self.client.remove(keys, false).await {
            Ok(removed) if removed.removed > 0 => {
                let wrong = format!("a removal without force took the pinned block of key {key}");
                self.load.violate(wrong);
                "took it".to_owned()
            }
            Ok(removed) => format!("{removed:?}"),
            Err(error) => error.to_string(),
        };
        format!("remove of the pinned key {key}: {said}")
    }
}

/// Where bytes of blocks became wrong on their way to a node.
#[derive(Debug, Default)]
pub(crate) struct Damage(Mutex<BTreeSet<(SegmentId, Offset)>>);

impl Damage {
    pub(crate) fn note(&self, extent: &Extent) {
        self.0.lock().insert((extent.segment, extent.offset));
    }

    fn is_at(&self, replicas: &[Replica]) -> bool {
        let places = self.0.lock();
        let mut replicas = replicas.iter();
        replicas.any(|at| places.contains(&(at.segment, at.offset)))
    }
}

impl Pins {
    /// The leader's pinned blocks, by the numbers of their keys.
    fn see(&mut self, sight: &Sight<'_>, world: &World) -> Result<BTreeMap<u64, Seen>, String> {
        let plan = &world.plan;
        let segments = sight.pool.placement.segments();
        let is_there = |id: &SegmentId| segments.get(*id).is_some_and(|one| one.node.is_readable());
        let leaves = |id: &SegmentId| segments.get(*id).is_none_or(|one| one.node.drains());
        let has_session = |id: &SegmentId| {
            let segment = segments.get(*id);
            segment.is_some_and(|one| one.node.is_connected())
        };
        let stays = |id: &SegmentId| is_there(id) && has_session(id) && !leaves(id);
        let mut now = BTreeMap::new();
        for tenant in 0..plan.tenants.len() {
            for key in plan.keys_of(tenant).filter(|key| plan.pins(*key)) {
                let forms = [sight.block(key), sight.copy(key)];
                for form in forms.into_iter().flatten() {
                    if !form.hard_pin {
                        return Err(format!(
                            "key {key}, version {}, has lost its hard pin in {:?}",
                            form.version, form.replicas
                        ));
                    }
                }
                let Some(latest) = forms.into_iter().flatten().map(|form| form.version).max()
                else {
                    continue;
                };
                let places = forms.map(|form| {
                    let form = form.filter(|form| form.version == latest);
                    let replicas = form.map(|form| form.replicas.iter()).into_iter().flatten();
                    replicas.map(|at| at.segment).collect::<Vec<_>>()
                });
                if let Some(block) = forms[0]
                    && world.net.damage.is_at(&block.replicas)
                {
                    self.damaged.insert(block.version);
                }
                let [memory, media] = places;
                let seen = Seen {
                    version: latest,
                    leaves: memory.iter().all(leaves),
                    is_hidden: !memory.iter().any(is_there),
                    stays: memory.iter().any(stays),
                    memory,
                    media,
                };
                now.insert(key, seen);
            }
        }
        Ok(now)
    }

    /// Looks at the leader's pinned blocks. Returns those that have left, though one of their places is there.
    pub(crate) fn look(
        &mut self,
        sight: &Sight<'_>,
        world: &World,
    ) -> Result<Vec<Unpinned>, String> {
        let (plan, pool) = (&world.plan, sight.pool);
        let now = self.see(sight, world)?;
        let segments = pool.placement.segments();
        let is_there = |id: &SegmentId| segments.get(*id).is_some_and(|one| one.node.is_readable());
        let disks = disks_of(plan, pool, |node| {
            plan.keeps_disk(node) || is_right_so_far(world, node)
        });
        let since = self.at.replace(Instant::now());
        let before = std::mem::replace(&mut self.seen, now);
        let is_same_term = std::mem::replace(&mut self.epoch, pool.epoch.0) == pool.epoch.0;
        if is_same_term && !world.has_just_lost() {
            self.copies_stay(world, pool, &before)?;
        }
        let nodes = segments.iter().map(|one| (one.id, one.node.incarnation));
        let took_over = self.note_nodes(nodes.collect());
        let losses = world.losses.load(Ordering::Acquire);
        let lost_none = std::mem::replace(&mut self.losses, losses) == losses;
        // A node that stayed for a moment took the block over, and was lost.
        let is_judged = is_same_term && lost_none && plan.ssd_drop_ms.is_none();
        let sound = disks_of(plan, pool, |node| is_right_so_far(world, node));
        let has_copy = |seen: &Seen| seen.media.iter().any(|id| sound.contains(id));
        let left = before.into_iter().filter_map(|(key, seen)| {
            let stays = match seen.memory.is_empty() {
                true => seen.media.iter().any(|id| disks.contains(id)),
                false => seen.memory.iter().any(is_there),
            };
            let now = self.seen.get(&key).map(|now| now.version);
            let keeps_copy = is_judged && !is_deleted(plan, key);
            let stays = stays || keeps_copy && !seen.stays && has_copy(&seen);
            let has_left = stays && now != Some(seen.version) && !took_over(&seen);
            (has_left && !self.damaged.contains(&seen.version)).then_some(Unpinned {
                key,
                version: seen.version,
                since: since?,
            })
        });
        Ok(left.collect())
    }

    /// Returns whether a node that did not have a block has left since the last look. It may have taken the block over
    /// from the memory of another one.
    fn note_nodes(
        &mut self,
        now: BTreeMap<SegmentId, Incarnation>,
    ) -> impl Fn(&Seen) -> bool + use<> {
        let stays: BTreeSet<Incarnation> = now.values().copied().collect();
        let before = std::mem::replace(&mut self.nodes, now);
        move |seen| {
            let had: BTreeSet<_> = seen.memory.iter().filter_map(|id| before.get(id)).collect();
            let mut nodes = before.values();
            let has_left = |node: &Incarnation| !stays.contains(node) && !had.contains(node);
            !seen.memory.is_empty() && nodes.any(has_left)
        }
    }

    /// A copy of a pinned block leaves its zone for memory alone. That memory can be read, and its node stays.
    ///
    /// A node that drains does so until its end. A node that cannot be read does not come back and become suspect again
    /// between two looks. So where all nodes in memory were so at both looks, the copy had no reason
    /// to leave in between. A new place in memory may have been such a reason.
    fn copies_stay(
        &self,
        world: &World,
        pool: &Pool,
        before: &BTreeMap<u64, Seen>,
    ) -> Result<(), String> {
        let plan = &world.plan;
        let disks = disks_of(plan, pool, |node| is_right_so_far(world, node));
        for (key, seen) in before.iter().filter(|(key, _)| !is_deleted(plan, **key)) {
            let Some(now) = self.seen.get(key) else {
                continue;
            };
            let is_same = now.version == seen.version
                && !now.memory.is_empty()
                && now.memory.iter().all(|id| seen.memory.contains(id));
            let had_none = seen.leaves && now.leaves || seen.is_hidden && now.is_hidden;
            let had_copy = seen.media.iter().any(|id| disks.contains(id));
            let is_alone = is_same && had_none && had_copy && now.media.is_empty();
            if is_alone && !self.damaged.contains(&seen.version) {
                return Err(format!(
                    "the copy of the hard-pinned block of key {key}, version {}, has left its disk, and its nodes \
                     in memory leave or cannot be read",
                    seen.version
                ));
            }
        }
        Ok(())
    }
}
