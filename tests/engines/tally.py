"""The checks and their results, printed as a table."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Tally:
    """The checks of one run."""

    rows: list[tuple[str, str, str, str]] = dataclasses.field(default_factory=list)

    def check(self, part: str, what: str, seen: object, holds: bool) -> None:
        """Notes a check: its part, the rule, the observation, and whether the rule holds."""
        self._add(part, what, seen, "ok" if holds else "FAILED")

    def fact(self, part: str, what: str, seen: object) -> None:
        """Notes an observation, which neither passes nor fails."""
        self._add(part, what, seen, "fact")

    def _add(self, part: str, what: str, seen: object, verdict: str) -> None:
        self.rows.append((part, what, str(seen), verdict))
        print(f"--- {verdict}: {part}: {what}: {seen}", flush=True)

    def passed(self) -> bool:
        """Whether there were checks and all of them passed."""
        verdicts = [verdict for *_, verdict in self.rows]
        return "ok" in verdicts and "FAILED" not in verdicts

    def table(self) -> str:
        """Returns the table."""
        lines = [("part", "what", "seen", "")]
        lines += self.rows
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        padded = [[*(line[at].ljust(width) for at, width in enumerate(widths)), line[3]] for line in lines]
        return "\n".join("  ".join(line).rstrip() for line in padded)
