"""A stand-in for the settings that SGLang's processes see."""

from __future__ import annotations

import types
from typing import Any

DRAFT_MODEL = ("draft_model_path", "draft_model_revision", "draft_model_quantization")


class Context:
    """Stands for SGLang's settings as its processes see them."""

    def __init__(self) -> None:
        self.bags: dict[str, Any] = {}

    def is_config_namespace_published(self, name: str) -> bool:
        return name in self.bags

    def config_bag(self, name: str) -> Any:
        return self.bags[name]

    def publish(self, kv_cache_dtype: str = "auto", draft: str | None = None, **spec: Any) -> None:
        """`spec` has the settings of speculative decoding, without their prefix."""
        chosen = {"algorithm": None, "draft_kv_cache_dtype": draft, **dict.fromkeys(DRAFT_MODEL), **spec}
        self.bags["model"] = types.SimpleNamespace(kv_cache_dtype=kv_cache_dtype, model_path="/models/tiny")
        self.bags["spec"] = types.SimpleNamespace(
            **{f"speculative_{name}": value for name, value in chosen.items()}, uno_lora_path=None
        )
