"""What was checked and what came of it, printed as a table."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Tally:
    """The checks of one run."""

    rows: list[tuple[str, str, str, bool]] = dataclasses.field(default_factory=list)

    def check(self, part: str, what: str, seen: object, holds: bool) -> None:
        """Notes a check: which part it is of, what should hold, what was seen, whether it holds."""
        self.rows.append((part, what, str(seen), holds))
        print(f"--- {'ok' if holds else 'FAILED'}: {part}: {what}: {seen}", flush=True)

    def passed(self) -> bool:
        """Whether there were checks and all of them hold."""
        return bool(self.rows) and all(holds for *_, holds in self.rows)

    def table(self) -> str:
        """The table."""
        lines = [("part", "what", "seen", "")]
        lines += [(part, what, seen, "ok" if holds else "FAILED") for part, what, seen, holds in self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        padded = [[*(line[at].ljust(width) for at, width in enumerate(widths)), line[3]] for line in lines]
        return "\n".join("  ".join(line).rstrip() for line in padded)
