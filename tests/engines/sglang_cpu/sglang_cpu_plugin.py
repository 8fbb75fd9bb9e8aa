"""A plugin for SGLang on a machine without a GPU."""

from __future__ import annotations


def load() -> None:
    """Keeps the indices of a prompt's pages out of pinned memory, and avoids CUDA's events for them."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False
