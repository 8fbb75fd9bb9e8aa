//! Tasks of the leader that copy, move and drop replicas: Python programs begin and watch them.

use super::Pool;
use super::answers::shown;
use super::options::seconds;
use crate::errors::Fault;
use crate::keys::read_keys;
use kvpool_client::{
    ReplicaBlocks, ReplicaChange, ReplicaTask as Task, ReplicaTaskState, ReplicaWish,
};
use pyo3::prelude::*;

/// A task that copies, moves or drops replicas. The leader keeps the task in memory, so the next leader does
/// not know it.
///
/// `id`: int. `change`: copy, move or drop. `state`: running, done, failed or cancelled.
/// `blocks`: the blocks of the task, each counted once for each target. `changed`: blocks with the requested
/// change. `gone`: blocks that left meanwhile, or needed no change. `failed`: blocks without the change.
/// `bytes`: bytes that arrived at their targets. `failure`: the last Error of a block, or None; for a
/// cancelled task the reason for which its blocks last waited.
/// `age`, `idle`: seconds since the task began, and since its last change.
/// `source`: the node whose replicas move or are dropped, empty for any. `to`: the target nodes, empty for
/// the nodes with the most free room.
#[pyclass(frozen, get_all, module = "kvpool")]
#[derive(Debug)]
pub(crate) struct ReplicaTask {
    id: u64,
    change: &'static str,
    state: &'static str,
    blocks: u64,
    changed: u64,
    gone: u64,
    failed: u64,
    bytes: u64,
    failure: Option<Py<PyAny>>,
    age: f64,
    idle: f64,
    source: String,
    to: Vec<String>,
}

shown! {
    ReplicaTask: id, change, state, blocks, changed, gone, failed;
}

/// The name of a change.
pub(crate) const fn change_name(change: ReplicaChange) -> &'static str {
    match change {
        ReplicaChange::Copy => "copy",
        ReplicaChange::Move => "move",
        ReplicaChange::Drop => "drop",
    }
}

/// The name of a task's state.
pub(crate) const fn state_name(state: ReplicaTaskState) -> &'static str {
    match state {
        ReplicaTaskState::Running => "running",
        ReplicaTaskState::Done => "done",
        ReplicaTaskState::Failed => "failed",
        ReplicaTaskState::Cancelled => "cancelled",
    }
}

fn read_change(name: &str) -> Result<ReplicaChange, Fault> {
    match name {
        "copy" => Ok(ReplicaChange::Copy),
        "move" => Ok(ReplicaChange::Move),
        "drop" => Ok(ReplicaChange::Drop),
        other => Err(Fault::invalid(format!(
            "change is 'copy', 'move' or 'drop', not {other:?}"
        ))),
    }
}

impl ReplicaTask {
    fn new(py: Python<'_>, task: Task) -> PyResult<Self> {
        let failure = task
            .failure
            .map(|(code, message)| Fault::new(code, message).into_value(py));
        Ok(Self {
            id: task.id,
            change: change_name(task.change),
            state: state_name(task.state),
            blocks: task.blocks,
            changed: task.changed,
            gone: task.gone,
            failed: task.failed,
            bytes: task.bytes.0,
            failure: failure.transpose()?.map(Bound::unbind),
            age: task.age.as_secs_f64(),
            idle: task.idle.as_secs_f64(),
            source: task.from,
            to: task.to,
        })
    }

    fn each(py: Python<'_>, tasks: Vec<Task>) -> PyResult<Vec<Self>> {
        tasks.into_iter().map(|task| Self::new(py, task)).collect()
    }
}

#[pymethods]
impl Pool {
    /// Begins a task that copies, moves or drops replicas, and returns its `ReplicaTask` at once. Bytes move
    /// from node to node and are verified.
    ///
    /// `change`: 'copy' gives each block one more replica for each node of `to`; 'move' moves a replica to
    /// another node; 'drop' drops the replica on the node `source`. The last readable replica stays.
    /// The blocks are one of: these `keys`; the blocks whose keys contain a match of `regex`; without both,
    /// every block of every namespace that has a replica on `source`. With `only_on_media`, every block that only
    /// the media of `source` hold: a move with `evict` and without `to`, off a node that `drain_node` takes out of
    /// service. An older master refuses it with InvalidArgumentError.
    /// `to`: names of nodes; empty for the node with the most free room.
    /// `evict`: a full target evicts blocks that were used earlier. Without it, a full target fails.
    ///
    /// Raises InvalidArgumentError for arguments that contradict each other. Raises an Error with the code `missing`
    /// for an unknown node, and `too_many_held` while too many tasks run. With `only_on_media`, a node that does not
    /// drain is `not_draining`. After another Error the task may have begun: see `replica_tasks`.
    #[pyo3(signature = (
        change, keys=None, *, regex=None, source=None, to=Vec::new(), evict=false, only_on_media=false
    ))]
    #[allow(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn change_replicas(
        &self,
        py: Python<'_>,
        change: &str,
        keys: Option<&Bound<'_, PyAny>>,
        regex: Option<String>,
        source: Option<String>,
        to: Vec<String>,
        evict: bool,
        only_on_media: bool,
    ) -> PyResult<ReplicaTask> {
        let wish = ReplicaWish {
            change: read_change(change)?,
            blocks: match (keys, regex, only_on_media) {
                (Some(_), Some(_), _) => {
                    return Err(Fault::invalid("give keys or a regex, not both").into());
                }
                (Some(_), None, true) | (None, Some(_), true) => {
                    return Err(Fault::invalid("only_on_media takes no keys and no regex").into());
                }
                (Some(keys), None, false) => ReplicaBlocks::Keys(read_keys(keys)?),
                (None, Some(regex), false) => ReplicaBlocks::Pattern(regex),
                (None, None, false) => ReplicaBlocks::OnNode,
                (None, None, true) => ReplicaBlocks::OnlyOnMedia,
            },
            from: source,
            to,
            evict,
        };
        let task = self.call(py, |client| client.change_replicas(&wish))?;
        ReplicaTask::new(py, task)
    }

    /// Takes a store node out of service. The node gets no new blocks, and a task moves its blocks to other
    /// nodes. The most recently used block moves first. Full targets evict blocks that were used earlier.
    /// Returns the `ReplicaTask`. The node may stop once its state in `stats` is `drained`. A repeated call
    /// moves the remaining blocks, or begins the drain again if it was cancelled.
    ///
    /// With `media`, the node's media do not come back, and the node is `drained` only once no block is left on them
    /// alone. When the task has ended, call `change_replicas("move", source=name, evict=True, only_on_media=True)`.
    /// Repeat it until a task changes nothing more. A repeated call without `media` says that they come back.
    ///
    /// Raises an Error with the code `missing` for an unknown node. Without `force`, raises an Error with the
    /// code `last_node` if no other node can take the blocks that would leave with this node.
    #[pyo3(signature = (name, *, force=false, media=false))]
    fn drain_node(
        &self,
        py: Python<'_>,
        name: &str,
        force: bool,
        media: bool,
    ) -> PyResult<ReplicaTask> {
        let task = self.call(py, |client| match media {
            true => client.drain_node_and_media(name, force),
            false => client.drain_node(name, force),
        })?;
        ReplicaTask::new(py, task)
    }

    /// Takes a store node back into service after `drain_node`. Blocks that have moved stay where they are.
    /// Returns whether the node was draining, and True after an attempt whose answer was lost. Raises an Error
    /// with the code `missing` for an unknown node, `node_stops` for a node that stops, and `node_unheard` for a
    /// node that does not answer.
    fn undrain_node(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        Ok(self.call(py, |client| client.undrain_node(name))?)
    }

    /// Returns the tasks with these ids that the leader knows; without ids every task. Raises an Error when
    /// the master cannot be asked.
    #[pyo3(signature = (ids=Vec::new()))]
    fn replica_tasks(&self, py: Python<'_>, ids: Vec<u64>) -> PyResult<Vec<ReplicaTask>> {
        let tasks = self.call(py, |client| client.replica_tasks(&ids))?;
        ReplicaTask::each(py, tasks)
    }

    /// Ends tasks. Returns the tasks that the leader knows. Transfers in progress still end on their own.
    /// Raises InvalidArgumentError without an id.
    fn cancel_replica_tasks(&self, py: Python<'_>, ids: Vec<u64>) -> PyResult<Vec<ReplicaTask>> {
        let tasks = self.call(py, |client| client.cancel_replica_tasks(&ids))?;
        ReplicaTask::each(py, tasks)
    }

    /// Waits until a task has ended, for at most `timeout` seconds, and returns its state at that time. Returns
    /// None if the leader does not know the task: another leader began, and the task ended with its own leader.
    fn wait_replica_task(
        &self,
        py: Python<'_>,
        id: u64,
        timeout: f64,
    ) -> PyResult<Option<ReplicaTask>> {
        let limit = seconds("timeout", timeout)?;
        let task = self.call(py, |client| client.wait_replica_task(id, limit))?;
        task.map(|task| ReplicaTask::new(py, task)).transpose()
    }
}
