//! Calls about replicas: tasks that copy, move and drop them.

use super::admin::pattern;
use super::{Calls, millis};
use crate::pool::{Blocks, Change, TaskId, TaskRefused, TaskState, TaskView, Wish};
use crate::service::refused::{Refused, refused};
use crate::service::request::unpack;
use crate::service::rights::Allowed;
use kvpool_proto as proto;
use kvpool_types::{Code, NodeName};
use proto::change_replicas_request::Blocks as Named;

impl Calls {
    pub(in crate::service) async fn change_replicas(
        &self,
        request: Allowed<proto::ChangeReplicasRequest>,
    ) -> Result<proto::ReplicaTask, Refused> {
        let caller = self.writer(request.caller.as_ref())?;
        let (request, _) = request.open();
        let wish = Wish {
            change: change_of(request.change)?,
            from: (!request.from.is_empty()).then_some(NodeName(request.from)),
            to: request.to.into_iter().map(NodeName).collect(),
            evict: request.evict,
        };
        let named = request.blocks.ok_or_else(|| {
            refused(
                Code::InvalidArgument,
                "the request does not say which blocks",
            )
        })?;
        let task = match named {
            Named::Keys(packed) => {
                let keys = unpack(&self.pool, &packed)?;
                let keys: Vec<_> = keys.iter().collect();
                let blocks = Blocks::Keys(caller.namespace, &keys);
                self.pool.change_replicas(wish, blocks).await
            }
            Named::Pattern(text) => {
                let blocks = Blocks::Pattern(caller.namespace, pattern(&text)?);
                self.pool.change_replicas(wish, blocks).await
            }
            Named::EveryBlock(true) => self.pool.change_replicas(wish, Blocks::OnNode).await,
            Named::OnlyOnMedia(true) => self.pool.change_replicas(wish, Blocks::OnlyOnMedia).await,
            Named::EveryBlock(false) | Named::OnlyOnMedia(false) => {
                return Err(refused(Code::InvalidArgument, "false names no block"));
            }
        };
        let task = task.map_err(|TaskRefused { code, message }| refused(code, message))?;
        Ok(self.task(task))
    }

    pub(in crate::service) async fn drain_node(
        &self,
        request: Allowed<proto::DrainNodeRequest>,
    ) -> Result<proto::ReplicaTask, Refused> {
        self.writer(request.caller.as_ref())?;
        let node = NodeName(request.name.clone());
        let task = match request.goes_on {
            true => self.pool.go_on_draining(&node).await,
            false if request.media_leave => {
                self.pool.drain_node_and_media(&node, request.force).await
            }
            false => self.pool.drain_node(&node, request.force).await,
        };
        let task = task.map_err(|TaskRefused { code, message }| refused(code, message))?;
        Ok(self.task(task))
    }

    pub(in crate::service) async fn undrain_node(
        &self,
        request: Allowed<proto::UndrainNodeRequest>,
    ) -> Result<proto::UndrainNodeReply, Refused> {
        self.writer(request.caller.as_ref())?;
        let node = NodeName(request.name.clone());
        let undrained = self.pool.undrain_node(&node).await;
        let drained = undrained.map_err(|TaskRefused { code, message }| refused(code, message))?;
        let epoch = self.pool.epoch.0;
        Ok(proto::UndrainNodeReply { epoch, drained })
    }

    pub(in crate::service) fn replica_tasks(
        &self,
        request: Allowed<proto::ReplicaTasksRequest>,
    ) -> Result<proto::ReplicaTasksReply, Refused> {
        let ids: Vec<TaskId> = request.ids.iter().copied().map(TaskId).collect();
        if request.cancel {
            self.writer(request.caller.as_ref())?;
            if ids.is_empty() {
                return Err(refused(Code::InvalidArgument, "name the tasks to cancel"));
            }
            self.pool.cancel_replica_tasks(&ids);
        } else {
            self.caller(request.caller.as_ref())?;
        }
        let tasks = self.pool.replica_tasks(&ids).into_iter();
        Ok(proto::ReplicaTasksReply {
            epoch: self.pool.epoch.0,
            tasks: tasks.map(|task| self.task(task)).collect(),
        })
    }

    fn task(&self, task: TaskView) -> proto::ReplicaTask {
        let (code, message) = task.failure.unwrap_or((Code::Ok, String::new()));
        let mut reply = proto::ReplicaTask {
            epoch: self.pool.epoch.0,
            id: task.id.0,
            blocks: task.blocks,
            changed: task.changed,
            gone: task.gone,
            failed: task.failed,
            bytes: task.bytes,
            code: code.to_wire().into(),
            message,
            age_ms: millis(task.age),
            idle_ms: millis(task.idle),
            from: task.wish.from.map_or_else(String::new, |name| name.0),
            to: task.wish.to.into_iter().map(|name| name.0).collect(),
            ..Default::default()
        };
        reply.set_change(match task.wish.change {
            Change::Copy => proto::ReplicaChange::ReplicaCopy,
            Change::Move => proto::ReplicaChange::ReplicaMove,
            Change::Drop => proto::ReplicaChange::ReplicaDrop,
        });
        reply.set_state(match task.state {
            TaskState::Running => proto::ReplicaTaskState::TaskRunning,
            TaskState::Done => proto::ReplicaTaskState::TaskDone,
            TaskState::Failed => proto::ReplicaTaskState::TaskFailed,
            TaskState::Cancelled => proto::ReplicaTaskState::TaskCancelled,
        });
        reply
    }
}

fn change_of(raw: i32) -> Result<Change, Refused> {
    match proto::ReplicaChange::try_from(raw) {
        Ok(proto::ReplicaChange::ReplicaCopy) => Ok(Change::Copy),
        Ok(proto::ReplicaChange::ReplicaMove) => Ok(Change::Move),
        Ok(proto::ReplicaChange::ReplicaDrop) => Ok(Change::Drop),
        Err(_) => Err(refused(
            Code::InvalidArgument,
            format!("unknown change {raw}"),
        )),
    }
}
