"""The numeric codes of outcomes."""

from __future__ import annotations

from typing import Final

OK: Final = 0
INTERNAL: Final = -1
NO_SEGMENT: Final = -101
PARAMETERS: Final = -600
NOT_FOUND: Final = -704
LEASED: Final = -706
TRANSFER: Final = -800
NO_TASK: Final = -1400


def meaning(code: int) -> str:
    """The meaning of a code, for a failure without a known reason."""
    if code == PARAMETERS:
        return "a key, an address, a length or a range is invalid, or lists differ in length"
    return "the table of codes in docs/operations/mooncake.md says what it means"
