//! Tasks of the leader that copy, move or drop replicas. The bytes go directly from node to node.

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

/// The interval at which [`Client::wait_replica_task`] asks the leader.
const POLL: Duration = Duration::from_millis(20);

/// The change that a task makes to the replicas of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaChange {
    /// Each block gets one more replica.
    Copy,
    /// A replica of each block goes to another node.
    Move,
    /// A replica of each block is removed from its node. The last readable replica stays.
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
    /// Every block of every namespace that only the media of [`ReplicaWish::from`] hold. An operator must drain that
    /// node. The change must be a move with [`ReplicaWish::evict`] and without targets. An older master refuses this
    /// with [`Code::InvalidArgument`].
    OnlyOnMedia,
}

/// The description of a new task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaWish {
    /// Copy, move or drop.
    pub change: ReplicaChange,
    /// The blocks.
    pub blocks: ReplicaBlocks,
    /// The name of the node whose replicas are moved or dropped; `None` for any node. A drop needs a name.
    pub from: Option<String>,
    /// The names of the target nodes, each of which gets a replica of every block. Empty: each block goes to
    /// the node with the most free room.
    pub to: Vec<String>,
    /// Whether the target evicts blocks that were used earlier to make room for the replicas. If not, the
    /// target needs free room.
    pub evict: bool,
}

/// The state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaTaskState {
    /// Some blocks are not done yet.
    Running,
    /// Every block was changed, or had left before its turn.
    Done,
    /// At least one block was not changed.
    Failed,
    /// A caller cancelled the task. Its copies in progress still end, and count.
    Cancelled,
}

/// A task, as the leader reports it. Only this leader knows the task, since it keeps tasks in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaTask {
    /// The task's id.
    pub id: u64,
    /// The change that the task makes.
    pub change: ReplicaChange,
    /// The task's state.
    pub state: ReplicaTaskState,
    /// The number of its blocks, each counted once for each target.
    pub blocks: u64,
    /// The number of blocks that were changed.
    pub changed: u64,
    /// The number of blocks that had left, or needed no change.
    pub gone: u64,
    /// The number of blocks that could not be changed.
    pub failed: u64,
    /// The bytes that were copied to the targets.
    pub bytes: Length,
    /// The last failure: its code, and a message for people. For a cancelled task, the reason for which its blocks
    /// waited last, if the master gave one.
    pub failure: Option<(Code, String)>,
    /// The time since the task began.
    pub age: Duration,
    /// The time since the task's counts last changed.
    pub idle: Duration,
    /// The node whose replicas are moved or dropped; empty for any node.
    pub from: String,
    /// The nodes that get replicas; empty for the nodes with the most free room.
    pub to: Vec<String>,
}

impl Client {
    /// Begins a task that copies, moves or drops replicas. The call returns before the task has ended. The
    /// bytes go from node to node.
    ///
    /// # Errors
    ///
    /// [`ControlError`]: [`Code::Missing`] for an unknown node, [`Code::InvalidArgument`] for a wish that
    /// contradicts itself, [`Code::TooManyHeld`] while too many tasks run. [`Code::NotDraining`] for
    /// [`ReplicaBlocks::OnlyOnMedia`] of a node that no operator drains. After another error the task may have
    /// begun: ask [`Client::replica_tasks`].
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
                ReplicaBlocks::OnlyOnMedia => Named::OnlyOnMedia(true),
            }),
        };
        let call = Call::by(self.control_deadline());
        let call = match wish.blocks {
            // Both tasks move the same blocks. The leader looks at every copy first.
            ReplicaBlocks::OnlyOnMedia => call.waiting(),
            // A repeated call would add a second replica.
            _ => call.unless_done(),
        };
        let reply = self.inner.control.call(request, call).await?;
        read_task(reply)
    }

    /// Takes a node out of service. The node gets no new blocks, and a task moves its blocks to other nodes,
    /// the most recently used first. The other nodes evict blocks that were used earlier to make room.
    ///
    /// The node may stop once its state in [`Client::stats`] is `drained`.
    ///
    /// # Errors
    ///
    /// [`ControlError`]: [`Code::Missing`] for an unknown node. [`Code::LastNode`] when no other node can
    /// take the blocks that would be lost, unless `force` is set.
    ///
    /// A repeated call begins another task for the remaining blocks. The call also begins a cancelled drain
    /// again. [`Client::go_on_draining`] does not.
    pub async fn drain_node(&self, name: &str, force: bool) -> Result<ReplicaTask, ControlError> {
        self.drain(name, (force, false), false).await
    }

    /// As [`Client::drain_node`], for a node whose media do not come back. The node is `drained` only once no block is
    /// left on its media alone. This call moves the blocks in memory. Begin a task of [`ReplicaBlocks::OnlyOnMedia`]
    /// when its task has ended, and repeat it until one changes nothing more.
    ///
    /// A later [`Client::drain_node`] says that the media come back. An older master drains the node as
    /// [`Client::drain_node`] does, and refuses the task of the media. A node of an older version does not tell the
    /// next leader that its media leave. The node may then be shown as `drained` too early. So count the blocks of a
    /// new task before you stop the node.
    ///
    /// # Errors
    ///
    /// As [`Client::drain_node`].
    pub async fn drain_node_and_media(
        &self,
        name: &str,
        force: bool,
    ) -> Result<ReplicaTask, ControlError> {
        self.drain(name, (force, true), false).await
    }

    /// Begins another task that moves the remaining blocks of a draining node.
    ///
    /// # Errors
    ///
    /// Those of [`Client::drain_node`], and [`Code::NotDraining`] when the node does not drain, for example because
    /// its drain was cancelled. [`Code::NodeUnheard`] means that a new leader has not heard the node yet. An older
    /// master treats the call as [`Client::drain_node`].
    pub async fn go_on_draining(&self, name: &str) -> Result<ReplicaTask, ControlError> {
        self.drain(name, (false, false), true).await
    }

    async fn drain(
        &self,
        name: &str,
        (force, media_leave): (bool, bool),
        goes_on: bool,
    ) -> Result<ReplicaTask, ControlError> {
        let request = DrainNodeRequest {
            caller: None,
            name: name.to_owned(),
            force,
            goes_on,
            media_leave,
        };
        // The master first waits for the puts on the node.
        let call = Call::by(self.control_deadline()).waiting();
        read_task(self.inner.control.call(request, call).await?)
    }

    /// Cancels a drain that [`Client::drain_node`] began. Blocks that have moved stay on their new nodes. Returns
    /// false if the node was not draining. Returns true after an attempt without an answer, which may have cancelled
    /// the drain.
    ///
    /// # Errors
    ///
    /// [`ControlError`]. After one of these codes nothing was changed:
    ///
    /// - [`Code::Missing`]: the node is unknown.
    /// - [`Code::NodeStops`]: the node stops.
    /// - [`Code::NodeUnheard`]: the node has no session, or a new leader has not heard it yet.
    /// - [`Code::Unimplemented`]: the node is older.
    /// - [`Code::VersionMismatch`]: the master is older.
    ///
    /// [`Code::NodeUnheard`] also means that the node did not confirm in time. The message then says so, and a
    /// repeated call waits again.
    pub async fn undrain_node(&self, name: &str) -> Result<bool, ControlError> {
        let request = UndrainNodeRequest {
            caller: None,
            name: name.to_owned(),
        };
        // The master answers when the node has confirmed.
        let call = Call::by(self.control_deadline()).waiting();
        let mut is_repeated = false;
        let control = &self.inner.control;
        let reply = control.call_noting(request, call, &mut is_repeated).await?;
        Ok(reply.drained || is_repeated)
    }

    /// The tasks with these ids that the leader knows. For an empty list, every task.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`], which also describes cancellation.
    pub async fn replica_tasks(&self, ids: &[u64]) -> Result<Vec<ReplicaTask>, ControlError> {
        self.tasks(ids, false).await
    }

    /// Cancels tasks, and returns those that the leader knows. Pulls in progress are not interrupted.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`]; [`Code::InvalidArgument`] for an empty list.
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

    /// Waits until a task has ended, for at most `limit`, and returns the task's state then. `None` when the
    /// leader does not know the task. The leader has then changed, and the task ended with its leader.
    ///
    /// # Errors
    ///
    /// Those of [`Client::describe`].
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
    let code = Code::from_peer(task.code);
    let failure = (code != Code::Ok).then_some((code, task.message));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A caller whose time is over asks why the blocks that are left did not move.
    #[test]
    fn a_cancelled_task_tells_why_its_blocks_waited() {
        let task = proto::ReplicaTask {
            state: proto::ReplicaTaskState::TaskCancelled.into(),
            code: Code::Unreachable.to_wire().into(),
            message: "no other node".into(),
            ..Default::default()
        };
        let failure = read_task(task).unwrap().failure;
        assert_eq!(failure, Some((Code::Unreachable, "no other node".into())));
        let task = read_task(proto::ReplicaTask::default()).unwrap();
        assert_eq!(task.failure, None);
    }
}
