"""The class that vLLM loads. It maps vLLM's interface to the scheduler's half and the worker's half.

Written for the interface of vLLM 0.32.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch  # type: ignore[import-not-found]
import vllm  # type: ignore[import-not-found]
from vllm.distributed import (  # type: ignore[import-not-found]
    get_pp_group,
    get_tensor_model_parallel_rank,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.utils import get_pp_indices  # type: ignore[import-not-found]
from vllm.model_executor.models.utils import (  # type: ignore[import-not-found]
    extract_layer_index,
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
from vllm.v1.request import RequestStatus  # type: ignore[import-not-found]

from kvpool import handoff
from kvpool._engines.connection import Connection
from kvpool.vllm.handoff import Arrivals, Desk, Exchange, session_options
from kvpool.vllm.keys import Group, Layout, layout_prefix, rank_name
from kvpool.vllm.memory import group_memory, handoff_states, host_regions
from kvpool.vllm.plan import Plan
from kvpool.vllm.scheduler import Planner, Progress
from kvpool.vllm.settings import Settings
from kvpool.vllm.worker import Mover

logger = logging.getLogger(__name__)

_DRAFTS_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Methods that draft from the text alone. Engines with and without them have equal blocks."""


@dataclasses.dataclass
class KvpoolMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The data that the scheduler's half sends to the workers with each step."""

    plan: Plan


@dataclasses.dataclass
class KvpoolHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The data that a worker sends the scheduler's half once."""

    address: str
    """The address of the worker's session for hand-offs."""


class KvpoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Shares vLLM's KV cache with other engines through a pool.

    `kv_role`: "kv_producer" saves, "kv_consumer" loads, "kv_both" does both. Settings, in
    `kv_connector_extra_config`, are the fields of [`Settings`]. Raises ValueError, with the reason, for an
    unknown setting or an unsupported model.

    Loads are asynchronous: a request waits for its blocks while others continue. Set `kv_load_failure_policy`
    to "recompute". Then a request computes the blocks that have vanished since its lookup.
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
        self._desk: Desk | None = None
        self._exchange: Exchange | None = None
        self._address: str | None = None
        self._arrivals = Arrivals()
        self._bad_blocks: set[int] = set()
        self._hands_off = self._settings.handoff != "off"
        if self._hands_off:
            _refuse_handoff(kv_cache_config)
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
            if self._hands_off:
                self._desk = _desk(vllm_config, kv_cache_config, self._settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a preempted request must compute its blocks again before it ends. A block that is not saved
        is only a later miss. But decode waits for a block that is handed off."""
        return self._hands_off and self._saves

    # The methods from here on run in the scheduler.

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.skip_reading_prefix_cache:
            if self._desk is not None:
                self._desk.refuse(request.request_id, request.kv_transfer_params)
            return 0, False
        tokens = self._plans.lookup(
            request.request_id, request.block_hashes, request.num_tokens, num_computed_tokens
        )
        # None makes vLLM ask again at its next step. vLLM schedules other requests meanwhile.
        if self._desk is not None and tokens is not None:
            tokens += self._desk.promised(
                request.request_id,
                request.kv_transfer_params,
                request.num_prompt_tokens,
                num_computed_tokens + tokens,
            )
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        block_ids = blocks.get_block_ids()
        given = 0
        if self._desk is not None:
            given = self._desk.allocated(
                request.request_id, block_ids[self._group], num_external_tokens
            )
        self._plans.allocated(
            request.request_id, request.block_hashes, block_ids, num_external_tokens - given
        )
        if given:
            self._plans.handed(request.request_id, request.num_prompt_tokens)

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
        plan = self._plans.step(progress, preempted)
        if self._desk is not None:
            self._desk.preempted(preempted)
            for one in progress:
                request = self._requests[one.request]
                self._desk.computed(
                    one.request,
                    request.kv_transfer_params,
                    request.num_prompt_tokens,
                    request.num_computed_tokens + scheduler_output.num_scheduled_tokens[one.request],
                    functools.partial(self._pages, one),
                    request.max_tokens,
                )
            plan = dataclasses.replace(plan, **self._desk.step())
        return KvpoolMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        arrived = connector_output.finished_recving or ()
        bad_blocks = connector_output.invalid_block_ids or ()
        # The planner has forgotten a request that ended during its load.
        failed = {request for request in connector_output.failed_recving or () if request in self._requests}
        if self._desk is not None:
            failed |= self._desk.arrived(arrived, bad_blocks)
        self._plans.arrived(arrived, failed, bad_blocks)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KvpoolHandshake]
    ) -> None:
        if self._desk is not None:
            self._desk.meet({place: one.address for place, one in metadata.items()})

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        saving = self._plans.finished(request.request_id)
        if self._desk is None:
            return saving, None
        ended = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        sending, answer = self._desk.finished(
            request.request_id, request.status in ended, request.kv_transfer_params
        )
        return saving or sending, answer

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        """Removes the blocks of this model and layout from the pool. Returns whether all of them are removed,
        and without a planner the answer of vLLM's base class. vLLM takes only False for a failure."""
        if self._planner is None:
            answer: bool | None = super().reset_cache()
            return answer
        if self._planner.reset():
            return True
        logger.error("the pool still has this model's blocks: reset the cache again when the pool answers")
        return False

    # The methods from here on run in the workers.

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
            # Of several ranks with equal blocks, only the first saves.
            saves=self._saves and rank % replicas == 0,
            save_backlog=self._settings.save_backlog,
            save_patience=self._settings.put_timeout,
            rest=self._settings.retry_after,
        )
        if self._hands_off:
            self._open_exchange(kv_caches, rank)

    def get_handshake_metadata(self) -> KvpoolHandshake | None:
        return None if self._address is None else KvpoolHandshake(self._address)

    def handle_preemptions(self, kv_connector_metadata: KvpoolMetadata) -> None:
        preempted = kv_connector_metadata.plan.preempted
        self._moves.stop(preempted)
        self._arrivals.stop(preempted)
        if self._exchange is not None:
            self._exchange.stop(preempted)

    def bind_connector_metadata(self, connector_metadata: KvpoolMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._exchange is not None:
            # The copies start here, before the model runs: vLLM calls `start_load_kv` after it.
            self._exchange.begin_sends(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan = self._get_connector_metadata().plan
        self._arrivals.begin(plan)
        self._moves.load(plan)
        if self._exchange is not None:
            self._exchange.begin_receives(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads end before their requests are computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Hands the layer off. The pool gets the blocks after the step, with all their layers."""
        if self._exchange is not None:
            self._exchange.layer_computed(extract_layer_index(layer_name))

    def wait_for_save(self) -> None:
        self._moves.save(self._get_connector_metadata().plan)
        if self._exchange is not None:
            self._exchange.step_ended()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        moved = self._moves.moved(finished_req_ids)
        parts = [(request, [block.number for block in bad]) for request, bad in moved.loaded.items()]
        done = moved.saved
        if self._exchange is not None:
            parts += [(request, list(bad)) for request, bad in self._exchange.received().items()]
            done |= self._exchange.sent(finished_req_ids)
            done = {one for one in done if not (self._moves.is_saving(one) or self._exchange.is_sending(one))}
        loaded = self._arrivals.ended(parts)
        failed = {request for request, bad in loaded.items() if bad}
        if len(self._kv_cache_config.kv_cache_groups) == 1:
            # With one group vLLM computes from the first bad block on, else the whole request.
            self._bad_blocks.update(*loaded.values())
            failed = set()
        return KVConnectorTransferResults(
            finished_sending=done, finished_recving=set(loaded), failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    # The methods from here on run in the scheduler and in the workers.

    def shutdown(self) -> None:
        for part in (self._planner, self._exchange, self._mover, self._connection):
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

    @property
    def _group(self) -> int:
        """The group whose blocks are handed off."""
        return int(self._kv_cache_config.prefix_cacheable_group_ids[0])

    def _pages(self, one: Progress) -> Sequence[int]:
        return one.blocks()[self._group]

    def _open_exchange(self, kv_caches: dict[str, Any], rank: int) -> None:
        parallel, model = self._vllm_config.parallel_config, self._vllm_config.model_config
        config, settings = self._kv_cache_config, self._settings
        group = config.kv_cache_groups[self._group]
        caches = {extract_layer_index(name): kv_caches[name] for name in group.layer_names if name in kv_caches}
        ranks, stage = parallel.tensor_parallel_size, get_pp_group().rank_in_group
        states = handoff_states(
            caches,
            config.num_blocks,
            _state_name(self._vllm_config, config, settings),
            model.get_total_num_kv_heads(),
            ranks,
            one_source=model.use_mla,
        )
        session = handoff.Session(
            states,
            page_tokens=group.kv_cache_spec.block_size,
            tensor=(rank, ranks),
            pipeline=(stage, _stage_layers(self._vllm_config)),
            **session_options(settings, stage * ranks + rank),
        )
        self._address = session.address
        self._exchange = Exchange(
            session,
            settings.handoff,
            sorted(caches),
            settings.handoff_timeout,
            declines=(stage, rank) == (0, 0),
        )
        logger.info("rank %d of stage %d takes and gives prompts at %s", rank, stage, self._address)

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


def _refuse_handoff(kv_cache_config: Any) -> None:
    if len(kv_cache_config.kv_cache_groups) != 1:
        groups = len(kv_cache_config.kv_cache_groups)
        raise ValueError(f"KvpoolConnector: handoff needs a model with 1 group of KV cache, not {groups}")


def _desk(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Desk:
    ranks = vllm_config.parallel_config.tensor_parallel_size
    transfer = vllm_config.kv_transfer_config
    return Desk(
        settings.handoff,
        kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
        gives=transfer.is_kv_producer,
        takes=transfer.is_kv_consumer,
        ranks=ranks,
        layers=_stage_layers(vllm_config),
        decode_ranks=settings.handoff_decode_ranks or ranks,
    )


def _stage_layers(vllm_config: Any) -> list[int]:
    """The number of layers of each pipeline stage."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    bounds = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    return [end - start for start, end in bounds]


def _state_name(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> str:
    """Returns a name that differs for engines that cannot use each other's bytes. It does not depend on the
    number of ranks. It also avoids vLLM's architecture object, which differs between a worker in the engine's
    process and one in its own."""
    fields = _fields(vllm_config, kv_cache_config, settings)
    for name in ("architecture", "groups", "hash", "ranks", "unit"):
        del fields[name]
    text = json.dumps([settings.model or vllm_config.model_config.model, fields], sort_keys=True)
    return f"kv {hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _layout(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Layout:
    """The names of the model's blocks."""
    unit_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    shards = _shards(vllm_config, kv_cache_config)
    return Layout(
        prefix=layout_prefix(
            settings.model or vllm_config.model_config.model,
            _fields(vllm_config, kv_cache_config, settings),
        ),
        ranks=tuple(
            rank_name(shard, stage)
            for stage in range(vllm_config.parallel_config.pipeline_parallel_size)
            for shard in range(shards)
        ),
        groups=tuple(
            Group(number, kv_cache_config.kv_cache_groups[number].kv_cache_spec.block_size)
            for number in kv_cache_config.prefix_cacheable_group_ids
        ),
        unit_tokens=unit_tokens,
        hash_tokens=hash_tokens,
    )


def _shards(vllm_config: Any, kv_cache_config: Any) -> int:
    """The number of tensor parallel ranks with different blocks."""
    return int(vllm_config.parallel_config.tensor_parallel_size // kv_cache_config.kv_tp_replicas)


def _fields(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> dict[str, str]:
    """The fields on which a block's bytes depend, besides the model's name and the tokens."""
    unit_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    parallel = vllm_config.parallel_config
    groups = {
        number: kv_cache_config.kv_cache_groups[number] for number in kv_cache_config.prefix_cacheable_group_ids
    }
    kinds = {
        number: (
            type(group.kv_cache_spec).__name__,
            group.kv_cache_spec.block_size,
            sorted({one.page_size_bytes for one in iter_layer_specs(group.kv_cache_spec)}),
            # A draft model adds its layers to the model's groups.
            len(group.layer_names),
        )
        for number, group in groups.items()
    }
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    shards = _shards(vllm_config, kv_cache_config)
    return {
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
        **_skipped_layers(cache),
        **_draft(vllm_config),
    }


def _skipped_layers(cache: Any) -> dict[str, str]:
    """The layers that keep the model's element type beside a cache of another type; empty without any."""
    skipped = sorted(set(cache.kv_cache_dtype_skip_layers))
    return {"cache dtype skip layers": json.dumps(skipped)} if skipped else {}


def _draft(vllm_config: Any) -> dict[str, str]:
    """The draft model, whose layers are also in the blocks; empty without one."""
    drafts, model = vllm_config.speculative_config, vllm_config.model_config
    if drafts is None or drafts.method in _DRAFTS_WITHOUT_LAYERS:
        return {}
    # If the model itself has the draft layers, the setting `model` replaces its path.
    own = drafts.model in (model.model, getattr(model, "model_weights", None))
    return {
        "draft method": str(drafts.method),
        "draft model": "" if own else str(drafts.model),
        "draft revision": str(drafts.revision),
        "draft dtype": str(getattr(drafts.draft_model_config, "dtype", None)),
        # A draft model without its own type has the cache's type, which is another field.
        "draft cache dtype": str(drafts.kv_cache_dtype),
    }


def _architecture(model: Any) -> str:
    """The model's configuration, without its path and the version that wrote the file."""
    config = dict(model.hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return json.dumps(config, sort_keys=True, default=str)


def _device(kind: str) -> str:
    """The property of the device on which the cached bytes depend. On a CPU, vLLM packs them for the CPU's
    matrix instructions."""
    if kind != "cpu":
        return kind
    asked = ("_is_amx_tile_supported", "_is_avx512_supported")
    able = [name for name in asked if getattr(torch.cpu, name, bool)()]
    return " ".join([kind, platform.machine(), *able])


__all__ = ["KvpoolConnector", "KvpoolMetadata"]
