"""What one process has of a call that several run, and what it has done of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..results.run_report import RunReport

if TYPE_CHECKING:
    from .worker_handle import WorkerHandle


@dataclass
class Share:
    """Of a worker of a pool, or of a rank."""

    waiting: list[int] = field(default_factory=list)  # pieces that it is given once it is free
    pieces: set[int] = field(default_factory=set)  # that it was given, and has not ended
    ran: set[int] = field(default_factory=set)  # of which it has delivered results
    asked: WorkerHandle | None = None  # who it is to take work from
    out: str = ""  # why it has no part in this call any more
    began: float | None = None  # when it was given the part that runs
    seconds: float = 0.0  # at work, in parts that are over
    running_seconds: float = 0.0  # of these, by the worker's own clock
    read: int = 0  # tokens of parts that are over
    written: int = 0
    read_now: int = 0  # and of the one that runs
    written_now: int = 0
    untold: int = 0  # tokens read in parts of which there is no report
    reports: list[RunReport] = field(default_factory=list)

    def end_part(self, read: int, written: int) -> None:
        self.read, self.written = self.read + read, self.written + written
        self.read_now = self.written_now = 0
        if self.began is not None:
            self.seconds += time.perf_counter() - self.began
            self.began = None

    def break_off(self) -> None:
        """No report will come of the part that runs."""
        self.untold += self.read_now
        if self.began is not None:
            self.running_seconds += time.perf_counter() - self.began
        self.end_part(self.read_now, self.written_now)
