//! The task that moves the blocks which only the media of a node hold. The node does not come back.
//!
//! ```text
//!  copies on its media ─► loads into its memory ─► mover: pulls to other nodes ─► stores on their media
//! ```
//!
//! The task works in batches, so its blocks take little memory at a time. The block that was used last goes first. A
//! copy stays recorded until its block has another place, so a task that ends early loses nothing.

use super::super::Pool;
use super::super::tiering::{Moved, OnMedia};
use super::tasks::{Outcome, Task};
use super::{TaskRefused, TaskView, Wish, Work};
use crate::membership::{NodeState, StoreNode};
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::KeyBatch;
use kvpool_types::{Code, KeyRef, SegmentId};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::yield_now;
use tokio::time::sleep;

/// The most bytes of a batch. A longer block is a batch of its own.
const BATCH: u64 = 16 << 20;
/// The most blocks of a batch.
const BLOCKS: usize = 256;
/// How long the loads of a batch are waited for.
const LOADED: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(5);

impl Pool {
    /// Begins the task for a node that an operator drains.
    pub(super) async fn move_off_media(
        self: &Arc<Self>,
        wish: &Wish,
    ) -> Result<TaskView, TaskRefused> {
        let refuse = |code, message| TaskRefused { code, message };
        let Some(node) = wish.from.as_ref().and_then(|name| self.members.get(name)) else {
            let why = "blocks on media move off a node that the pool has";
            return Err(refuse(Code::Missing, why.to_owned()));
        };
        let drain = node.current_drain().filter(|_| node.leaves());
        let Some(drain) = drain else {
            let why = "is not drained by an operator, so its media stay: drain it first";
            return Err(refuse(
                Code::NotDraining,
                format!("node {} {why}", node.name),
            ));
        };
        // The drain's own order may have been lost with the leader that gave it.
        if node.media_leave_too(drain) {
            self.replace_copies_that_leave();
        }
        self.doubt_drained();
        let own = self.media_held_by(&node);
        let found = self.only_on_media(&own).await;
        let task = Task::of_media(Self::off(&node), found.len() as u64, self.now());
        let Some(task) = self.replicas.tasks.add(task) else {
            let why = "too many tasks run: wait for one, or cancel one";
            return Err(refuse(Code::TooManyHeld, why.to_owned()));
        };
        self.enter_task_off(task.id, &node);
        // A cancellation ends the tasks that it finds there.
        if node.current_drain() != Some(drain) {
            self.end_tasks_of_drain(&[task.id]);
            return Err(Self::not_draining(&node));
        }
        self.doubt_drained();
        // A caller would take an earlier count for the count after the task.
        node.note_count(None);
        let view = task.view(self.now());
        let pool = Arc::clone(self);
        tokio::spawn(async move { pool.empty_media(&node, drain, &task, &own, &found).await });
        Ok(view)
    }

    async fn empty_media(
        self: &Arc<Self>,
        node: &StoreNode,
        drain: u64,
        task: &Arc<Task>,
        own: &HashSet<SegmentId>,
        found: &[OnMedia],
    ) {
        let is_over = || {
            let is_gone = node.state() == NodeState::Gone || node.current_drain() != Some(drain);
            // A later drain may say that the media come back after all.
            let stays = is_gone || !node.media_leave();
            stays || task.is_cancelled() || !self.leads() || self.is_stopping()
        };
        let mut rest = found;
        while !rest.is_empty() && !is_over() {
            // Nothing that is loaded could be recorded.
            if !self.takes_records() {
                sleep(POLL).await;
                continue;
            }
            let (batch, further) = rest.split_at(first_batch(rest).min(rest.len()));
            rest = further;
            self.move_batch(own, task, batch, &is_over).await;
            // A batch that no node takes waits for nothing.
            yield_now().await;
        }
        let why = "the node has left, or its media come back";
        task.give_up_unfed(Code::Unreachable, why, self.now());
        self.doubt_drained();
    }

    async fn move_batch(
        self: &Arc<Self>,
        own: &HashSet<SegmentId>,
        task: &Arc<Task>,
        batch: &[OnMedia],
        is_over: &(impl Fn() -> bool + Sync),
    ) {
        let mut blocks: BTreeMap<NamespaceId, Vec<(Moved, bool)>> = BTreeMap::new();
        for one in batch {
            let Some(block) = self.still_only_on_media(own, one) else {
                task.end_unfed(Outcome::Gone, self.now());
                continue;
            };
            match self.place_of(&block, one) {
                Ok(in_memory) => {
                    let of_namespace = blocks.entry(block.namespace).or_default();
                    of_namespace.push((block, in_memory));
                }
                Err((code, why)) => {
                    let failed = Outcome::Failed(code, why.to_owned());
                    task.end_unfed(failed, self.now());
                }
            }
        }
        let mut restored = Vec::with_capacity(blocks.len());
        for (namespace, blocks) in &blocks {
            let keys = keys_of(blocks);
            let keys = KeyBatch::from(&keys);
            restored.push(self.restore_unused(*namespace, keys, LOADED).await);
        }
        let mut moved = Vec::with_capacity(batch.len());
        for ((namespace, blocks), restored) in blocks.into_iter().zip(restored) {
            let works = self.works_on(namespace, &blocks);
            // The lease would keep the extent shut that the mover gives up.
            self.end_restored(namespace, &restored);
            for (index, ((block, in_memory), work)) in blocks.into_iter().zip(works).enumerate() {
                let failed = |code, why: &str| Outcome::Failed(code, why.to_owned());
                let outcome = match work {
                    Some(work) if work.version == block.version => {
                        task.feed(work);
                        moved.push((block, in_memory));
                        continue;
                    }
                    None if restored.unreadable.contains(&index) => failed(
                        Code::Unreachable,
                        "the copy on the medium cannot be read now, or is longer than the memory of its node",
                    ),
                    None if restored.left.contains(&index) => failed(
                        Code::Full,
                        "the block did not come from the medium to the memory of its node in time",
                    ),
                    Some(_) | None => Outcome::Gone,
                };
                task.end_unfed(outcome, self.now());
            }
        }
        self.replicas.wake();
        while task.is_moving() && !is_over() {
            sleep(POLL).await;
        }
        let fed = moved.len() as u64;
        self.settle_moved(own, moved, is_over).await;
        task.settled(fed);
    }

    /// For each block, the mover's work on the one in memory.
    fn works_on(&self, namespace: NamespaceId, blocks: &[(Moved, bool)]) -> Vec<Option<Work>> {
        let keys = keys_of(blocks);
        let mut works = vec![None; keys.len()];
        self.directory.visit(namespace, &keys[..], |index, block| {
            if let (Some(block), Some(work)) = (block, works.get_mut(index)) {
                *work = Some(Work {
                    block: block.view().id(),
                    version: block.version(),
                    to: None,
                    failures: 0,
                    waits: 0,
                    brought: None,
                });
            }
        });
        works
    }

    /// Whether the memory of other nodes takes a block: there is free room, or an older block. Otherwise it only passes
    /// through, to a medium. The error is the reason why no other node takes it. It would be loaded in vain then.
    fn place_of(&self, block: &Moved, one: &OnMedia) -> Result<bool, (Code, &'static str)> {
        let mut others = self.members.all();
        others.retain(|node| node.pulls_now());
        if others.is_empty() {
            return Err((Code::Unreachable, "no other node takes replicas now"));
        }
        let first = self.directory.first_tick(self.now());
        if block.hard_pin || first.is_some_and(|first| one.used > first) {
            return Ok(true);
        }
        let has_room = {
            let segments = self.placement.segments();
            segments
                .iter()
                .any(|segment| segment.node.pulls_now() && segment.shortfall(block.length) == 0)
        };
        let takes = |node: &Arc<StoreNode>| self.takes_moved(node, block, one.used);
        if !has_room && !others.iter().any(takes) {
            let why = "the other nodes are full of blocks that were used later, or that leases and pins keep";
            return Err((Code::Full, why));
        }
        Ok(has_room)
    }
}

fn keys_of(blocks: &[(Moved, bool)]) -> Vec<KeyRef<'_>> {
    blocks.iter().map(|(block, _)| block.key.as_ref()).collect()
}

/// The number of blocks in the first batch, at least one.
fn first_batch(blocks: &[OnMedia]) -> usize {
    let mut bytes = 0;
    let fits = |block: &&OnMedia| {
        bytes += block.length.0;
        bytes <= BATCH
    };
    let fitting = blocks.iter().take(BLOCKS).take_while(fits).count();
    fitting.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::BootClock;
    use crate::config::Config;
    use crate::metrics::Metrics;
    use crate::store::{EmbeddedOptions, EmbeddedStore};
    use kvpool_types::{GrantKey, Incarnation, NodeName};

    /// Loads for readers go on to take the room of blocks with copies. A stop of the node does not wait for the task.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_task_of_media_counts_as_no_move_of_blocks_in_memory() {
        let directory = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let clock = Arc::new(BootClock);
        let pool = Pool::start(Config::default(), Arc::new(store), clock, metrics);
        let pool = pool.await.unwrap();
        let (name, key) = (NodeName("n".into()), GrantKey([1; 32]));
        let node = Arc::new(StoreNode::new(name, Incarnation(1), key, pool.now()));
        node.drain();
        let task = Task::of_media(Pool::off(&node), 1, pool.now());
        let task = pool.replicas.tasks.add(task).unwrap();
        pool.enter_task_off(task.id, &node);
        assert!(pool.is_moved_off(&node), "it is not drained");
        assert!(!pool.is_memory_moved_off(&node));
        assert!(!pool.save_after_task_off(&node));
        pool.retire().await;
    }
}
