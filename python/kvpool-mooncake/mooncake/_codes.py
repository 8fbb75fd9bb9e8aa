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
