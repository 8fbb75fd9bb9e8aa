"""The options of every vLLM engine of these tests."""

from __future__ import annotations

from typing import Any


def of_engine(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM`: the settings' `model`, `connector` and `engine`, and the needs of a
    small CPU."""
    return {
        "model": settings["model"],
        "kv_transfer_config": settings.get("connector"),
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
        **(settings.get("engine") or {}),
    }
