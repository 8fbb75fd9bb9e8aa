//! The thread that works through tasks: it chooses sources and targets, and orders pulls.

use super::super::Pool;
use super::super::quotas::OverQuota;
use super::super::tiering::{Moved, WantedRoom};
use super::pulls::Pull;
use super::tasks::{Change, Outcome, Task};
use super::{Brought, Wish, Work};
use crate::clock::BootInstant;
use crate::directory::{Goal, Spared, Tick};
use crate::membership::StoreNode;
use crate::placement::{Extents, Segments};
use crate::replica::Replica;
use crate::workers::Workers;
use kvpool_types::{Code, Extent, GrantId, NodeName};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::runtime::Handle;

/// The longest time that the thread waits without a wake-up.
const TICK: Duration = Duration::from_millis(20);
/// The delay before a block that found no room or no node is tried again.
const RETRY: Duration = Duration::from_millis(50);
/// How long a task asks a target for room before it passes over blocks.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most waits of a block for a node or for room. Then the block is left unchanged.
const MOST_WAITS: u8 = 100;
/// A node that stops waits for another one that was heard within this time. Its connection may be broken, or its
/// process may start again after a crash. A node that is silent for longer must not delay each stop.
const RETURNS: Duration = Duration::from_secs(30);
/// The number of blocks of one task that are begun before other tasks have their turn.
const TURN: usize = 256;

/// A block to change, in its present state.
struct Found {
    moved: Moved,
    replicas: Vec<Replica>,
    tick: Tick,
}

/// The outcome for a block whose turn in the task has come.
pub(super) enum Step {
    /// A pull was ordered, and the end of the pull counts the block.
    Ordered,
    /// The block needs no pull.
    Ended(Outcome),
    /// The block has to wait, for this reason. The task continues with other blocks.
    Later(Code, String),
    /// The target or the pool has too much in progress to begin this block.
    Busy,
}

/// Starts the mover.
pub(in crate::pool) fn start(pool: &Arc<Pool>, workers: Workers) -> std::io::Result<()> {
    let runtime = Handle::current();
    let mut next_look = BootInstant(0);
    workers.start(
        pool,
        "mover",
        |pool| &pool.replicas.wake,
        TICK,
        move |pool| {
            if pool.leads() {
                pool.end_lost_pulls();
                pool.tend_hot_blocks();
                pool.tend_tasks();
                pool.tell_waiting(&runtime);
                if pool.now() >= next_look {
                    next_look = pool.look_at_drains();
                }
            }
            TICK
        },
    )
}

impl Pool {
    fn tend_tasks(self: &Arc<Self>) {
        // While the log takes no records, no replica could be recorded.
        if !self.takes_records() {
            return;
        }
        let tasks = self.replicas.tasks.running();
        loop {
            let mut is_idle = true;
            for task in &tasks {
                for _ in 0..TURN {
                    let now = self.now();
                    let Some(mut work) = task.next(now) else {
                        break;
                    };
                    match self.change(task, &work) {
                        Step::Ordered => task.is_fed(),
                        Step::Ended(outcome) => task.end(outcome, now),
                        Step::Busy => {
                            task.give_back(work);
                            break;
                        }
                        Step::Later(code, message) => {
                            work.waits += u8::from(!self.awaits_return(task));
                            match work.waits < MOST_WAITS {
                                true => {
                                    task.try_later(work, now.after(RETRY), (code, message));
                                }
                                false => task.end(Outcome::Failed(code, message), now),
                            }
                            continue;
                        }
                    }
                    is_idle = false;
                }
            }
            if is_idle || self.is_stopping() {
                return;
            }
        }
    }

    /// Whether a task moves the blocks of a node that stops, and another node may return to take them. The node ends
    /// this wait itself, by its own time limit. A node with a medium needs this time to copy its blocks there.
    fn awaits_return(&self, task: &Task) -> bool {
        let from = task.wish.from.as_ref();
        let Some(node) = from.and_then(|name| self.members.get(name)) else {
            return false;
        };
        let waits = node.stops() && node.waits_for_moves() && node.is_connected();
        let is_copied = !node.media_leave() && self.may_store_on_media_of(&node);
        if !waits || is_copied {
            return false;
        }
        let (now, others) = (self.now(), self.members.all());
        others.iter().any(|other| other.may_return(now, RETURNS))
    }

    fn change(self: &Arc<Self>, task: &Arc<Task>, work: &Work) -> Step {
        let read = self
            .directory
            .read_block(work.block, work.version, |block| Found {
                moved: Moved::of(&block),
                replicas: block.replicas().to_vec(),
                tick: block.tick(),
            });
        let Some(found) = read else {
            return Step::Ended(task.missing(work.version));
        };
        match task.wish.change {
            Change::Drop => self.drop_replica(task.wish.from.as_ref(), &found),
            Change::Copy | Change::Move => self.order(task, work, found),
        }
    }

    /// Drops the replica on a node, if another one can be read.
    fn drop_replica(self: &Arc<Self>, from: Option<&NodeName>, found: &Found) -> Step {
        let _until_submitted = self.evicting.read();
        let (gone, others) = {
            let segments = self.placement.segments();
            let hidden = self.hidden.read();
            let is_on = |r: &&Replica| {
                let segment = segments.get(r.segment);
                segment.is_some_and(|segment| Some(&segment.node.name) == from)
            };
            let gone = found.replicas.iter().find(is_on).copied();
            let others = found.replicas.iter().filter(|r| Some(**r) != gone);
            let stays = |r: &&Replica| {
                let segment = segments.get(r.segment);
                segment.is_some_and(|segment| segment.node.stays())
                    && !self.is_hidden(&hidden, r, found.moved.version)
            };
            (gone, others.filter(stays).count())
        };
        let Some(gone) = gone else {
            return Step::Ended(Outcome::Gone);
        };
        if others == 0 {
            let message = match found.replicas.len() {
                1 => "it is the block's last replica",
                _ => "it is the block's last replica on a node that stays",
            };
            return Step::Ended(Outcome::Failed(Code::LastReplica, message.to_owned()));
        }
        let ended = self.give_up_replica(found, &gone);
        if let Outcome::Changed(_) = ended {
            self.metrics.replica_dropped();
        }
        Step::Ended(ended)
    }

    /// Drops a replica of a block that has others. The caller must hold the lock `evicting`.
    fn give_up_replica(self: &Arc<Self>, found: &Found, gone: &Replica) -> Outcome {
        match self.drop_spare_logged(&found.moved, gone) {
            Spared::Dropped(_) => Outcome::Changed(found.moved.length),
            Spared::Missing => Outcome::Gone,
            Spared::Last => {
                let message = "it is the block's last replica".to_owned();
                Outcome::Failed(Code::LastReplica, message)
            }
        }
    }

    /// Continues a move whose new replica was on a node that might leave. `None` if the block must
    /// move to another node.
    fn end_move(self: &Arc<Self>, work: &Work, found: &Found) -> Option<Step> {
        let Brought { replica, given_up } = work.brought?;
        let node = {
            let segments = self.placement.segments();
            Arc::clone(&segments.get(replica.segment)?.node)
        };
        let _until_submitted = self.evicting.read();
        if !found.replicas.contains(&replica) || !found.replicas.contains(&given_up) {
            return None;
        }
        if node.stays() {
            let ended = self.give_up_replica(found, &given_up);
            if let Outcome::Changed(length) = ended {
                self.metrics.replica_moved(length);
            }
            return Some(Step::Ended(ended));
        }
        let name = &node.name;
        match (node.drains(), &work.to) {
            (true, None) => None,
            (true, Some(_)) => {
                let why = format!("node {name} has the block, and leaves");
                Some(Step::Ended(Outcome::Failed(Code::Draining, why)))
            }
            (false, _) => {
                let why = format!("node {name} has the block, and cannot be read now");
                Some(Step::Later(Code::Unreachable, why))
            }
        }
    }

    /// Orders the pull of a block for a copy or a move.
    fn order(self: &Arc<Self>, task: &Arc<Task>, work: &Work, found: Found) -> Step {
        if let Some(step) = self.end_move(work, &found) {
            return step;
        }
        let wish = &task.wish;
        let length = found.moved.length;
        let segments = self.placement.segments();
        let node_of = |replica: &Replica| Some(Arc::clone(&segments.get(replica.segment)?.node));
        let of_wish = found.replicas.iter().find(|replica| {
            node_of(replica).is_some_and(|node| wish.from.as_ref() == Some(&node.name))
        });
        if wish.from.is_some() && of_wish.is_none() {
            let is_elsewhere = found.replicas.iter().any(|r| node_of(r).is_some());
            return Step::Ended(match is_elsewhere {
                true => Outcome::Gone,
                false => task.without_place(),
            });
        }
        let readable = self.sources(work, &found, of_wish, node_of);
        let Some((source, source_node)) = readable.first().cloned() else {
            return Step::Later(Code::Unreachable, "no replica can be read now".to_owned());
        };
        let dropped = match wish.change {
            Change::Move => Some(of_wish.copied().unwrap_or(source)),
            Change::Copy | Change::Drop => None,
        };
        let holders: Vec<NodeName> = found
            .replicas
            .iter()
            .filter_map(|replica| Some(node_of(replica)?.name.clone()))
            .collect();
        let mut targets = match self.targets(&segments, work.to.as_ref(), &holders) {
            Ok(targets) => targets,
            // The block has another replica or copy that stays, so the move is not needed.
            Err(Step::Later(..))
                if work.to.is_none() && self.needs_none(wish, &readable, &holders) =>
            {
                return Step::Ended(Outcome::Gone);
            }
            Err(step) => return step,
        };
        if task.is_of_media() {
            // A block that was used long ago stays on a medium, and not for long in memory.
            let takes = |node: &Arc<StoreNode>| self.takes_moved(node, &found.moved, found.tick);
            targets.sort_by_key(|node| !takes(node));
        }
        if !self
            .replicas
            .pulls
            .lock()
            .lets_read(&source_node, self.now())
        {
            return Step::Busy;
        }
        let mut is_busy = false;
        let mut place = || {
            targets.iter().find_map(|target| {
                let is_taken = {
                    let pulls = self.replicas.pulls.lock();
                    pulls.takes(target, length) && !pulls.changes(work.block, target, dropped)
                };
                is_busy |= !is_taken;
                let to = is_taken
                    .then(|| segments.allocate_on(target, length, found.moved.namespace))?;
                Some((Arc::clone(target), to?))
            })
        };
        let placed = match wish.change {
            // A block must not be lost to a quota while it leaves its node, so it may count twice
            // for a while.
            Change::Move => Ok(place()),
            Change::Copy | Change::Drop => {
                let need = Goal {
                    bytes: Extents::rounded(length).0,
                    blocks: 0,
                };
                self.below_quota(found.moved.namespace, need, place)
            }
        };
        let placed = match placed {
            Ok(placed) => placed,
            Err(OverQuota { code, .. }) => {
                let reason = "the namespace is at its hard quota of memory".to_owned();
                return Step::Ended(Outcome::Failed(code, reason));
            }
        };
        let Some((target, to)) = placed else {
            if is_busy {
                return Step::Busy;
            }
            let needs_none = || self.needs_none(wish, &readable, &holders);
            return self.without_room(task, work, &found, &targets, needs_none);
        };
        if !self.has_versions() {
            segments.release(&[to]);
            return Step::Busy;
        }
        drop(segments);
        let pull = Pull {
            task: Arc::clone(task),
            work: work.clone(),
            block: found.moved,
            source,
            source_node,
            dropped,
            used: found.tick,
            target,
            to,
            grant: GrantId(self.next_version.fetch_add(1, Ordering::Relaxed)),
        };
        self.begin_pull(pull)
    }

    /// The replicas of a block that can be read now, in the order of the attempts. `of_wish` is the
    /// replica that the task moves or drops.
    ///
    /// A node without a session may be dead. Room for a block of it would be made in vain, so the block waits as for
    /// a suspect node.
    fn sources(
        &self,
        work: &Work,
        found: &Found,
        of_wish: Option<&Replica>,
        node_of: impl Fn(&Replica) -> Option<Arc<StoreNode>>,
    ) -> Vec<(Replica, Arc<StoreNode>)> {
        let mut readable: Vec<(Replica, Arc<StoreNode>)> = {
            let hidden = self.hidden.read();
            let readable = found
                .replicas
                .iter()
                .filter(|r| !self.is_hidden(&hidden, r, found.moved.version));
            let readable = readable.filter_map(|r| Some((*r, node_of(r)?)));
            let is_heard = |node: &StoreNode| node.is_readable() && node.is_connected();
            readable.filter(|(_, node)| is_heard(node)).collect()
        };
        // The node of the replica that moves may leave too, so other replicas are read first. After a
        // failure the next replica is read.
        readable.sort_by_key(|(replica, _)| Some(replica) == of_wish);
        let tried = usize::from(work.failures) % readable.len().max(1);
        readable.rotate_left(tried);
        readable
    }

    /// The outcome for a block when no target has room. `needs_none` says whether the block can do
    /// without a further replica.
    fn without_room(
        &self,
        task: &Task,
        work: &Work,
        found: &Found,
        targets: &[Arc<StoreNode>],
        needs_none: impl Fn() -> bool,
    ) -> Step {
        let step = match task.wish.evict && !targets.is_empty() {
            true => self.make_room(task, targets, found),
            false => {
                let why = "no target has free room".to_owned();
                Step::Ended(Outcome::Failed(Code::Full, why))
            }
        };
        let Moved {
            namespace,
            key,
            version,
            ..
        } = &found.moved;
        match step {
            // The block has another replica or copy that stays, so the move is not needed.
            Step::Ended(Outcome::Failed(Code::Full, _))
                if work.to.is_none()
                    && task.wish.change == Change::Move
                    && (needs_none() || self.has_kept_copy(*namespace, key, *version, None)) =>
            {
                Step::Ended(Outcome::Gone)
            }
            step => step,
        }
    }

    /// Whether a block without a target can do without a further replica. For a copy, every node
    /// has one already. For a move, another readable replica stays.
    fn needs_none(
        &self,
        wish: &Wish,
        readable: &[(Replica, Arc<StoreNode>)],
        holders: &[NodeName],
    ) -> bool {
        match (wish.change, &wish.from) {
            (Change::Move, Some(from)) => {
                let stays =
                    |(_, node): &(Replica, Arc<StoreNode>)| node.name != *from && node.stays();
                readable.iter().any(stays)
            }
            (Change::Move, None) => readable.len() > 1,
            (Change::Copy | Change::Drop, _) => {
                let members = self.members.all();
                members.iter().all(|node| holders.contains(&node.name))
            }
        }
    }

    /// The nodes that may take a replica, the emptiest first.
    pub(super) fn targets(
        &self,
        segments: &Segments<'_>,
        to: Option<&NodeName>,
        holders: &[NodeName],
    ) -> Result<Vec<Arc<StoreNode>>, Step> {
        if let Some(name) = to {
            if holders.contains(name) {
                return Err(Step::Ended(Outcome::Gone));
            }
            return match self.members.get(name) {
                Some(node) if node.pulls_now() => Ok(vec![node]),
                Some(node) => {
                    let state = match node.is_connected() {
                        true => node.state().label(),
                        false => "without a session",
                    };
                    let why = format!("node {name} takes no replicas now: it is {state}");
                    Err(Step::Later(Code::Unreachable, why))
                }
                None => {
                    let why = format!("node {name} has left the pool");
                    Err(Step::Ended(Outcome::Failed(Code::Missing, why)))
                }
            };
        }
        let mut found: Vec<(u64, Arc<StoreNode>)> = Vec::new();
        for segment in segments.iter() {
            let node = &segment.node;
            if !node.pulls_now() || holders.contains(&node.name) {
                continue;
            }
            let fill = segment.used_after_quarantine() * 1000 / segment.limit().max(1);
            match found.iter_mut().find(|(_, known)| Arc::ptr_eq(known, node)) {
                Some((least, _)) => *least = fill.min(*least),
                None => found.push((fill, Arc::clone(node))),
            }
        }
        if found.is_empty() {
            let why = "no other node takes replicas now".to_owned();
            return Err(Step::Later(Code::Unreachable, why));
        }
        found.sort_by_key(|(fill, _)| *fill);
        Ok(found.into_iter().map(|(_, node)| node).collect())
    }

    /// Asks the evictor for room on one of the targets. A block that is older than every block that
    /// could leave the targets is not moved, unless it is hard-pinned. While leases keep every block
    /// there, a move waits: which block is the oldest is known only when the leases have ended.
    fn make_room(&self, task: &Task, targets: &[Arc<StoreNode>], found: &Found) -> Step {
        let (now, length) = (self.now(), found.moved.length);
        let first = self.directory.first_tick(now);
        let victim_of = |target: &StoreNode| self.replicas.next_victim(target, now);
        // The pool's next victim may lie on the node that is emptied, or on another target. It makes
        // no room here.
        let is_oldest = |target: &StoreNode| match first {
            Some(first) => found.tick <= victim_of(target).map_or(first, |here| first.max(here)),
            None => task.wish.change != Change::Move,
        };
        // The medium of the target takes the block at once, and the room serves the next one.
        let passes = |target: &Arc<StoreNode>| {
            task.is_of_media() && self.takes_moved(target, &found.moved, found.tick)
        };
        let mut may_give = targets.iter().filter_map(|target| {
            let passes = passes(target);
            let may = found.moved.hard_pin || passes || !is_oldest(target);
            may.then_some((target, passes))
        });
        // A target whose next victim is known to be older gives room for certain.
        let chosen = match may_give.next() {
            Some((target, false)) if !found.moved.hard_pin && victim_of(target).is_none() => {
                let known = may_give.find(|(other, _)| victim_of(other).is_some());
                Some(known.unwrap_or((target, false)))
            }
            chosen => chosen,
        };
        let Some((target, passes)) = chosen else {
            let why = "the targets are full of blocks that were used later".to_owned();
            return Step::Ended(Outcome::Failed(Code::Full, why));
        };
        let Some(key) = target.segments().first().copied() else {
            return Step::Ended(Outcome::Failed(
                Code::Full,
                "the target has no memory".to_owned(),
            ));
        };
        if task.starves(target.incarnation, length, now) >= PATIENCE {
            let why = "leases and pins keep the targets full".to_owned();
            return Step::Ended(Outcome::Failed(Code::Full, why));
        }
        if first.is_some() || found.moved.hard_pin {
            let before = match found.moved.hard_pin || passes {
                true => Tick::MAX,
                false => found.tick,
            };
            let room = WantedRoom::new(target, length);
            self.want_room_on(key, WantedRoom { before, ..room });
            // What is known of a target soon no longer holds. So all targets are asked together.
            for other in targets {
                let is_asked = Arc::ptr_eq(other, target) || victim_of(other).is_some();
                if !is_asked && before < Tick::MAX {
                    self.ask_next_victim(other, length);
                }
            }
            self.evictor_wake.wake();
        }
        // The blocks after this one are less recently used, and must not take its room.
        Step::Busy
    }

    /// Signs the grant of a pull, enters the pull and sends its order.
    fn begin_pull(self: &Arc<Self>, pull: Pull) -> Step {
        let extent = Extent {
            segment: pull.to.segment,
            offset: pull.to.offset,
            length: pull.block.length,
        };
        let target = Arc::clone(&pull.target);
        let signed = target
            .signer
            .sign(target.incarnation, self.epoch, pull.grant, extent);
        let source = &pull.source_node;
        let read = source.read_signer(self.epoch).map(|signer| {
            let from = Extent {
                segment: pull.source.segment,
                offset: pull.source.offset,
                length: pull.block.length,
            };
            signer.sign(from, pull.block.version, self.read_deadline().0)
        });
        let now: BootInstant = self.now();
        let proofs = (signed.mac.as_slice(), read.as_ref());
        let entered = self.replicas.pulls.lock().enter(pull, proofs, now);
        match entered {
            None => Step::Ordered,
            Some(pull) => {
                self.free_target(&pull);
                Step::Later(Code::Unreachable, "the target has no session".to_owned())
            }
        }
    }
}
