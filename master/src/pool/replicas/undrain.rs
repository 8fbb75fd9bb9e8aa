//! The cancellation of a drain that an operator began.
//!
//! The leader and the node both remember the drain. The leader forgets it at once, and the node
//! when it confirms. The caller hears of success only after that. So no later leader learns of a
//! cancelled drain.
//!
//! The work that the drain began ends by itself: each of its steps first checks that the drain is
//! still the same.

use super::{Blocks, Pool, TaskId, TaskRefused, TaskView};
use crate::membership::{NodeState, StoreNode, UndrainOutcome};
use kvpool_types::{Code, NodeName, Version};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long a node may take to confirm. Its answer takes one round trip.
const CONFIRMS: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(5);

impl Pool {
    /// Ends the drain that an operator began, and takes the node back into service. Blocks that
    /// have moved stay where they are. Returns whether the node drained until now, according to its
    /// last confirmation.
    ///
    /// # Errors
    ///
    /// [`Code::Missing`] for a node that the pool does not know. [`Code::NodeStops`] for a node
    /// that stops. [`Code::Unimplemented`] for a node of an earlier version. [`Code::NodeUnheard`]
    /// for a node without a session, or that this leader has not heard. In these cases nothing was
    /// changed.
    ///
    /// [`Code::NodeUnheard`] also means that the node did not confirm in time. It is then in
    /// service, and a repeated call waits again.
    pub async fn undrain_node(self: &Arc<Self>, name: &NodeName) -> Result<bool, TaskRefused> {
        let node = self.node_named(name)?;
        // A drain that begins looks for other nodes that take blocks, so the two must not overlap.
        let one_at_a_time = self.replicas.drains.lock().await;
        Self::check_heard(&node)?;
        if node.drains() {
            Self::check_undrain(&node)?;
        }
        let (outcome, tasks) = self.cancel_drain_of(&node);
        match outcome {
            UndrainOutcome::Stops => {
                let why = "stops on its own account, or was stopped. Nothing was changed";
                return Err(Self::stops(&node, why));
            }
            UndrainOutcome::Before | UndrainOutcome::Unconfirmed => {}
            UndrainOutcome::Now => {
                tracing::info!(node = %node.name, "operator takes the node back into service");
                self.end_drain_of(&node, &tasks);
            }
        }
        drop(one_at_a_time);
        self.hear_of_undrain(&node).await?;
        Ok(outcome != UndrainOutcome::Before)
    }

    /// Refuses a node that this leader has not heard: its first message says whether it drains.
    pub(super) fn check_heard(node: &StoreNode) -> Result<(), TaskRefused> {
        if node.state() != NodeState::Unreported {
            return Ok(());
        }
        let why = "has not reported to this leader, which does not know whether it drains";
        Err(TaskRefused {
            code: Code::NodeUnheard,
            message: format!(
                "node {} {why}. Nothing was changed: try again when it is connected",
                node.name
            ),
        })
    }

    fn check_undrain(node: &StoreNode) -> Result<(), TaskRefused> {
        let refuse = |code, message| Err(TaskRefused { code, message });
        let name = &node.name;
        // This check is first: a node of an earlier version does not report whether it stops.
        if !node.can_undrain() {
            let why = "is of an earlier version, which ends no drain. Nothing was changed";
            let message = format!("node {name} {why}: restart the node");
            return refuse(Code::Unimplemented, message);
        }
        if !node.stops() && !node.is_connected() {
            let why = "has no session, and would drain again in its next one. Nothing was changed";
            let message = format!("node {name} {why}: try again when it is connected");
            return refuse(Code::NodeUnheard, message);
        }
        Ok(())
    }

    fn stops(node: &StoreNode, why: &str) -> TaskRefused {
        TaskRefused {
            code: Code::NodeStops,
            message: format!(
                "node {} {why}: start it again for it to take blocks",
                node.name
            ),
        }
    }

    pub(super) fn not_draining(node: &StoreNode) -> TaskRefused {
        TaskRefused {
            code: Code::NotDraining,
            message: format!("node {} does not drain: its drain was cancelled", node.name),
        }
    }

    fn has_left(node: &StoreNode) -> TaskRefused {
        TaskRefused {
            code: Code::Missing,
            message: format!("node {} has left the pool", node.name),
        }
    }

    /// Processes a node's answer to the order to end its drain.
    pub fn undrained(&self, node: &StoreNode, number: u64) {
        node.confirm_undrain(number);
    }

    /// Cancels the drain, and removes and returns its tasks. The node may stop at any moment; the
    /// tasks of its stop are not among them.
    fn cancel_drain_of(&self, node: &Arc<StoreNode>) -> (UndrainOutcome, Vec<TaskId>) {
        let is_of = |of: &Arc<StoreNode>| Arc::ptr_eq(of, node);
        let mut waiting = self.replicas.waiting.lock();
        let mut off = self.replicas.off.lock();
        let outcome = node.undrain();
        if outcome != UndrainOutcome::Now {
            return (outcome, Vec::new());
        }
        waiting.retain(|waits| !is_of(&waits.node));
        let tasks = off.extract_if(.., |(_, of)| is_of(of));
        (outcome, tasks.map(|(id, _)| id).collect())
    }

    /// Ends the work that a drain has begun. Work that begins later finds the drain cancelled.
    fn end_drain_of(self: &Arc<Self>, node: &Arc<StoreNode>, tasks: &[TaskId]) {
        self.end_tasks_of_drain(tasks);
        self.end_line_of_drain(node);
        self.doubt_drained();
        self.changed.notify_waiters();
        self.wake_waiting_puts();
    }

    /// Ends the tasks of a cancelled drain. Pulls in progress end on their own.
    pub(super) fn end_tasks_of_drain(&self, tasks: &[TaskId]) {
        self.replicas.tasks.end_with_drain(tasks, self.now());
        self.replicas.wake();
    }

    /// Waits until the node has confirmed every cancellation.
    async fn hear_of_undrain(&self, node: &StoreNode) -> Result<(), TaskRefused> {
        let until = Instant::now() + CONFIRMS;
        while !node.knows_cancellations() {
            if node.stops() {
                let why = "has begun to stop since its drain was cancelled";
                return Err(Self::stops(node, why));
            }
            let is_gone = node.state() == NodeState::Gone;
            if is_gone || Instant::now() >= until {
                // The process may have begun another incarnation, and drain in it.
                let why = match is_gone {
                    true => "has left the pool before it confirmed that it drains no more",
                    false => {
                        "is in service, but has not confirmed it, and another leader could drain it again"
                    }
                };
                return Err(TaskRefused {
                    code: Code::NodeUnheard,
                    message: format!("node {} {why}: repeat the call", node.name),
                });
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    /// Notes a task that the cancellation of the node's drain ends.
    pub(super) fn enter_task_off(&self, id: TaskId, node: &Arc<StoreNode>) {
        let mut off = self.replicas.off.lock();
        off.retain(|(id, _)| self.replicas.tasks.is_running(*id));
        off.push((id, Arc::clone(node)));
    }

    /// The tasks of drains that move blocks off the node. Ended tasks may be among them.
    pub(super) fn tasks_off(&self, node: &Arc<StoreNode>) -> Vec<TaskId> {
        let off = self.replicas.off.lock();
        let of_node = off.iter().filter(|(_, of)| Arc::ptr_eq(of, node));
        of_node.map(|(id, _)| *id).collect()
    }

    /// The node leaves the pool. The blocks that leave with it before the tasks of its drain have moved them count as
    /// failed: they may be lost.
    pub(in crate::pool) fn end_moves_off(&self, node: &Arc<StoreNode>) {
        let off = self.replicas.off.lock();
        let of_node = off.iter().filter(|(_, of)| Arc::ptr_eq(of, node));
        let tasks: Vec<TaskId> = of_node.map(|(id, _)| *id).collect();
        self.replicas.tasks.lose_node(&tasks);
    }

    /// A block leaves the pool together with its last node.
    pub(in crate::pool) fn note_swept(&self, version: Version) {
        self.replicas.tasks.swept(version);
    }

    /// Begins the task of a drain, unless the drain was cancelled or the node has left.
    pub(super) async fn move_off(
        self: &Arc<Self>,
        node: &Arc<StoreNode>,
        drain: u64,
    ) -> Result<TaskView, TaskRefused> {
        let is_over = || node.current_drain() != Some(drain);
        if is_over() {
            return Err(Self::not_draining(node));
        }
        // A task finds its node by name, and the next incarnation has the same one.
        let is_gone = || node.state() == NodeState::Gone;
        if is_gone() {
            return Err(Self::has_left(node));
        }
        let task = self
            .change_replicas(Self::off(node), Blocks::OnNode)
            .await?;
        self.enter_task_off(task.id, node);
        node.note_count(None);
        // A cancellation ends the tasks in this list, so it may have missed this one.
        if is_over() {
            self.end_tasks_of_drain(&[task.id]);
            return Err(Self::not_draining(node));
        }
        // The scan for the task misses the blocks that leave with the node meanwhile.
        if is_gone() {
            self.end_tasks_of_drain(&[task.id]);
            return Err(Self::has_left(node));
        }
        Ok(task)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tasks::{Outcome, Task};
    use super::super::{STEP, Waits, Work};
    use super::*;
    use crate::clock::BootClock;
    use crate::config::Config;
    use crate::directory::{NewBlock, Tick};
    use crate::membership::{Address, DrainReport};
    use crate::metrics::Metrics;
    use crate::replica::{BlockId, Copies, ExtentIndex, Replica};
    use crate::store::{EmbeddedOptions, EmbeddedStore};
    use kvpool_types::ids::NamespaceId;
    use kvpool_types::{Checksum, GrantKey, Incarnation, Key, Length, Offset, SegmentId};
    use std::collections::VecDeque;
    use std::path::Path;

    async fn pool_in(directory: &Path) -> Arc<Pool> {
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let clock = Arc::new(BootClock);
        let pool = Pool::start(Config::default(), Arc::new(store), clock, metrics);
        pool.await.unwrap()
    }

    /// A block in memory.
    fn block(number: usize) -> NewBlock {
        NewBlock {
            namespace: NamespaceId(1),
            key: Key::parse(&format!("block-{number}")).unwrap(),
            version: Version(number.try_into().unwrap()),
            length: Length(100),
            checksum: Checksum(1),
            replicas: Copies::from_slice(&[Replica {
                segment: SegmentId(1),
                extent: ExtentIndex(0),
                offset: Offset(0),
            }]),
            parent: None,
            soft_pin_until: None,
            hard_pin: false,
            tick: Tick::default(),
            leased_until: None,
        }
    }

    /// The task lacks the blocks that have left by then. Its end would say that all blocks have moved.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_drain_fails_if_its_node_leaves_while_its_blocks_are_listed() {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool_in(directory.path()).await;
        let (name, key) = (NodeName("n".into()), GrantKey([1; 32]));
        let node = Arc::new(StoreNode::new(name, Incarnation(1), key, pool.now()));
        node.drain();
        pool.members.insert(Arc::clone(&node));
        // The scan takes two steps.
        for number in 1..=2 * STEP {
            let published = pool.directory.publish(&[block(number)]).remove(0);
            assert!(published.id.is_some());
        }
        let leaves = async {
            pool.drop_node(&node);
        };
        let (begun, ()) = tokio::join!(pool.move_off(&node, 0), leaves);
        assert_eq!(begun.unwrap_err().code, Code::Missing);
        pool.retire().await;
    }

    /// A task off the node that runs until the pull of its block ends.
    fn moving(pool: &Pool, node: &StoreNode) -> Arc<Task> {
        let work = Work {
            block: BlockId(0),
            version: Version(1),
            to: None,
            failures: 0,
            waits: 0,
            brought: None,
        };
        let works = VecDeque::from([work]);
        let task = Task::new(Pool::off(node), works, (0, None), pool.now());
        assert!(task.next(pool.now()).is_some());
        pool.replicas.tasks.add(task).unwrap()
    }

    /// The block came to another node, which had left before its replica was published there.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_block_that_leaves_with_a_late_replica_fails_the_drain_of_its_node() {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool_in(directory.path()).await;
        let (name, key) = (NodeName("n".into()), GrantKey([1; 32]));
        let node = Arc::new(StoreNode::new(name, Incarnation(1), key, pool.now()));
        let task = moving(&pool, &node);
        pool.replicas.tasks.lose_node(&[task.id]);
        let late = block(1);
        let published = pool.directory.publish(std::slice::from_ref(&late));
        assert!(published[0].id.is_some());
        assert_eq!(task.missing(late.version), Outcome::Gone);
        pool.sweep_late(late.namespace, &late.key, late.version, SegmentId(1));
        let outcome = task.missing(late.version);
        assert!(matches!(outcome, Outcome::Failed(..)), "{outcome:?}");
        task.end(outcome, pool.now());
        pool.retire().await;
    }

    /// A user's move off the node has the same wish as the task of a drain. Its blocks may wait for long.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_node_that_stops_waits_for_no_move_of_a_user() {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool_in(directory.path()).await;
        let (name, key) = (NodeName("n".into()), GrantKey([1; 32]));
        let node = Arc::new(StoreNode::new(name, Incarnation(1), key, pool.now()));
        node.drain();
        let task = moving(&pool, &node);
        assert!(!pool.save_after_task_off(&node));
        pool.enter_task_off(task.id, &node);
        assert!(pool.save_after_task_off(&node), "the task of a drain");
        task.end(Outcome::Gone, pool.now());
        pool.retire().await;
    }

    /// The node stops just after the cancellation, before the task of the cancelled drain is ended.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_stop_moves_the_blocks_that_the_task_of_a_cancelled_drain_left() {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool_in(directory.path()).await;
        let (name, key) = (NodeName("n".into()), GrantKey([1; 32]));
        let node = Arc::new(StoreNode::new(name, Incarnation(1), key, pool.now()));
        let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
        node.attach(Address::default(), outbox, pool.now());
        node.drain();
        let task = moving(&pool, &node);
        assert_eq!(node.undrain(), UndrainOutcome::Now);
        // The task may have begun meanwhile.
        pool.enter_task_off(task.id, &node);
        assert!(node.says_it_drains(DrainReport {
            session: None,
            moves: true,
            number: 0,
        }));
        assert!(pool.save_after_task_off(&node));
        pool.end_tasks_of_drain(&[task.id]);
        task.end(Outcome::Gone, pool.now());
        let waits = Waits {
            task: task.id,
            node: Arc::clone(&node),
            is_own: true,
        };
        assert_eq!(pool.left_after(&waits), None);
        pool.retire().await;
    }
}
