"""The class that vLLM loads; it translates vLLM's interface to the scheduler's and the worker's half.

Written for the interface of vLLM 0.32.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import platform
from typing import Any

import torch  # type: ignore[import-not-found]
import vllm  # type: ignore[import-not-found]
from vllm.distributed import (  # type: ignore[import-not-found]
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
    CrossAttentionSpec,
    MambaSpec,
    is_full_attention_spec,
    iter_layer_specs,
)

from kvpool._engines.connection import Connection
from kvpool.vllm.keys import Group, Layout, layout_prefix, rank_name
from kvpool.vllm.memory import group_memory, host_regions
from kvpool.vllm.plan import Plan
from kvpool.vllm.scheduler import Planner, Progress
from kvpool.vllm.settings import Settings
from kvpool.vllm.worker import Mover

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class KvpoolMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The data that the scheduler's half sends to the workers with each step."""

    plan: Plan


class KvpoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Shares vLLM's KV cache with other engines through a pool.

    `kv_role`: "kv_producer" saves, "kv_consumer" loads, "kv_both" does both. Settings, in
    `kv_connector_extra_config`, are the fields of [`Settings`]. Raises ValueError, with the reason, for an
    unknown setting or an unsupported model.

    Loads are asynchronous: a request waits for its blocks while others continue. Set
    `kv_load_failure_policy` to "recompute", so that a request whose blocks have vanished since the
    lookup computes them.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.read(transfer.kv_connector_extra_config)
        self._loads = transfer.is_kv_consumer
        self._saves = transfer.is_kv_producer
        _refuse_unsupported(vllm_config, kv_cache_config)
        self._requests: dict[str, Any] = {}
        self._connection: Connection | None = None
        self._planner: Planner | None = None
        self._mover: Mover | None = None
        self._bad_blocks: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            layout = _layout(vllm_config, kv_cache_config, self._settings)
            logger.info("blocks are named %s:...", layout.prefix)
            drafts = vllm_config.speculative_config
            self._connection = Connection(self._settings)
            self._planner = Planner(
                layout,
                self._connection,
                loads=self._loads,
                saves=self._saves,
                spare_units=1 if drafts is not None and drafts.use_eagle() else 0,
                lookup_patience=self._settings.lookup_patience,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Does nothing: a block that is not saved is a later miss, and no caller waits for it."""
        return False

    # What follows runs in the scheduler.

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._plans.lookup(
            request.request_id, request.block_hashes, request.num_tokens, num_computed_tokens
        )
        # None: vLLM asks again at its next step and schedules other requests meanwhile.
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        self._plans.allocated(
            request.request_id, request.block_hashes, blocks.get_block_ids(), num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: Any) -> KvpoolMetadata:
        state = scheduler_output.kv_connector_block_state
        progress = [
            Progress(
                request=name,
                hashes=request.block_hashes,
                computed_tokens=self._worth_saving(request, request.num_computed_tokens + tokens),
                blocks=functools.partial(state.get_block_ids, name),
            )
            for name, tokens in scheduler_output.num_scheduled_tokens.items()
            if (request := self._requests.get(name)) is not None
        ]
        preempted = scheduler_output.preempted_req_ids or ()
        return KvpoolMetadata(self._plans.step(progress, preempted))

    def update_connector_output(self, connector_output: Any) -> None:
        self._plans.arrived(
            connector_output.finished_recving or (),
            connector_output.failed_recving or (),
            connector_output.invalid_block_ids or (),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        return self._plans.finished(request.request_id), None

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    # What follows runs in the workers.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        config = self._kv_cache_config
        groups = {number: config.kv_cache_groups[number] for number in config.prefix_cacheable_group_ids}
        memory = {
            number: group_memory(
                [kv_caches[layer] for layer in group.layer_names if layer in kv_caches],
                config.num_blocks,
                kept=is_full_attention_spec(group.kv_cache_spec),
                stage=self._settings.staging == "always",
                staging_bytes=self._settings.staging_bytes // len(groups),
            )
            for number, group in groups.items()
        }
        replicas = config.kv_tp_replicas
        rank = get_tensor_model_parallel_rank()
        staged = [group.staging.memory for group in memory.values() if group.staging is not None]
        regions = host_regions(kv_caches) + [part for part in staged if part[1] > 0]
        self._connection = Connection(self._settings, regions)
        self._mover = Mover(
            self._connection,
            rank_name(rank // replicas, get_pp_group().rank_in_group),
            memory,
            # Of ranks with equal blocks, the first one saves.
            saves=self._saves and rank % replicas == 0,
            save_backlog=self._settings.save_backlog,
            save_patience=self._settings.put_timeout,
            rest=self._settings.retry_after,
        )

    def handle_preemptions(self, kv_connector_metadata: KvpoolMetadata) -> None:
        self._moves.stop(kv_connector_metadata.plan.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._moves.load(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads end before their requests are computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: blocks are saved with all their layers, after the step."""

    def wait_for_save(self) -> None:
        self._moves.save(self._get_connector_metadata().plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        moved = self._moves.moved(finished_req_ids)
        failed = {request for request, bad in moved.loaded.items() if bad}
        if len(self._kv_cache_config.kv_cache_groups) == 1:
            # With one group vLLM computes from the first bad block on, else the whole request.
            self._bad_blocks |= {block.number for bad in moved.loaded.values() for block in bad}
            failed = set()
        return KVConnectorTransferResults(
            finished_sending=moved.saved, finished_recving=set(moved.loaded), failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    # What follows runs in both.

    def shutdown(self) -> None:
        for part in (self._planner, self._mover, self._connection):
            if part is not None:
                part.close()

    @property
    def _plans(self) -> Planner:
        assert self._planner is not None, "invariant: vLLM calls this of the scheduler's connector only"
        return self._planner

    @property
    def _moves(self) -> Mover:
        assert self._mover is not None, "invariant: vLLM registers its caches before the first step"
        return self._mover

    def _worth_saving(self, request: Any, computed_tokens: int) -> int:
        """The number of computed tokens to save."""
        if self._settings.save_decoded:
            return computed_tokens
        return min(computed_tokens, int(request.num_prompt_tokens))


def _refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError("KvpoolConnector does not support context parallel ranks")
    numbers = kv_cache_config.prefix_cacheable_group_ids
    if not numbers:
        raise ValueError("KvpoolConnector: the model has no KV cache that prompts can share")
    for number in numbers:
        group = kv_cache_config.kv_cache_groups[number]
        specs = iter_layer_specs(group.kv_cache_spec)
        if group.host_resident or any(isinstance(spec, MambaSpec | CrossAttentionSpec) for spec in specs):
            kind = type(group.kv_cache_spec).__name__
            raise ValueError(f"KvpoolConnector does not support the cache of group {number}: {kind}")


def _layout(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Layout:
    """The names of the model's blocks."""
    unit_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    parallel = vllm_config.parallel_config
    shards = parallel.tensor_parallel_size // kv_cache_config.kv_tp_replicas
    groups = {
        number: kv_cache_config.kv_cache_groups[number].kv_cache_spec
        for number in kv_cache_config.prefix_cacheable_group_ids
    }
    kinds = {
        number: (
            type(spec).__name__,
            spec.block_size,
            sorted({one.page_size_bytes for one in iter_layer_specs(spec)}),
        )
        for number, spec in groups.items()
    }
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    fields = {
        "format": "1",
        "engine": f"vllm {vllm.__version__}",
        "architecture": _architecture(model),
        "revision": str(model.revision),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache dtype": str(cache.cache_dtype),
        "cache layout": str(kv_cache_config.kv_cache_layout),
        "attention": str(vllm_config.attention_config.backend),
        "device": _device(vllm_config.device_config.device_type),
        "groups": str(kinds),
        "unit": str(unit_tokens),
        "hash": f"{cache.prefix_caching_hash_algo} of {hash_tokens}",
        "ranks": f"{shards} of {parallel.tensor_parallel_size} by {parallel.pipeline_parallel_size}",
        "salt": settings.salt,
    }
    return Layout(
        prefix=layout_prefix(settings.model or model.model, fields),
        ranks=tuple(
            rank_name(shard, stage)
            for stage in range(parallel.pipeline_parallel_size)
            for shard in range(shards)
        ),
        groups=tuple(Group(number, spec.block_size) for number, spec in groups.items()),
        unit_tokens=unit_tokens,
        hash_tokens=hash_tokens,
    )


def _architecture(model: Any) -> str:
    """The model's configuration, without its path and the version that wrote it."""
    config = dict(model.hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return json.dumps(config, sort_keys=True, default=str)


def _device(kind: str) -> str:
    """The part of the device that the cached bytes depend on: on a CPU, vLLM packs them for the CPU's
    matrix instructions."""
    if kind != "cpu":
        return kind
    asked = ("_is_amx_tile_supported", "_is_avx512_supported")
    able = [name for name in asked if getattr(torch.cpu, name, bool)()]
    return " ".join([kind, platform.machine(), *able])


__all__ = ["KvpoolConnector", "KvpoolMetadata"]
