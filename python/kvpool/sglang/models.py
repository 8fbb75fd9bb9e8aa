"""The settings that make the caches of two engines differ, as SGLang received them at its start."""

from __future__ import annotations

from typing import Any

try:
    from sglang.srt.runtime_context import get_context  # type: ignore[import-not-found]
except ImportError:
    # Earlier versions of SGLang lack this module.
    get_context = None

_DRAFTS_WITHOUT_MODEL = ("NGRAM", "NONE")
"""Algorithms that draft from the text alone. Engines with and without them have equal pages."""


def cache_types() -> list[str]:
    """The element types of the caches of the model and of its draft model, as SGLang's settings name them.

    Host memory does not show these types: it holds every 8-bit type as plain bytes.
    """
    if get_context is None:
        return []
    said = (("model", "kv_cache_dtype"), ("spec", "speculative_draft_kv_cache_dtype"))
    return [str(setting(bag, field, "")) for bag, field in said]


def draft() -> list[str]:
    """The draft model, whose layers SGLang can pack into the model's pages; an empty list without one."""
    algorithm = setting("spec", "speculative_algorithm")
    if algorithm is None or str(algorithm).upper() in _DRAFTS_WITHOUT_MODEL:
        return []
    path = setting("spec", "speculative_draft_model_path")
    # A model with its own draft layers may have another path on each host.
    if path is not None and path == setting("model", "model_path"):
        path = ""
    fields = (
        "speculative_draft_model_revision",
        "speculative_draft_model_quantization",
        "uno_lora_path",
    )
    return ["draft", str(algorithm), str(path), *(str(setting("spec", field)) for field in fields)]


def setting(bag: str, field: str, otherwise: Any = None) -> Any:
    """Returns a setting of SGLang. Host memory that a test makes without an engine has no settings."""
    if get_context is None:
        return otherwise
    context = get_context()
    is_there = context.is_config_namespace_published(bag)
    return getattr(context.config_bag(bag), field, otherwise) if is_there else otherwise
