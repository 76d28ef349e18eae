"""``<output>.run.json``: how the results beside it were made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunRecord:
    settings: dict[str, Any]  # all that the results depend on: to go on, a run must have the same
    seed: int | None = None  # None: drawn when the run begins, the same when it goes on
    input: dict[str, Any] = field(default_factory=dict)  # path, records, bytes, digest
    version: str = ""
    created: str = ""
    process: dict[str, Any] = field(default_factory=dict)  # pid, host, since
    figures: dict[str, Any] = field(default_factory=dict)  # of the finished run
    finished: str | None = None

    def differences(self, now: RunRecord) -> list[str]:
        """``max_new_tokens was 50 and is 20`` for each."""
        raise NotImplementedError
