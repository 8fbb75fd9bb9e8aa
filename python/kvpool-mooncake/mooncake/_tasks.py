"""Tasks that copy or move a replica: their types, and the one place that connects them to the pool."""

from __future__ import annotations

import dataclasses
import enum
import uuid
from collections.abc import Sequence

from mooncake import _codes
from mooncake._base import StoreBase

TaskId = uuid.UUID | tuple[int, int]
"""The name of a task: a UUID, or its two halves of 64 bits as the original writes them."""


class TaskType(enum.IntEnum):
    """The kind of a task."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


_NAMES = {TaskType.REPLICA_COPY: "create_copy_task", TaskType.REPLICA_MOVE: "create_move_task"}


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


class TaskMethods(StoreBase):
    """The task methods of a store.

    kvpool has no such tasks yet. `_begin_task` and `_task` are the only two functions that a pool with tasks
    has to fill in.
    """

    def _begin_task(self, kind: TaskType, key: str, source: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        raise NotImplementedError(
            f"{_NAMES[kind]}: kvpool makes replicas when a block is put (ReplicateConfig.replica_num), "
            "and does not copy or move them later"
        )

    def _task(self, task_id: TaskId) -> QueryTaskResponse | None:
        return None

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        """Not supported: raises NotImplementedError."""
        return self._begin_task(TaskType.REPLICA_COPY, key, "", list(targets))

    def create_move_task(self, key: str, source: str, target: str) -> tuple[TaskId, int]:
        """Not supported: raises NotImplementedError."""
        return self._begin_task(TaskType.REPLICA_MOVE, key, source, [target])

    def query_task(self, task_id: TaskId) -> tuple[QueryTaskResponse | None, int]:
        """There are no tasks: `(None, -704)`."""
        found = self._task(task_id)
        return found, _codes.OK if found else _codes.NOT_FOUND
