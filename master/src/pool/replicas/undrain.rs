//! The cancellation of a drain that an operator began.
//!
//! The leader and the node both remember the drain. The leader forgets it at once. The node has forgotten it when it
//! confirms, and the caller hears of success only then. So no later leader learns of a drain that was cancelled.
//!
//! What the drain began ends by itself: each of its steps asks first whether the drain is still the same.

use super::{Blocks, Pool, TaskId, TaskRefused, TaskView};
use crate::membership::{StoreNode, UndrainOutcome};
use kvpool_types::{Code, NodeName};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long a node has to confirm. Its answer takes one round trip.
const CONFIRMS: Duration = Duration::from_secs(3);
const POLL: Duration = Duration::from_millis(5);

impl Pool {
    /// Takes a node back into service whose drain an operator began. Blocks that have moved stay where they are.
    /// Returns whether the node drained until now.
    ///
    /// # Errors
    ///
    /// [`Code::Missing`] for a node that the pool does not know. [`Code::NodeStops`] for one that stops,
    /// [`Code::Unimplemented`] for one of an earlier version, and [`Code::NodeUnheard`] for one without a session:
    /// nothing was changed. [`Code::NodeUnheard`] also for one that did not confirm in time: it is in service, and a
    /// repeated call waits again.
    pub async fn undrain_node(self: &Arc<Self>, name: &NodeName) -> Result<bool, TaskRefused> {
        let node = self.node_named(name)?;
        // A drain that begins looks for other nodes that take blocks.
        let one_at_a_time = self.replicas.drains.lock().await;
        if node.drains() {
            Self::check_undrain(&node)?;
        }
        let outcome = node.undrain();
        match outcome {
            UndrainOutcome::Stops => return Err(Self::stops(&node)),
            UndrainOutcome::Before => {}
            UndrainOutcome::Now => {
                tracing::info!(node = %node.name, "operator takes the node back into service");
                self.end_drain_of(&node);
            }
        }
        drop(one_at_a_time);
        self.hear_of_undrain(&node).await?;
        Ok(outcome == UndrainOutcome::Now)
    }

    fn check_undrain(node: &StoreNode) -> Result<(), TaskRefused> {
        let refuse = |code, message| Err(TaskRefused { code, message });
        let name = &node.name;
        // First: a node of an earlier version does not say whether it stops.
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

    fn stops(node: &StoreNode) -> TaskRefused {
        TaskRefused {
            code: Code::NodeStops,
            message: format!(
                "node {} stops on its own account, or was stopped. Nothing was changed: start it again for it to \
                 take blocks",
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

    /// Processes a node's answer to the order to end its drain.
    pub fn undrained(&self, node: &StoreNode, number: u64) {
        node.confirm_undrain(number);
    }

    /// Ends what a drain has begun. What begins later finds that the drain is over.
    fn end_drain_of(self: &Arc<Self>, node: &Arc<StoreNode>) {
        let is_of = |of: &Arc<StoreNode>| Arc::ptr_eq(of, node);
        self.replicas.waiting.lock().retain(|(_, of)| !is_of(of));
        let tasks: Vec<TaskId> = {
            let mut off = self.replicas.off.lock();
            off.extract_if(.., |(_, of)| is_of(of))
                .map(|(id, _)| id)
                .collect()
        };
        self.cancel_replica_tasks(&tasks);
        self.end_line_of_drain(node);
        self.doubt_drained();
        self.changed.notify_waiters();
        self.wake_waiting_puts();
    }

    /// Waits until the node has confirmed every cancellation.
    async fn hear_of_undrain(&self, node: &StoreNode) -> Result<(), TaskRefused> {
        let until = Instant::now() + CONFIRMS;
        while !node.knows_cancellations() {
            if node.stops() {
                return Err(Self::stops(node));
            }
            if Instant::now() >= until {
                let why = "is in service, but has not confirmed it, and another leader could drain it again";
                return Err(TaskRefused {
                    code: Code::NodeUnheard,
                    message: format!("node {} {why}: repeat the call", node.name),
                });
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    /// Begins the task of a drain, unless the drain was cancelled.
    pub(super) async fn move_off(
        self: &Arc<Self>,
        node: &Arc<StoreNode>,
        drain: u64,
    ) -> Result<TaskView, TaskRefused> {
        let is_over = || node.current_drain() != Some(drain);
        if is_over() {
            return Err(Self::not_draining(node));
        }
        let task = self
            .change_replicas(Self::off(node), Blocks::OnNode)
            .await?;
        {
            let mut off = self.replicas.off.lock();
            off.retain(|(id, _)| self.replicas.tasks.is_running(*id));
            off.push((task.id, Arc::clone(node)));
        }
        node.note_count(None);
        // A cancellation ends the tasks that it finds there.
        if is_over() {
            self.cancel_replica_tasks(&[task.id]);
            return Err(Self::not_draining(node));
        }
        Ok(task)
    }
}
