//! Replicas that are copied, moved and dropped by tasks of the pool's leader.

use super::args::{Keys, key};
use super::pool::Pool;
use super::{ObjectStore, aside, codes};
use crate::pool::{change_name, state_name};
use kvpool_client::{ControlError, ReplicaBlocks, ReplicaChange, ReplicaTaskState, ReplicaWish};
use kvpool_types::{Code, Key};
use pyo3::prelude::*;
use std::time::Duration;

/// How long the drop of replicas may take. It is short, because the leader only changes its table.
const DROP_LIMIT: Duration = Duration::from_secs(10);

/// A task: its change, its state, the seconds since its start and since its last change, and its last failure.
type Task = (&'static str, &'static str, f64, f64, String);

#[pymethods]
impl ObjectStore {
    /// Begins a task for one block. With `source` it moves the replica on that node, else it copies the block.
    /// Returns a code and the task's id.
    fn begin_replica_task(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = key)] key: Option<Key>,
        source: Option<String>,
        to: Vec<String>,
    ) -> PyResult<(i64, u64)> {
        let (Some(pool), Some(key)) = (self.pool()?, key) else {
            return Ok((codes::PARAMETERS, 0));
        };
        Ok(aside(py, || match begin(&pool, key, source, to) {
            Ok(id) => (codes::OK, id),
            Err((code, why)) => {
                self.remember(Some(why));
                (code, 0)
            }
        }))
    }

    /// A task by its id; `None` if the leader does not know it.
    fn replica_task(&self, py: Python<'_>, id: u64) -> PyResult<(i64, Option<Task>)> {
        let Some(pool) = self.pool()? else {
            return Ok((codes::PARAMETERS, None));
        };
        let tasks = match aside(py, || pool.client.replica_tasks(&[id])) {
            Ok(tasks) => tasks,
            Err(error) => {
                self.remember(Some(error.to_string()));
                return Ok((codes::of_control(&error), None));
            }
        };
        let task = tasks.into_iter().next().map(|task| {
            let (age, idle) = (task.age.as_secs_f64(), task.idle.as_secs_f64());
            let failure = task.failure.map_or_else(String::new, |(_, why)| why);
            let state = state_name(task.state);
            (change_name(task.change), state, age, idle, failure)
        });
        Ok((codes::OK, task))
    }

    /// Drops the replicas of blocks on one node, except the last readable replica of a block. Waits for the
    /// end.
    fn drop_replicas(&self, py: Python<'_>, keys: Keys, node: String) -> PyResult<i64> {
        let Some(pool) = self.pool()? else {
            return Ok(codes::PARAMETERS);
        };
        let keys: Vec<Key> = keys.0.into_iter().flatten().collect();
        Ok(aside(py, || match drop_all(&pool, &keys, &node) {
            Ok(()) => codes::OK,
            Err(error) => {
                let code = of_wish(&error);
                self.remember(Some(error.to_string()));
                code
            }
        }))
    }
}

/// The code of a refused task. A block cannot be missing here, so `Missing` means a node.
fn of_wish(error: &ControlError) -> i64 {
    match error.code {
        Code::Missing => codes::PARAMETERS,
        _ => codes::of_control(error),
    }
}

fn begin(
    pool: &Pool,
    key: Key,
    source: Option<String>,
    to: Vec<String>,
) -> Result<u64, (i64, String)> {
    if to.is_empty() {
        return Err((codes::PARAMETERS, "a copy needs a target".to_owned()));
    }
    let described = pool.client.describe(std::slice::from_ref(&key));
    let described = described.map_err(|error| (codes::of_control(&error), error.to_string()))?;
    let Some(block) = described.into_iter().flatten().next() else {
        return Err((codes::NOT_FOUND, format!("the pool has no block {key}")));
    };
    let wish = ReplicaWish {
        change: match source {
            Some(_) => ReplicaChange::Move,
            None => ReplicaChange::Copy,
        },
        blocks: ReplicaBlocks::Keys(vec![key]),
        from: source.clone(),
        to,
        // As in the original, a full target is a failure.
        evict: false,
    };
    let has_replica = |node: &String| block.replicas.iter().any(|replica| replica.node == *node);
    if let Some(node) = source.filter(|node| !has_replica(node)) {
        let why = format!("the block has no replica on {node}");
        return Err((codes::PARAMETERS, why));
    }
    match pool.client.change_replicas(&wish) {
        Ok(task) => Ok(task.id),
        Err(error) => Err((of_wish(&error), error.to_string())),
    }
}

fn drop_all(pool: &Pool, keys: &[Key], node: &str) -> Result<(), ControlError> {
    let at_once = pool.client.limits().max_batch_keys.max(1);
    for keys in keys.chunks(at_once) {
        let task = pool.client.change_replicas(&ReplicaWish {
            change: ReplicaChange::Drop,
            blocks: ReplicaBlocks::Keys(keys.to_vec()),
            from: Some(node.to_owned()),
            to: Vec::new(),
            evict: false,
        })?;
        let ended = pool.client.wait_replica_task(task.id, DROP_LIMIT)?;
        if ended.is_some_and(|task| task.state == ReplicaTaskState::Running) {
            let why = "the leader has not dropped the replicas in time";
            return Err(ControlError {
                code: Code::DeadlineExceeded,
                message: why.to_owned(),
            });
        }
    }
    Ok(())
}
