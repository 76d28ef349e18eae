"""What came of the cases of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PASSED, WRONG, RAISED, CRASHED, HUNG = "passed", "wrong", "raised an error", "crashed", "hung"
# These say nothing of the kernels: there was no room in memory, or something around them was not as it should be.
NO_ROOM, NOT_TRIED = "no room", "not tried"
UNKNOWN = (NO_ROOM, NOT_TRIED)


@dataclass(frozen=True)
class Outcome:
    case: str
    verdict: str
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.case}: {self.verdict}{f' ({self.detail})' if self.detail else ''}"

    @classmethod
    def of(cls, line: dict[str, Any]) -> Outcome:
        return cls(str(line["case"]), str(line["verdict"]), str(line["detail"]), float(line.get("seconds", 0.0)))


def first_failure(outcomes: list[Outcome]) -> Outcome | None:
    """What a kernel failed at, if one did; else what kept a case from being tried."""
    failures = [each for each in outcomes if each.verdict != PASSED]
    return min(failures, key=lambda each: each.verdict in UNKNOWN, default=None)
