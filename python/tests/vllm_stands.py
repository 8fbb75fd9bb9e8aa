"""Stand-ins of the parts of vLLM and torch that the import of `kvpool.vllm.connector` needs."""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from typing import Any


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """Stands for vLLM's base class of connectors."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config

    def reset_cache(self) -> bool | None:
        return None


def _kind(name: str) -> type[Any]:
    return type(name, (), {})


_V1 = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CONTENT: dict[str, dict[str, Any]] = {
    "torch": {"cpu": types.SimpleNamespace(), "Tensor": _kind("Tensor")},
    "vllm": {"__version__": "0.32.0"},
    "vllm.distributed": {"get_pp_group": None, "get_tensor_model_parallel_rank": None},
    _V1: {
        "KVConnectorBase_V1": Base,
        "KVConnectorRole": Role,
        **{
            name: _kind(name)
            for name in (
                "KVConnectorHandshakeMetadata",
                "KVConnectorMetadata",
                "KVConnectorTransferResults",
                "SupportsHMA",
            )
        },
    },
    "vllm.distributed.utils": {"get_pp_indices": None},
    "vllm.model_executor.models.utils": {"extract_layer_index": None},
    "vllm.v1.core.kv_cache_utils": {"resolve_kv_cache_block_sizes": lambda _cache, _config: (16, 16)},
    "vllm.v1.kv_cache_interface": {
        "CrossAttentionSpec": _kind("CrossAttentionSpec"),
        "MambaSpec": _kind("MambaSpec"),
        "is_full_attention_spec": lambda _spec: True,
        "iter_layer_specs": lambda spec: [spec],
    },
    "vllm.v1.request": {"RequestStatus": None},
}


def modules() -> dict[str, types.ModuleType]:
    """The stand-ins by their names."""
    made = {}
    for name, content in _CONTENT.items():
        made[name] = types.ModuleType(name)
        made[name].__dict__.update(content)
    return made


def configuration(**fields: Any) -> Any:
    """vLLM's configuration of an engine with one rank. `fields` replace its parts."""
    hf_config = types.SimpleNamespace(to_dict=lambda: {"hidden_size": 64, "_name_or_path": "/models/tiny"})
    parts: dict[str, Any] = {
        "kv_transfer_config": types.SimpleNamespace(
            kv_connector_extra_config={}, is_kv_consumer=True, is_kv_producer=True
        ),
        "parallel_config": types.SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        "model_config": types.SimpleNamespace(
            model="tiny", revision=None, dtype="torch.bfloat16", quantization=None, hf_config=hf_config
        ),
        "cache_config": cached(),
        "attention_config": types.SimpleNamespace(backend="FLASH_ATTN"),
        "device_config": types.SimpleNamespace(device_type="cuda"),
        "speculative_config": None,
    }
    return types.SimpleNamespace(**{**parts, **fields})


def cached(dtype: str = "auto", skip_layers: Sequence[str] = ()) -> Any:
    """vLLM's settings of the cache."""
    return types.SimpleNamespace(
        cache_dtype=dtype, kv_cache_dtype_skip_layers=list(skip_layers), prefix_caching_hash_algo="sha256"
    )


def cache(layers: int = 4) -> Any:
    """The layout of a KV cache with one group of `layers` layers."""
    spec = types.SimpleNamespace(block_size=16, page_size_bytes=4096)
    names = [f"model.layers.{at}.self_attn.attn" for at in range(layers)]
    group = types.SimpleNamespace(kv_cache_spec=spec, layer_names=names, host_resident=False)
    return types.SimpleNamespace(
        prefix_cacheable_group_ids=[0], kv_cache_groups=[group], kv_tp_replicas=1, kv_cache_layout="NHD"
    )
