"""Tasks that copy or move a replica of an object."""

from __future__ import annotations

import dataclasses
import enum
import time
import uuid
from collections.abc import Sequence

from mooncake import _codes
from mooncake._base import StoreBase
from mooncake._settings import node_name

TaskId = uuid.UUID | tuple[int, int]
"""The name of a task: a UUID, or its two halves of 64 bits as the original writes them."""


class TaskType(enum.IntEnum):
    """The kind of a task."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(enum.IntEnum):
    """The state of a task."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


@dataclasses.dataclass
class QueryTaskResponse:
    """The state of one task. Times are in milliseconds since 1970."""

    id: TaskId = (0, 0)
    type: TaskType = TaskType.REPLICA_COPY
    status: TaskStatus = TaskStatus.PENDING
    created_at_ms_epoch: int = 0
    last_updated_at_ms_epoch: int = 0
    assigned_client: TaskId = (0, 0)
    message: str = ""


_STATUS = {
    "running": TaskStatus.PROCESSING,
    "done": TaskStatus.SUCCESS,
    "failed": TaskStatus.FAILED,
    "cancelled": TaskStatus.FAILED,
}
_NO_TASK: TaskId = (0, 0)


class TaskMethods(StoreBase):
    """The task methods of a store. The pool's leader performs the tasks, and keeps them in memory."""

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        """Begins to copy an object to each target segment. Returns the task's id, and 0 or an error code.

        -600: no target, or an unknown segment; -704: the object is absent.
        """
        return self._begin_task("create_copy_task", key, None, targets)

    def create_move_task(self, key: str, source: str, target: str) -> tuple[TaskId, int]:
        """Begins to move an object's replica to another segment. Returns the task's id, and 0 or an error code.

        -600: an unknown segment, equal segments, or no replica at the source; -704: the object is absent.
        """
        return self._begin_task("create_move_task", key, node_name(source), [target])

    def query_task(self, task_id: TaskId) -> tuple[QueryTaskResponse | None, int]:
        """Returns the state of a task and 0, or `(None, -1400)` for a task that the pool's leader does not
        know."""
        high, number = divmod(task_id.int, 1 << 64) if isinstance(task_id, uuid.UUID) else task_id
        if high or not 0 < number < 1 << 64:
            return None, _codes.NO_TASK
        code, task = self._native.replica_task(number)
        if code < 0 or task is None:
            return None, self._said("query_task", code) or _codes.NO_TASK
        change, state, age, idle, message = task
        now = time.time()
        response = QueryTaskResponse(
            id=(0, number),
            type=TaskType.REPLICA_MOVE if change == "move" else TaskType.REPLICA_COPY,
            status=_STATUS[state],
            created_at_ms_epoch=int((now - age) * 1000),
            last_updated_at_ms_epoch=int((now - idle) * 1000),
            message=message,
        )
        return response, _codes.OK

    def _begin_task(
        self, what: str, key: str, source: str | None, targets: Sequence[str]
    ) -> tuple[TaskId, int]:
        nodes = [node_name(target) for target in targets]
        code, number = self._native.begin_replica_task(key, source, nodes)
        return (0, number) if number else _NO_TASK, self._said(what, code)
