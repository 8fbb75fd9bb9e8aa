"""How a tensor is split over ranks: the axes, the names of the shards, and the manifest that describes a split."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Final

# The order of axes in a shard's key.
_KINDS: Final = ("dp", "tp", "ep", "pp")
_MODES: Final = ("as_stored", "shard", "full")
# No tensor has more dimensions, and no manifest is longer.
_MAX_DIMS: Final = 64
_LONGEST_MANIFEST: Final = 1 << 16


@dataclasses.dataclass
class ParallelAxis:
    """One axis of a split: `kind` is "tp", "dp", "ep" or "pp".

    A "tp" axis has a `split_dim`, an "ep" axis an `expert_id`, a "pp" axis a `stage_id`; no other axis has one.
    """

    kind: str = ""
    rank: int = 0
    size: int = 1
    split_dim: int | None = None
    expert_id: int | None = None
    stage_id: int | None = None


@dataclasses.dataclass
class TensorParallelism:
    """The axes that name one shard, at most one of each kind, in any order."""

    axes: list[ParallelAxis] = dataclasses.field(default_factory=list)


class ReadTarget:
    """The result that a read wants: the object "as_stored", a "shard", or the "full" tensor."""

    def __init__(self, mode: str = "as_stored", parallelism: TensorParallelism | None = None) -> None:
        self.mode = mode
        self.parallelism = parallelism

    @property
    def mode(self) -> str:
        """"as_stored", "shard" or "full"; any other value raises RuntimeError."""
        return self._mode

    @mode.setter
    def mode(self, value: str) -> None:
        if value not in _MODES:
            raise RuntimeError(f"the mode of a ReadTarget is one of {', '.join(_MODES)}, not {value!r}")
        self._mode = value


class BadSplit(ValueError):
    """An invalid split. The text names the reason."""


def read_axes(parallelism: object) -> list[ParallelAxis]:
    """Returns the axes of a `TensorParallelism` in the order of a shard's key. Raises BadSplit."""
    axes = list(getattr(parallelism, "axes", None) or ())
    if not axes:
        raise BadSplit("a parallelism needs at least one axis")
    for axis in axes:
        _check_axis(axis)
    kinds = [axis.kind for axis in axes]
    if len(set(kinds)) != len(kinds):
        raise BadSplit(f"the axes {', '.join(kinds)} repeat a kind")
    return sorted(axes, key=lambda axis: _KINDS.index(axis.kind))


def _check_axis(axis: ParallelAxis) -> None:
    if axis.kind not in _KINDS:
        raise BadSplit(f"the kind of an axis is one of {', '.join(_KINDS)}, not {axis.kind!r}")
    if not 0 <= axis.rank < axis.size:
        raise BadSplit(f"the {axis.kind} axis has no rank {axis.rank} of {axis.size}")
    needed = {"tp": "split_dim", "ep": "expert_id", "pp": "stage_id"}.get(axis.kind)
    for name in ("split_dim", "expert_id", "stage_id"):
        given = getattr(axis, name)
        if name == needed and given is None:
            raise BadSplit(f"the {axis.kind} axis needs a {name}")
        if name == "split_dim" and name != needed and given is not None:
            raise BadSplit(f"the {axis.kind} axis takes no split_dim")
    if axis.kind == "tp" and not 0 <= (axis.split_dim or 0) < _MAX_DIMS:
        raise BadSplit(f"{axis.split_dim} is no dimension")


def tp_axis(axes: Sequence[ParallelAxis]) -> ParallelAxis | None:
    """Returns the axis that splits the tensor's bytes; `None` without one."""
    return next((axis for axis in axes if axis.kind == "tp"), None)


def axes_key(key: str, axes: Sequence[ParallelAxis], rank: int | None = None, size: int | None = None) -> str:
    """Returns the key of a shard. `rank` and `size` replace those of the tensor-parallel axis."""
    if len(axes) == 1 and axes[0].kind == "tp":
        return f"{key}_tp_{axes[0].rank if rank is None else rank}"
    for axis in axes:
        is_tp = axis.kind == "tp"
        at = rank if is_tp and rank is not None else axis.rank
        of = size if is_tp and size is not None else axis.size
        key += f"__{axis.kind}_{at}of{of}"
        for mark, value in (("sd", axis.split_dim), ("eid", axis.expert_id), ("sid", axis.stage_id)):
            if value is not None:
                key += f"_{mark}{value}"
    return key


def shard_key(key: str, rank: int, size: int) -> str:
    """The key of a shard of the methods `_with_tp`."""
    return key if size == 1 else f"{key}_tp_{rank}"


def manifest_key(key: str) -> str:
    """The key of the manifest of a split by axes."""
    return f"{key}__parallelism_manifest"


def writer_key(key: str, rank: int, size: int, split_dim: int) -> str:
    """The key of a writer's shard."""
    return f"{key}__writer_{rank}of{size}_sd{split_dim}"


def writer_manifest_key(key: str) -> str:
    """The key of the manifest of a split by writers."""
    return f"{key}__writer_manifest"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A tensor that is stored as `size` shards along `split_dim`. If the shards differ in size, the first are
    larger."""

    dtype: str
    shape: tuple[int, ...]
    split_dim: int
    size: int

    def span(self, rank: int, size: int | None = None) -> tuple[int, int]:
        """Returns the start and the end of a shard along `split_dim`, as `torch.tensor_split` cuts."""
        base, extra = divmod(self.shape[self.split_dim], size or self.size)
        start = rank * base + min(rank, extra)
        return start, start + base + (rank < extra)

    def shape_of(self, start: int, end: int) -> tuple[int, ...]:
        """The shape of a part along `split_dim`."""
        return (*self.shape[: self.split_dim], end - start, *self.shape[self.split_dim + 1 :])

    def encode(self) -> bytes:
        """The bytes of the manifest's object."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest | None:
        """Reads the manifest from an object's bytes; `None` for any other bytes."""
        try:
            said = json.loads(data) if 0 < len(data) <= _LONGEST_MANIFEST else {}
            found = cls(str(said["dtype"]), tuple(map(int, said["shape"])), int(said["split_dim"]), int(said["size"]))
        except (ValueError, KeyError, TypeError):
            return None
        fits = 0 <= found.split_dim < len(found.shape) <= _MAX_DIMS and 0 < found.size < 1 << 20
        return found if fits and all(0 <= length < 1 << 48 for length in found.shape) else None
