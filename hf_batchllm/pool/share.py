"""What one process has of a call that several run, and what it has done of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..results.run_report import RunReport


@dataclass
class Share:
    """What a worker of a pool, or a rank, has to do and has done."""

    name: str  # of what it runs on, in the report
    pieces: set[int] = field(default_factory=set)  # that it runs, or is given once it is free
    begun: set[int] = field(default_factory=set)  # in the part that runs
    ran: set[int] = field(default_factory=set)  # of which it has delivered results
    out: str = ""  # why it has no part in this call any more
    began: float | None = None  # when it was given the part that runs
    seconds: float = 0.0  # at work, in parts that are over
    running_seconds: float = 0.0  # of these, by the worker's own clock
    read: int = 0  # tokens of prompts
    written: int = 0  # and of answers
    told: int = 0  # of those read, in parts of which there is a report
    reports: list[RunReport] = field(default_factory=list)

    def end_part(self, report: RunReport | None = None, running_seconds: float | None = None) -> None:
        """The part that runs, if one does. ``running_seconds``: as the worker says; None if it says nothing more."""
        if self.began is None:
            return
        passed = time.perf_counter() - self.began
        self.seconds += passed
        self.running_seconds += passed if running_seconds is None else running_seconds
        if report is not None:
            self.reports.append(report)
            self.told = self.read
        self.began = None
