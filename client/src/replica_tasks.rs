//! Tasks of the leader that copy, move and drop replicas, node to node.

use crate::client::Client;
use crate::control::Call;
use crate::errors::ControlError;
use crate::locate::malformed;
use kvpool_proto::change_replicas_request::Blocks as Named;
use kvpool_proto::{
    self as proto, ChangeReplicasRequest, DrainNodeRequest, ReplicaTasksRequest, UndrainNodeRequest,
};
use kvpool_types::wire::keys::pack;
use kvpool_types::{Code, Key, Length};
use std::time::Duration;

/// How often [`Client::wait_replica_task`] asks.
const POLL: Duration = Duration::from_millis(20);

/// What happens to the replicas of a task's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaChange {
    /// Each block gets one more replica.
    Copy,
    /// A replica of each block goes to another node.
    Move,
    /// A replica of each block leaves its node. The last readable replica stays.
    Drop,
}

/// The blocks of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicaBlocks {
    /// These keys of the client's namespace, at most as many as one request may carry.
    Keys(Vec<Key>),
    /// The keys of the client's namespace in which this regular expression matches anywhere.
    Pattern(String),
    /// Every block of every namespace with a replica on [`ReplicaWish::from`].
    OnNode,
}

/// What a task is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaWish {
    /// Copy, move or drop.
    pub change: ReplicaChange,
    /// The blocks.
    pub blocks: ReplicaBlocks,
    /// The name of the node whose replica moves or is dropped; `None` for any. A drop needs it.
    pub from: Option<String>,
    /// The names of the nodes that get a replica each. Empty: the node with the most free room.
    pub to: Vec<String>,
    /// Whether blocks that were used earlier are evicted for the new replicas. Otherwise a target needs
    /// free room.
    pub evict: bool,
}

/// How a task stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaTaskState {
    /// Blocks are left.
    Running,
    /// Every block was changed, or had left meanwhile.
    Done,
    /// At least one block was not changed.
    Failed,
    /// A caller ended it.
    Cancelled,
}

/// A task, as the leader sees it. Its leader keeps it in memory: the next leader does not know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaTask {
    /// Its id.
    pub id: u64,
    /// What it does.
    pub change: ReplicaChange,
    /// How it stands.
    pub state: ReplicaTaskState,
    /// Its blocks, each counted once for each target.
    pub blocks: u64,
    /// The blocks that were changed.
    pub changed: u64,
    /// The blocks that had left, or needed no change.
    pub gone: u64,
    /// The blocks that could not be changed.
    pub failed: u64,
    /// The bytes that arrived at their targets.
    pub bytes: Length,
    /// The last failure: its code, and a message for people.
    pub failure: Option<(Code, String)>,
    /// The time since it began.
    pub age: Duration,
    /// The time since its last change.
    pub idle: Duration,
    /// The node whose replicas move or are dropped; empty for any.
    pub from: String,
    /// The nodes that get replicas; empty for the nodes with the most room.
    pub to: Vec<String>,
}

impl Client {
    /// Begins a task that copies, moves or drops replicas. Bytes go from node to node. Returns before the
    /// task has ended.
    ///
    /// # Errors
    ///
    /// [`ControlError`]: [`Code::Missing`] for an unknown node, [`Code::InvalidArgument`] for a wish that
    /// contradicts itself, [`Code::TooManyHeld`] while too many tasks run. After another error the task may
    /// have begun: ask [`Client::replica_tasks`].
    pub async fn change_replicas(&self, wish: &ReplicaWish) -> Result<ReplicaTask, ControlError> {
        let request = ChangeReplicasRequest {
            caller: None,
            change: match wish.change {
                ReplicaChange::Copy => proto::ReplicaChange::ReplicaCopy,
                ReplicaChange::Move => proto::ReplicaChange::ReplicaMove,
                ReplicaChange::Drop => proto::ReplicaChange::ReplicaDrop,
            }
            .into(),
            from: wish.from.clone().unwrap_or_default(),
            to: wish.to.clone(),
            evict: wish.evict,
            blocks: Some(match &wish.blocks {
                ReplicaBlocks::Keys(keys) => Named::Keys(pack(keys).into()),
                ReplicaBlocks::Pattern(pattern) => Named::Pattern(pattern.clone()),
                ReplicaBlocks::OnNode => Named::EveryBlock(true),
            }),
        };
        // Repeated, it would add a second replica.
        let call = Call::by(self.control_deadline()).unless_done();
        let reply = self.inner.control.call(request, call).await?;
        read_task(reply)
    }

    /// Takes a node out of service: it gets no new blocks, and a task moves its blocks to other nodes, the
    /// block that was used last first. Blocks that were used earlier are evicted for them.
    ///
    /// The node may stop once its state in [`Client::stats`] is `drained`.
    ///
    /// # Errors
    ///
    /// [`ControlError`]: [`Code::Missing`] for an unknown node. [`Code::LastNode`] without `force`, when no other
    /// node takes the blocks that would leave with it. A repeated call begins another task, which moves what is left.
    /// It also begins the drain anew if somebody has cancelled it: see [`Client::go_on_draining`].
    pub async fn drain_node(&self, name: &str, force: bool) -> Result<ReplicaTask, ControlError> {
        self.drain(name, force, false).await
    }

    /// Begins another task that moves what is left on a node that drains.
    ///
    /// # Errors
    ///
    /// As [`Client::drain_node`]; [`Code::NotDraining`] when the node does not drain, for example because its drain
    /// was cancelled. [`Code::NodeUnheard`] for a node that a new leader has not heard. An older master takes the call
    /// for [`Client::drain_node`].
    pub async fn go_on_draining(&self, name: &str) -> Result<ReplicaTask, ControlError> {
        self.drain(name, false, true).await
    }

    async fn drain(
        &self,
        name: &str,
        force: bool,
        goes_on: bool,
    ) -> Result<ReplicaTask, ControlError> {
        let request = DrainNodeRequest {
            caller: None,
            name: name.to_owned(),
            force,
            goes_on,
        };
        // The master first waits for the puts on the node.
        let call = Call::by(self.control_deadline()).waiting();
        read_task(self.inner.control.call(request, call).await?)
    }

    /// Takes a node back into service whose drain [`Client::drain_node`] began. Blocks that have moved stay where
    /// they are. Returns whether the node drained until now.
    ///
    /// # Errors
    ///
    /// [`ControlError`], and nothing was changed: [`Code::Missing`] for an unknown node, [`Code::NodeStops`] for a node
    /// that stops, [`Code::Unimplemented`] for a node of an earlier version. [`Code::VersionMismatch`] from a master of
    /// an earlier version. [`Code::NodeUnheard`] for a node without a session, or that a new leader has not heard.
    /// [`Code::NodeUnheard`] also when the node did not confirm in time: the message says so, and a repeated call
    /// waits again.
    pub async fn undrain_node(&self, name: &str) -> Result<bool, ControlError> {
        let request = UndrainNodeRequest {
            caller: None,
            name: name.to_owned(),
        };
        // The master waits for the node.
        let call = Call::by(self.control_deadline()).waiting();
        let reply = self.inner.control.call(request, call).await?;
        Ok(reply.drained)
    }

    /// The tasks with these ids that the leader knows; every task for no id.
    ///
    /// # Errors
    ///
    /// As [`Client::describe`]; so is cancellation.
    pub async fn replica_tasks(&self, ids: &[u64]) -> Result<Vec<ReplicaTask>, ControlError> {
        self.tasks(ids, false).await
    }

    /// Ends tasks, and returns those that the leader knows. Pulls in progress still end on their own.
    ///
    /// # Errors
    ///
    /// As [`Client::describe`]; [`Code::InvalidArgument`] for no id.
    pub async fn cancel_replica_tasks(
        &self,
        ids: &[u64],
    ) -> Result<Vec<ReplicaTask>, ControlError> {
        self.tasks(ids, true).await
    }

    async fn tasks(&self, ids: &[u64], cancel: bool) -> Result<Vec<ReplicaTask>, ControlError> {
        let request = ReplicaTasksRequest {
            caller: None,
            ids: ids.to_vec(),
            cancel,
        };
        let call = Call::by(self.control_deadline());
        let reply = self.inner.control.call(request, call).await?;
        reply.tasks.into_iter().map(read_task).collect()
    }

    /// Waits until a task has ended, at most `limit`, and returns how it stands then. `None` when the
    /// leader does not know the task: there is another leader, and the task has ended with its leader.
    ///
    /// # Errors
    ///
    /// As [`Client::describe`].
    pub async fn wait_replica_task(
        &self,
        id: u64,
        limit: Duration,
    ) -> Result<Option<ReplicaTask>, ControlError> {
        let until = tokio::time::Instant::now() + limit;
        loop {
            let task = self.replica_tasks(&[id]).await?.into_iter().next();
            let is_running = task
                .as_ref()
                .is_some_and(|task| task.state == ReplicaTaskState::Running);
            if !is_running || tokio::time::Instant::now() >= until {
                return Ok(task);
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

fn read_task(task: proto::ReplicaTask) -> Result<ReplicaTask, ControlError> {
    let unknown = |what: &str, raw: i32| malformed(format!("unknown {what} {raw} of a task"));
    let change = match proto::ReplicaChange::try_from(task.change) {
        Ok(proto::ReplicaChange::ReplicaCopy) => ReplicaChange::Copy,
        Ok(proto::ReplicaChange::ReplicaMove) => ReplicaChange::Move,
        Ok(proto::ReplicaChange::ReplicaDrop) => ReplicaChange::Drop,
        Err(_) => return Err(unknown("change", task.change)),
    };
    let state = match proto::ReplicaTaskState::try_from(task.state) {
        Ok(proto::ReplicaTaskState::TaskRunning) => ReplicaTaskState::Running,
        Ok(proto::ReplicaTaskState::TaskDone) => ReplicaTaskState::Done,
        Ok(proto::ReplicaTaskState::TaskFailed) => ReplicaTaskState::Failed,
        Ok(proto::ReplicaTaskState::TaskCancelled) => ReplicaTaskState::Cancelled,
        Err(_) => return Err(unknown("state", task.state)),
    };
    let failure = (task.failed > 0).then(|| (Code::from_peer(task.code), task.message));
    Ok(ReplicaTask {
        id: task.id,
        change,
        state,
        blocks: task.blocks,
        changed: task.changed,
        gone: task.gone,
        failed: task.failed,
        bytes: Length(task.bytes),
        failure,
        age: Duration::from_millis(task.age_ms),
        idle: Duration::from_millis(task.idle_ms),
        from: task.from,
        to: task.to,
    })
}
