"""The entry point that SGLang loads in each of its processes: it adds the transfer back end `kvpool`.

Only the names below depend on how SGLang chooses a back end.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

_BACKEND = "kvpool"
_UTILS = "sglang.srt.disaggregation.utils"


def load() -> None:
    """Adds the back end to SGLang's choices, and its classes to SGLang's table."""
    from sglang.srt.arg_groups.choices import (  # type: ignore[import-not-found]
        DISAGG_TRANSFER_BACKEND_CHOICES,
        add_disagg_transfer_backend_choices,
    )
    from sglang.srt.disaggregation.utils import (  # type: ignore[import-not-found]
        TransferBackend,
    )
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found]
        HookRegistry,
        HookType,
    )

    if _BACKEND not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([_BACKEND])
    members = {member.name: member.value for member in TransferBackend}
    # The functional form is needed, because an enum with members cannot be extended.
    extended = enum.Enum(  # type: ignore[misc]
        TransferBackend.__name__, {**members, "KVPOOL": _BACKEND}, module=TransferBackend.__module__
    )
    HookRegistry.register(f"{_UTILS}.TransferBackend", extended, HookType.REPLACE)
    HookRegistry.register(f"{_UTILS}.get_kv_class", _class_of, HookType.AROUND)


def _class_of(original: Callable[[Any, Any], Any], backend: Any, kind: Any) -> Any:
    if backend.value != _BACKEND or kind.value == "kvargs":
        return original(backend, kind)
    from kvpool.sglang import handoff

    return handoff.CLASSES.get(kind.value)
