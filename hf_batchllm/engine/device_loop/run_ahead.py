"""Running ahead: tokens are picked on the device and stay there, while copies of them come back later.

The device keeps the last token of each request, each at its own seat, so that a request's next step can be launched
before anyone on the host has seen what it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...model.batch import ModelBatch
from ...model.runner import ModelRunner, current_device
from ...model.transfers import start_copy_to_host
from ...planning.units import Request
from ...wording import shown_size
from .decode_graphs import DecodeGraphs
from .decode_rows import Pick, Seats
from .still_running import StillRunning


class RunAhead:
    def __init__(
        self, runner: ModelRunner, pick: Pick, seats: Seats, graphs: DecodeGraphs | None, device: torch.device
    ) -> None:
        self.runner = runner
        self.pick = pick
        self.seats = seats
        self.graphs = graphs
        self.device = device
        # All steps go to one stream, whatever is the caller's between two results: a page's next owner writes to it
        # after whoever was found to have ended.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._outside: torch.cuda.Stream | None = None  # during a step, the caller's
        self._unended: StillRunning | None = None  # of the requests of this turn
        self._latest: torch.cuda.Event | None = None  # when the step that was launched last is over

    def start(self, requests: Sequence[Request], most_rows: int) -> None:
        """All requests begin, or those of one adapter; no more than ``most_rows`` of them run in a step."""
        if self.graphs is not None:
            self._unended = StillRunning(requests, self.graphs.storage, most_rows)
            self.graphs.look_again = True  # what they have captured may be another adapter's

    @property
    def most_times(self) -> int:
        return self.graphs.most_times if self.graphs is not None and self.runner.backend.does_all else 1

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        if self._stream is not None:
            self._outside = torch.cuda.current_stream()
        with current_device(self.device), torch.cuda.stream(self._stream):
            wait = self._launch(batch, sampling)
            if self.graphs is not None and self._unended is not None and self.graphs.prepares:
                self._unended.begin(sampling)
                if self._is_behind():
                    self.graphs.prepare(*self._unended.left())
        self._outside = None
        return wait

    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        burst = batch.burst
        if self.graphs is not None and burst is not None:
            produced = self.graphs.run(batch, int(burst.left.max()))
            if produced is not None:
                landed = start_copy_to_host(produced)
                places = batch.tokens.made.numpy()[:, None] + np.arange(burst.times)  # [rows, times]
                return lambda: np.take_along_axis(landed(), places % produced.shape[1], axis=1)
        batch = batch.to(self.device)
        tokens = batch.tokens
        rows = len(tokens.row_seats)
        if rows:
            tokens.input_ids[:rows] = self.seats.last[tokens.row_seats]
        logits = self.runner.step(batch)
        if not sampling:
            return lambda: np.empty((0, 1), dtype=np.int64)
        picked = self.pick(logits, tokens.sample_seats, tokens.made)
        self.seats.take(tokens.sample_seats, picked)
        return start_copy_to_host(picked[:, None])

    def _is_behind(self) -> bool:
        """Whether the device was still at work on the step before this one: then the host has time."""
        if self._stream is None:
            return False
        before, self._latest = self._latest, torch.cuda.Event()
        self._latest.record()
        return before is not None and not before.query()

    def back(self) -> None:
        if self.graphs is not None:
            self.graphs.look_again = True

    @property
    def summary(self) -> str:
        """For the report; empty where there are no graphs."""
        graphs = self.graphs
        if graphs is None or not graphs.captured:
            return ""
        count = f"{graphs.captured} graph{'s' if graphs.captured > 1 else ''}"
        taken = f"{1000 * graphs.seconds:,.0f} ms and {shown_size(graphs.bytes)}"
        beside = f" ({1000 * graphs.seconds_beside:,.0f} ms while other steps ran)" if graphs.seconds_beside else ""
        why = f"; no more while other steps run ({graphs.not_prepared.splitlines()[0]})" if graphs.not_prepared else ""
        return f"{graphs.steps:,} steps replayed from {count}, which took {taken} to capture{beside}{why}"

    def close(self) -> None:
        if self._outside is not None:  # an interrupt came while a step put things back
            torch.cuda.set_stream(self._outside)
            self._outside = None
        if self.graphs is not None:
            self.graphs.close(self._stream)
