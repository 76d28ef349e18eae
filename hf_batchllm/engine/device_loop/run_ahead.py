"""Running ahead: tokens are picked on the device and stay there, and copies of them reach the host later.

The device keeps each request's last token at the request's seat. So the next step can be launched before the host has
seen the tokens that it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...model.batch import ModelBatch
from ...model.runner import ModelRunner
from ...model.transfers import start_copy_to_host
from ...planning.requests_and_prefixes import Request
from ...planning.step import Step
from ...sampling.device_logprobs import NotedRows
from ...sampling.seated_sampler import SeatedSampler
from ...wording import shown_size
from ..call_outputs import LogProbNotes
from .decode_graphs import DecodeGraphs
from .seats import Seats
from .still_running import StillRunning


class RunAhead:
    """A ``Launcher`` whose steps go to the device without waiting for the tokens of earlier ones."""

    def __init__(
        self,
        runner: ModelRunner,
        pick: SeatedSampler,
        seats: Seats,
        graphs: DecodeGraphs | None,
        device: torch.device,
        notes: LogProbNotes | None = None,
    ) -> None:
        self.notes = notes
        self.runner = runner
        self.pick = pick
        self.seats = seats
        self.graphs = graphs
        self.device = device
        # All steps go to one stream, also if the caller's stream changes between two results: a row that runs past its
        # end writes only to pages that it held at launch, earlier on this stream than their next owner's first step.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._outside: torch.cuda.Stream | None = None  # the caller's stream, during a step
        self._still_running: StillRunning | None = None  # of the requests that `start` was given last
        self._latest: torch.cuda.Event | None = None  # the end of the step that was launched last

    def start(self, requests: Sequence[Request], most_rows: int) -> None:
        """The call begins, or the turn of the next adapter, with these requests; a step has at most ``most_rows``."""
        if self.graphs is not None:
            self._still_running = StillRunning(requests, self.graphs.storage, most_rows)
            self.graphs.model_may_have_changed = True  # its adapter has

    @property
    def most_times(self) -> int:
        return self.graphs.most_times if self.graphs is not None and self.graphs.does_all else 1

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        if self._stream is not None:
            self._outside = torch.cuda.current_stream()
        with self.runner.surroundings(), torch.cuda.stream(self._stream):
            wait = self._launch(batch, sampling)
            if self.graphs is not None and self._still_running is not None and self.graphs.prepares:
                self._still_running.begin(sampling)
                if self._is_behind():
                    self.graphs.prepare(*self._still_running.tokens_left())
        self._outside = None
        return wait

    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        burst = batch.burst
        if self.graphs is not None:
            self.graphs.replays = False
        if self.graphs is not None and burst is not None:
            produced = self.graphs.run(batch, int(burst.left.max()))
            if produced is not None:
                places = batch.tokens.made.numpy()[:, None] + np.arange(burst.times)  # [rows, times]
                return self._copied(sampling, produced.tokens, produced.noted, places % produced.tokens.shape[1])
        batch = batch.to(self.device)
        tokens = batch.tokens
        rows = len(tokens.row_seats)
        if rows:
            tokens.input_ids[:rows] = self.seats.last[tokens.row_seats]
        logits = self.runner.step(batch)
        if not sampling:
            return lambda: np.empty((0, 1), dtype=np.int64)
        picked = self.pick(logits, tokens.sample_seats, tokens.made)
        self.seats.store(tokens.sample_seats, picked)
        noted = None
        if self.notes is not None:
            noted = self.notes.on_device.room(len(picked))
            self.notes.on_device.note(noted, logits, picked)
        return self._copied(sampling, picked[:, None], noted)

    def _copied(
        self,
        sampling: Sequence[Request],
        tokens: torch.Tensor,
        noted: NotedRows | None,
        places: np.ndarray | None = None,
    ) -> Callable[[], np.ndarray]:
        """Start copies to the host. What comes back gives the tokens, and takes down what was noted beside them.

        places: [requests, times], where a request's tokens and notes stand in its row; None: in their order.
        """
        copied = start_copy_to_host(tokens)
        copied_notes = None if noted is None else noted.copied()

        def wait() -> np.ndarray:
            found = copied() if places is None else np.take_along_axis(copied(), places, axis=1)
            if copied_notes is not None and self.notes is not None:
                ids, values = copied_notes()
                if places is not None:
                    ids, values = (np.take_along_axis(each, places[:, :, None], axis=1) for each in (ids, values))
                self.notes.put(sampling, found, ids, values)
            return found

        return wait

    def _is_behind(self) -> bool:
        """Whether the device is still at work on the step before this one: then the host has time."""
        if self._stream is None:
            return False
        before, self._latest = self._latest, torch.cuda.Event()
        self._latest.record()
        return before is not None and not before.query()

    def owner_gets_control(self) -> None:
        if self.graphs is not None:
            self.graphs.owner_gets_control()

    def owner_had_control(self) -> None:
        if self.graphs is not None:
            self.graphs.owner_had_control()

    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        return True

    def put_back(self, step: Step) -> None:
        with self.runner.surroundings(), torch.cuda.stream(self._stream):
            if self.graphs is not None:
                self.graphs.close(self._stream)  # they hold memory that no other step can use; new ones can be captured
            self.runner.restore()
            going = [request for request in step.sampling() if not request.done]
            self.seats.put(going)
            self.pick.put_back(going)

    @property
    def replays(self) -> bool:
        return self.graphs is not None and self.graphs.replays

    @property
    def summary(self) -> str:
        """A sentence for the report; empty where there are no graphs."""
        graphs = self.graphs
        if graphs is None or not graphs.captured:
            return ""
        count = f"{graphs.captured} graph{'s' if graphs.captured > 1 else ''}"
        taken = f"{1000 * graphs.seconds:,.0f} ms and {shown_size(graphs.bytes)}"
        beside = f" ({1000 * graphs.seconds_beside:,.0f} ms while other steps ran)" if graphs.seconds_beside else ""
        reason = graphs.why_not_prepared
        why = f"; no more while other steps run ({reason.splitlines()[0]})" if reason else ""
        return f"{graphs.steps:,} steps replayed from {count}, which took {taken} to capture{beside}{why}"

    def close(self) -> None:
        if self._outside is not None:  # an interrupt came before `launch` put the stream back
            torch.cuda.set_stream(self._outside)
            self._outside = None
        if self.graphs is not None:
            self.graphs.close(self._stream)
