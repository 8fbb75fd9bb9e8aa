//! Management of replicas: tasks that copy, move and drop them, from node to node.
//!
//! ```text
//!  task ─► mover: block, source, target ─► room and grant on the target ─► Pull ─► target reads source
//!                                                                              │
//!  task ◄─ counted ◄─ directory: replica added, the moved one dropped ◄─ durable ◄─ Pulled
//! ```
//!
//! The leader keeps tasks in memory. A task ends with its term; its changes are in the log.
//!
//! **Architecture Invariant:** a replica is visible after its record is durable, and its record
//! names the version whose bytes the target verified. A block that was removed or replaced
//! meanwhile gets no replica. A move drops the old replica in a later group of the log, once the
//! new one is in the directory.

mod drained;
mod heat;
mod media;
mod mover;
mod pulls;
mod tasks;
mod undrain;

pub(super) use mover::start;
use tasks::Task;
pub use tasks::{Change, TaskId, TaskState, TaskView};

use super::remove::STEP;
use super::tiering::{Moved, Restored};
use super::{FreedReplicas, Pool};
use crate::clock::BootInstant;
use crate::directory::{Spared, Tick};
use crate::membership::{Question, StoreNode};
use crate::replica::{BlockId, Replica};
use crate::store::record::{self, Record};
use crate::workers::{Wake, Workers};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Code, Incarnation, Key, KeyRef, Length, NodeName, SegmentId, Version};
use parking_lot::Mutex;
use regex::Regex;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::runtime::Handle;

/// How long the next victim of a node counts as known. Meanwhile a lease may end on an older block.
const VICTIM_KNOWN: Duration = Duration::from_millis(100);

/// The blocks of a task.
#[derive(Clone, Debug)]
pub enum Blocks<'k> {
    /// Blocks of one namespace, by key.
    Keys(NamespaceId, &'k [KeyRef<'k>]),
    /// The keys of a namespace that match a pattern.
    Pattern(NamespaceId, Regex),
    /// Every block that has a replica on the task's node.
    OnNode,
    /// Every block that only media of the task's node hold, while an operator drains it. From then on the media count
    /// as media that do not come back.
    OnlyOnMedia,
}

/// What a task does to each of its blocks.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Copy, move or drop.
    pub change: Change,
    /// The node whose replica moves or is dropped; `None` for any.
    pub from: Option<NodeName>,
    /// The nodes that get a replica; empty for the node with the most room.
    pub to: Vec<NodeName>,
    /// Whether older blocks are evicted for the new replicas.
    pub evict: bool,
}

/// The refusal of a task.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TaskRefused {
    /// The stable code.
    pub code: Code,
    /// The reason, for people.
    pub message: String,
}

/// One block of a task, and one target.
#[derive(Clone, Debug)]
struct Work {
    block: BlockId,
    version: Version,
    /// The node that gets the replica; `None` for the node with the most room.
    to: Option<NodeName>,
    /// The number of failed pulls for this work.
    failures: u8,
    /// How often the work waited for a node or for room.
    waits: u8,
    /// The new replica of a move, if a pull brought it while its node might still leave.
    brought: Option<Brought>,
}

/// A new replica, and the old one that the move drops once the new replica's node is sure to stay.
#[derive(Clone, Copy, Debug)]
struct Brought {
    replica: Replica,
    given_up: Replica,
}

/// The blocks of a task that are not in memory when the task begins, by reason.
#[derive(Debug, Default)]
struct Left {
    /// Blocks on media. Memory had no room for them, or their loads were too slow.
    late: u64,
    /// Blocks on media that cannot be read.
    unreadable: u64,
    /// Blocks whose puts are being appended to the log.
    open: u64,
}

impl Left {
    fn of(restored: &Restored, in_memory: &HashSet<usize>) -> Self {
        let count = |indices: &[usize]| {
            let missing = indices.iter().filter(|index| !in_memory.contains(*index));
            missing.count() as u64
        };
        Self {
            late: count(&restored.left),
            unreadable: count(&restored.unreadable),
            open: 0,
        }
    }

    /// The number of failures that these blocks cause with so many targets, and the last failure.
    fn failed(&self, targets: u64) -> (u64, Option<(Code, String)>) {
        let all = [
            (
                self.open,
                Code::InProgress,
                "puts on the node wait for the log",
            ),
            (
                self.unreadable,
                Code::Unreachable,
                "blocks are on media alone, where they cannot be read now",
            ),
            (
                self.late,
                Code::Full,
                "blocks did not come from media to memory in time: name fewer keys",
            ),
        ];
        let last = all.into_iter().rfind(|(blocks, ..)| *blocks > 0);
        let failure = last.map(|(_, code, why)| (code, why.to_owned()));
        let blocks = self.open + self.unreadable + self.late;
        (blocks * targets, failure)
    }
}

/// A node that waits for the end of a task.
#[derive(Debug)]
struct Waits {
    task: TaskId,
    node: Arc<StoreNode>,
    /// Whether the task began because the node waits for moves. Otherwise an operator's call began it.
    is_own: bool,
}

/// The state of all tasks.
#[derive(Debug, Default)]
pub(super) struct Replicas {
    tasks: tasks::Tasks,
    pulls: Mutex<pulls::Open>,
    pub(super) heat: heat::Heat,
    /// Held from the check of an operator's drain until the drain has begun on its node.
    drains: tokio::sync::Mutex<()>,
    /// The tasks of drains, each with the node that it moves blocks off. Ended tasks may remain in
    /// the list.
    off: Mutex<Vec<(TaskId, Arc<StoreNode>)>>,
    /// Nodes that wait for a task before they leave.
    waiting: Mutex<Vec<Waits>>,
    /// By node: the last use of its next victim, as the evictor found it.
    next_victims: Mutex<HashMap<Incarnation, (BootInstant, Tick)>>,
    /// A counter. It rises when a task off a node begins, a node begins to leave or is suspect, or
    /// a medium is lost. A look at a draining node is void once the counter has risen.
    doubts: AtomicU64,
    wake: Wake,
}

impl Replicas {
    /// No tasks; `bandwidth` is the bytes a second that one node may send, 0 without a limit.
    pub(super) fn new(bandwidth: u64, workers: Workers) -> Self {
        Self {
            wake: Wake::new(workers),
            pulls: Mutex::new(pulls::Open::new(bandwidth)),
            ..Self::default()
        }
    }

    pub(super) fn wake(&self) {
        self.wake.wake();
    }

    /// The earliest last use of the blocks that move off nodes which take no blocks. Eviction sees a block on its
    /// target only when it has arrived.
    pub(super) fn oldest_unseen(&self) -> Option<Tick> {
        self.pulls.lock().oldest_unseen()
    }

    /// Records the last use of the block that eviction takes next on a node; `None` while it takes none.
    pub(super) fn note_next_victim(&self, node: &StoreNode, used: Option<Tick>, now: BootInstant) {
        let mut victims = self.next_victims.lock();
        victims.retain(|of, (at, _)| *of != node.incarnation && now.since(*at) < VICTIM_KNOWN);
        if let Some(used) = used {
            victims.insert(node.incarnation, (now, used));
        }
    }

    /// The last use of a node's next victim, if the evictor has just found it.
    fn next_victim(&self, node: &StoreNode, now: BootInstant) -> Option<Tick> {
        let victims = self.next_victims.lock();
        let (at, used) = victims.get(&node.incarnation)?;
        (now.since(*at) < VICTIM_KNOWN).then_some(*used)
    }

    /// Whether a pull is copying a replica to this node.
    pub(super) fn has_target(&self, node: &StoreNode) -> bool {
        self.pulls.lock().has_target(node)
    }

    /// Calls `note` with the extent of each replica that a pull is copying, and with its block's
    /// length and version.
    pub(super) fn each_target(&self, note: impl FnMut(&Replica, Length, Version)) {
        self.pulls.lock().each_target(note);
    }
}

impl Pool {
    /// Drops a replica of a block that has others. A lease on the replica keeps its extent in
    /// quarantine, and renew no longer extends the lease for that location.
    fn drop_spare(
        &self,
        namespace: NamespaceId,
        key: KeyRef<'_>,
        version: Version,
        gone: &Replica,
    ) -> Spared {
        let moved = &self.quarantine.moved;
        let leaving = moved.leaves(version, self.latest_token());
        let spared = self
            .directory
            .drop_spare_replica(namespace, key, version, gone.segment);
        match &spared {
            Spared::Dropped(dropped) => moved.left(leaving, dropped.lease_until),
            Spared::Missing | Spared::Last => moved.stays(leaving),
        }
        spared
    }

    /// [`Self::drop_spare`], and logs the drop. The directory changes first, so the record
    /// describes a change that has happened here. The node may be dropped at any time.
    fn drop_spare_logged(self: &Arc<Self>, block: &Moved, gone: &Replica) -> Spared {
        let Moved {
            namespace,
            ref key,
            version,
            length,
            ..
        } = *block;
        let spared = self.drop_spare(namespace, key.as_ref(), version, gone);
        if let Spared::Dropped(dropped) = &spared {
            let freed = self.freed(std::iter::once(FreedReplicas {
                replicas: &[dropped.replica],
                version,
                length,
                not_before: dropped.lease_until.max(self.lease_floor_of(version)),
            }));
            let record = Record::ReplicaGone(record::ReplicaGone {
                namespace,
                key: key.clone(),
                version,
                segment: gone.segment,
                offset: Some(dropped.replica.offset),
            });
            self.free_once_logged(vec![record], freed);
        }
        spared
    }

    /// The latest token of any lease that was granted until now.
    pub(super) fn latest_token(&self) -> BootInstant {
        self.now().after(self.config.lease_ttl)
    }

    /// Begins a task and returns its first state.
    ///
    /// # Errors
    ///
    /// [`Code::Missing`] for a node that the pool does not know. [`Code::InvalidArgument`] for a
    /// wish that contradicts itself. [`Code::TooManyHeld`] while too many tasks run.
    pub async fn change_replicas(
        self: &Arc<Self>,
        wish: Wish,
        blocks: Blocks<'_>,
    ) -> Result<TaskView, TaskRefused> {
        self.check_wish(&wish, &blocks)?;
        let mut left = Left::default();
        let found = match blocks {
            Blocks::Keys(namespace, keys) if wish.change != Change::Drop && self.has_media() => {
                let restored = self.restore(namespace, keys, Duration::MAX).await;
                let (blocks, in_memory) = self.blocks_of(namespace, keys);
                left = Left::of(&restored, &in_memory);
                self.end_restored(namespace, &restored);
                blocks
            }
            Blocks::Keys(namespace, keys) => self.blocks_of(namespace, keys).0,
            Blocks::Pattern(namespace, pattern) => {
                self.scan_blocks(|block| {
                    block.namespace() == namespace && pattern.is_match(&block.key().to_string())
                })
                .await
            }
            Blocks::OnNode => {
                let node = wish.from.as_ref().and_then(|name| self.members.get(name));
                let own = node.as_ref().map_or_else(Vec::new, |node| node.segments());
                if node.is_some_and(|node| node.drains() && Self::is_off(&wish, &node)) {
                    left.open = self.open_puts_on(&own);
                }
                self.scan_blocks(|block| block.replicas().iter().any(|r| own.contains(&r.segment)))
                    .await
            }
            Blocks::OnlyOnMedia => return self.move_off_media(&wish).await,
        };
        self.begin_task(wish, found, &left)
    }

    fn check_wish(&self, wish: &Wish, blocks: &Blocks<'_>) -> Result<(), TaskRefused> {
        let invalid = |message: &str| {
            Err(TaskRefused {
                code: Code::InvalidArgument,
                message: message.to_owned(),
            })
        };
        let names = wish.from.iter().chain(&wish.to);
        for name in names {
            self.node_named(name)?;
        }
        let is_off = wish.change == Change::Move && wish.to.is_empty() && wish.evict;
        match wish.change {
            _ if matches!(blocks, Blocks::OnlyOnMedia) && !is_off => {
                invalid("blocks on media move to any node, and evict older blocks")
            }
            Change::Copy if wish.from.is_some() && !matches!(blocks, Blocks::OnNode) => {
                invalid("a copy reads from any node: leave out the node to copy from")
            }
            Change::Move if wish.to.len() > 1 => invalid("a replica moves to one node"),
            Change::Drop if wish.from.is_none() => invalid("a drop needs the node of the replica"),
            Change::Drop if !wish.to.is_empty() => invalid("a drop has no target"),
            _ if matches!(blocks, Blocks::OnNode | Blocks::OnlyOnMedia) && wish.from.is_none() => {
                invalid("every block of a node needs the node")
            }
            _ if wish.from.iter().any(|from| wish.to.contains(from)) => {
                invalid("source and target are the same node")
            }
            _ => Ok(()),
        }
    }

    fn begin_task(
        &self,
        wish: Wish,
        mut found: Vec<(Tick, BlockId, Version)>,
        left: &Left,
    ) -> Result<TaskView, TaskRefused> {
        // The most recently used block goes first. So a task that ends early has moved the most
        // useful blocks.
        found.sort_unstable_by_key(|(tick, ..)| std::cmp::Reverse(*tick));
        let targets: Vec<Option<NodeName>> = match wish.to.is_empty() {
            true => vec![None],
            false => wish.to.iter().cloned().map(Some).collect(),
        };
        let work = found.iter().flat_map(|(_, block, version)| {
            targets.iter().map(|to| Work {
                block: *block,
                version: *version,
                to: to.clone(),
                failures: 0,
                waits: 0,
                brought: None,
            })
        });
        let failed = left.failed(targets.len() as u64);
        let task = Task::new(wish, work.collect(), failed, self.now());
        let task = self.replicas.tasks.add(task);
        let task = task.ok_or_else(|| TaskRefused {
            code: Code::TooManyHeld,
            message: "too many tasks run: wait for one, or cancel one".to_owned(),
        })?;
        self.replicas.wake();
        Ok(task.view(self.now()))
    }

    /// The blocks of these keys that are in memory, and the indexes of their keys.
    fn blocks_of(
        &self,
        namespace: NamespaceId,
        keys: &[KeyRef<'_>],
    ) -> (Vec<(Tick, BlockId, Version)>, HashSet<usize>) {
        let (mut found, mut indices) = (Vec::with_capacity(keys.len()), HashSet::new());
        self.directory.visit(namespace, keys, |index, block| {
            if let Some(block) = block {
                let block = block.view();
                found.push((block.tick(), block.id(), block.version()));
                indices.insert(index);
            }
        });
        (found, indices)
    }

    /// The blocks that `is_wanted` accepts. The scan yields to other tasks between two steps.
    async fn scan_blocks(
        &self,
        is_wanted: impl Fn(&crate::directory::BlockRef<'_>) -> bool,
    ) -> Vec<(Tick, BlockId, Version)> {
        let (mut found, mut page) = (Vec::new(), Vec::new());
        loop {
            let next = self.directory.scan(&page, STEP, |block| {
                if is_wanted(&block) {
                    found.push((block.tick(), block.id(), block.version()));
                }
            });
            match next {
                Ok(Some(further)) => page = further,
                _ => return found,
            }
            tokio::task::yield_now().await;
        }
    }

    /// Takes a node out of service. The node gets no new blocks, and a task moves its blocks to
    /// other nodes, most recently used first. Less recently used blocks are evicted for them.
    ///
    /// # Errors
    ///
    /// [`Code::Missing`] for a node that the pool does not know. [`Code::TooManyHeld`] while too
    /// many tasks run. [`Code::LastNode`] without `force`, if blocks would leave with the node
    /// because no other node takes blocks. [`Code::NotDraining`] if the drain is cancelled
    /// meanwhile.
    pub async fn drain_node(
        self: &Arc<Self>,
        name: &NodeName,
        force: bool,
    ) -> Result<TaskView, TaskRefused> {
        self.begin_drain(name, force, false).await
    }

    /// As [`Pool::drain_node`], for a node whose media do not come back. It is not drained while blocks are left on
    /// these media alone. A task of [`Blocks::OnlyOnMedia`] moves them.
    ///
    /// # Errors
    ///
    /// Those of [`Pool::drain_node`].
    pub async fn drain_node_and_media(
        self: &Arc<Self>,
        name: &NodeName,
        force: bool,
    ) -> Result<TaskView, TaskRefused> {
        self.begin_drain(name, force, true).await
    }

    async fn begin_drain(
        self: &Arc<Self>,
        name: &NodeName,
        force: bool,
        media: bool,
    ) -> Result<TaskView, TaskRefused> {
        let node = self.node_named(name)?;
        self.session_settles(&node).await;
        // The node may have begun another incarnation meanwhile.
        let node = self.node_named(name)?;
        // Of two drains at once, the later one must find that the earlier drain's node takes no
        // blocks.
        let one_at_a_time = self.replicas.drains.lock().await;
        self.check_drain(&node, force, media).await?;
        self.leave_service(node, Some(media), one_at_a_time).await
    }

    /// [`Pool::drain_node`] for a node that drains already: moves the blocks that are left there.
    ///
    /// # Errors
    ///
    /// The errors of [`Pool::drain_node`]. [`Code::NotDraining`] for a node that does not drain.
    /// [`Code::NodeUnheard`] for a node that this leader has not heard.
    pub async fn go_on_draining(
        self: &Arc<Self>,
        name: &NodeName,
    ) -> Result<TaskView, TaskRefused> {
        let node = self.node_named(name)?;
        let one_at_a_time = self.replicas.drains.lock().await;
        if !node.drains() {
            Self::check_heard(&node)?;
        }
        if !node.drains() {
            return Err(Self::not_draining(&node));
        }
        self.leave_service(node, None, one_at_a_time).await
    }

    fn node_named(&self, name: &NodeName) -> Result<Arc<StoreNode>, TaskRefused> {
        self.members.get(name).ok_or_else(|| TaskRefused {
            code: Code::Missing,
            message: format!("the pool has no node {:?}", name.0),
        })
    }

    async fn leave_service(
        self: &Arc<Self>,
        node: Arc<StoreNode>,
        media: Option<bool>,
        one_at_a_time: tokio::sync::MutexGuard<'_, ()>,
    ) -> Result<TaskView, TaskRefused> {
        if !node.leaves() {
            tracing::info!(node = %node.name, "operator takes the node out of service");
        }
        // A client begins one task after another. Each of these would scan all blocks.
        let is_known = node.leaves() && node.media_leave();
        let drain = node.leave(media);
        drop(one_at_a_time);
        self.doubt_drained();
        if node.media_leave() && !is_known {
            self.replace_copies_that_leave();
        }
        // Runs as a task: a caller that leaves early must not leave the node half drained. Such a
        // node would take no blocks, and no task would move its blocks.
        let pool = Arc::clone(self);
        let begun = tokio::spawn(async move {
            pool.puts_end_on(&node).await;
            let task = pool.move_off(&node, drain).await;
            pool.doubt_drained();
            // A later leader learns of the drain from the node. The node's answer to this order
            // says that it drains, so the task must have begun before the order.
            node.tell_to_leave(drain);
            task
        });
        begun.await.unwrap_or_else(|_| {
            Err(TaskRefused {
                code: Code::Internal,
                message: "the drain could not be begun".to_owned(),
            })
        })
    }

    /// Whether a task of a drain moves blocks off the node. When the task ends, the remaining blocks get
    /// copies on the node's media, and the node is told. A user's task may move blocks off the node too. It
    /// may be slow, and leaves other blocks in place, so nothing waits for it.
    pub(super) fn save_after_task_off(&self, node: &Arc<StoreNode>) -> bool {
        let of_drains = self.tasks_off(node);
        let running = self.replicas.tasks.running();
        // A cancelled task only finishes its last pulls. It leaves the other blocks in place. Blocks on media do not
        // leave with the memory of a node that stops.
        let moves = |task: &&Arc<Task>| {
            of_drains.contains(&task.id) && !task.is_cancelled() && !task.is_of_media()
        };
        let Some(task) = running.iter().find(moves) else {
            return false;
        };
        self.wait_for_task(task.id, node, false);
        true
    }

    /// Whether blocks of a node that is taken out of service still move to other nodes.
    pub(super) fn is_moved_off(&self, node: &StoreNode) -> bool {
        // When the node is told, the operator's task has already begun.
        let begins = node.leaves() && !node.is_told_to_leave();
        let running = self.replicas.tasks.running();
        begins || running.iter().any(|task| Self::is_off(&task.wish, node))
    }

    /// As [`Pool::is_moved_off`], but without the tasks that move blocks off the node's media.
    pub(super) fn is_memory_moved_off(&self, node: &StoreNode) -> bool {
        let begins = node.leaves() && !node.is_told_to_leave();
        let running = self.replicas.tasks.running();
        let moves = |task: &Arc<Task>| Self::is_off(&task.wish, node) && !task.is_of_media();
        begins || running.iter().any(moves)
    }

    /// Moves the blocks of a node that stops, and tells the node when no further block moves.
    pub(super) async fn move_all_of(self: &Arc<Self>, node: &Arc<StoreNode>) {
        // The drain may have been cancelled meanwhile.
        let Some(asked) = node.question() else {
            return;
        };
        match self.move_off(node, asked.drain).await {
            Ok(task) => {
                self.doubt_drained();
                self.wait_for_task(task.id, node, true);
            }
            Err(error) if matches!(error.code, Code::NotDraining | Code::Missing) => {}
            Err(error) => {
                tracing::warn!(node = %node.name, %error, "blocks of a draining node are not moved");
                self.tell_saved(node, asked);
            }
        }
    }

    fn wait_for_task(&self, task: TaskId, node: &Arc<StoreNode>, is_own: bool) {
        let waits = Waits {
            task,
            node: Arc::clone(node),
            is_own,
        };
        self.replicas.waiting.lock().push(waits);
        self.replicas.wake();
    }

    fn off(node: &StoreNode) -> Wish {
        Wish {
            change: Change::Move,
            from: Some(node.name.clone()),
            to: Vec::new(),
            evict: true,
        }
    }

    fn is_off(wish: &Wish, node: &StoreNode) -> bool {
        let Wish {
            change,
            from,
            to,
            evict,
        } = wish;
        *change == Change::Move && from.as_ref() == Some(&node.name) && to.is_empty() && *evict
    }

    /// Tells nodes whose task has ended. If a node has media, its remaining blocks in memory are
    /// copied there first. Blocks that the task did not see move first too: the records of their
    /// puts were not durable when it began.
    fn tell_waiting(self: &Arc<Self>, runtime: &Handle) {
        let ended: Vec<_> = {
            let mut waiting = self.replicas.waiting.lock();
            let is_over = |waits: &mut Waits| !self.replicas.tasks.is_running(waits.task);
            waiting.extract_if(.., is_over).collect()
        };
        for waits in ended {
            let node = &waits.node;
            // Read before the node's blocks are counted.
            let Some(asked) = node.question() else {
                continue;
            };
            if self.may_store_on_media_of(node) {
                self.demote_all_of(node);
            } else if let Some(left) = self.left_after(&waits) {
                node.tell_left(asked, left);
            } else {
                let (pool, node) = (Arc::clone(self), Arc::clone(node));
                runtime.spawn(async move {
                    pool.puts_end_on(&node).await;
                    pool.move_all_of(&node).await;
                });
            }
        }
    }

    /// The number of blocks that leave with a node after its task. `None` while the node waits for
    /// its blocks and may have blocks that the task did not try to move. Open puts may add such
    /// blocks, and a cancelled drain leaves such blocks.
    fn left_after(&self, ended: &Waits) -> Option<u64> {
        let (task, node) = (ended.task, &*ended.node);
        // A stop moves what an operator's task leaves when its caller's time is over.
        let is_of_caller = node.stops() && !ended.is_own;
        let waits = node.waits_for_moves() && node.is_connected();
        if waits && is_of_caller && self.replicas.tasks.is_cancelled(task) {
            return None;
        }
        // An operator may cancel a drain at the moment in which its node stops and finds the task still running. The
        // task then leaves blocks that the stop must move.
        if waits && self.replicas.tasks.is_of_cancelled_drain(task) {
            return None;
        }
        let in_vain = self.replicas.tasks.tried_in_vain(task);
        let Some(in_vain) = in_vain.filter(|_| waits) else {
            return Some(self.look_at_left(node, u64::MAX));
        };
        if self.unfinished_on(node, &node.segments()) > 0 {
            return None;
        }
        let left = self.look_at_left(node, u64::MAX);
        // The task does not try blocks that only media hold.
        let in_memory = match node.media_leave() {
            true => self.only_in_memory_of(node, u64::MAX),
            false => left,
        };
        (in_memory <= in_vain).then_some(left)
    }

    /// Tells a draining node that it need not wait for any of its blocks, and how many blocks have
    /// no other replica.
    pub(super) fn tell_saved(&self, node: &StoreNode, asked: Question) {
        node.tell_left(asked, self.look_at_left(node, u64::MAX));
    }

    /// The number of a node's blocks that leave with it, because no node that stays has a replica.
    /// The count stops at `most`.
    fn only_in_memory_of(&self, node: &StoreNode, most: u64) -> u64 {
        let own = node.segments();
        let staying: BTreeSet<SegmentId> = {
            let segments = self.placement.segments();
            let staying = segments.iter().map(|segment| (segment.id, &segment.node));
            let staying = staying.filter(|(_, node)| node.stays());
            // The node itself may not have begun to leave, so its own segments are excluded.
            let others = staying.filter(|(id, _)| !own.contains(id));
            others.map(|(id, _)| id).collect()
        };
        let (mut left, mut page) = (self.unfinished_on(node, &own), Vec::new());
        loop {
            let mut found = Vec::new();
            let hidden = self.hidden.read();
            let stays = |r: &Replica, version| {
                staying.contains(&r.segment) && !self.is_hidden(&hidden, r, version)
            };
            let next = self.directory.scan(&page, STEP, |block| {
                let replicas = block.replicas();
                let is_here = replicas.iter().any(|r| own.contains(&r.segment));
                if is_here && !replicas.iter().any(|r| stays(r, block.version())) {
                    found.push((block.namespace(), block.key(), block.version()));
                }
            });
            drop(hidden);
            let is_left = |(namespace, key, version): &(_, Key, _)| {
                !self.has_kept_copy(*namespace, key, *version, Some(node))
            };
            left += found.iter().filter(|one| is_left(one)).count() as u64;
            match next {
                Ok(Some(further)) if left < most => page = further,
                _ => return left,
            }
        }
    }

    /// The number of open puts and pulls that write to a node. No drain has waited for their end.
    fn unfinished_on(&self, node: &StoreNode, segments: &[SegmentId]) -> u64 {
        u64::from(self.replicas.has_target(node)) + self.open_puts_on(segments)
    }

    fn open_puts_on(&self, segments: &[SegmentId]) -> u64 {
        let mut puts = 0;
        self.reservations.lock().each(|_, pending| {
            let mut replicas = pending.replicas.iter();
            puts += u64::from(replicas.any(|replica| segments.contains(&replica.segment)));
        });
        puts
    }

    /// The known tasks with these ids. Without ids, all known tasks.
    pub fn replica_tasks(&self, ids: &[TaskId]) -> Vec<TaskView> {
        self.replicas.tasks.views(ids, self.now())
    }

    /// Ends tasks. Pulls in progress end on their own and still count.
    pub fn cancel_replica_tasks(&self, ids: &[TaskId]) {
        self.replicas.tasks.cancel(ids, self.now());
        self.replicas.wake();
    }
}
