"""Steps on a stream of the call, decode steps as graphs, and what the report says of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...model.batch import ModelBatch
from ...model.runner import ModelRunner
from ...planning.requests_and_prefixes import Request
from ...planning.step import Step
from ...wording import shown_size
from ..loop import Launcher
from .decode_graphs import DecodeGraphs
from .graph_sizes import WORTHWHILE_STEPS
from .seats import Seats
from .still_running import StillRunning


class StepsAsGraphs:
    """Runs the steps of a call; decode steps are replays of graphs, where the model allows it.

    custom_code: whether code of the model's user is called between all steps, which may do anything to the model.
    runs_model: whether the model may be run between them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        seats: Seats,
        graphs: DecodeGraphs | None,
        device: torch.device,
        custom_code: bool = False,
        runs_model: bool = False,
    ) -> None:
        self.runner = runner
        self.seats = seats
        self.graphs = graphs
        self.device = device
        self._custom_code = custom_code
        self._runs_model = custom_code or runs_model
        # All steps go to one stream, also if the caller's stream changes between two results: a row that runs past its
        # end writes only to pages that it held at launch, earlier on this stream than their next user's first step.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def start(self, requests: Sequence[Request], most_rows: int) -> None:
        """The call begins, or the turn of the next adapter, with these requests; a step has at most ``most_rows``."""
        if self.graphs is not None:
            self.graphs.user_had_control()  # its adapter has changed

    @property
    def most_times(self) -> int:
        return self.graphs.most_times if self.graphs is not None and self.graphs.does_all else 1

    @contextmanager
    def surroundings(self, runs_model: bool = True) -> Iterator[None]:
        """Where a step runs. ``runs_model``: False if it is a replay and nothing else, to save the host's time."""
        if self.graphs is not None:
            self.graphs.replays, self.graphs.is_steady = False, True
        with torch.cuda.stream(self._stream), self.runner.surroundings() if runs_model else nullcontext():
            yield

    def logits(self, batch: ModelBatch) -> torch.Tensor:  # [samples, vocabulary]
        """Run a step whose tokens are picked outside of graphs. The logits are valid until the next one runs."""
        if self.graphs is not None and batch.burst is not None:
            produced = self.graphs.run(batch, int(batch.burst.left.max()))
            if produced is not None:
                assert produced.logits is not None
                return produced.logits
        return self.runner.step(batch, self.seats)

    @contextmanager
    def users_turn(self) -> Iterator[None]:
        """While processors or criteria are called, which may run the model."""
        if not self._runs_model:
            yield
            return
        try:
            with self.runner.control.users_turn():
                yield
        finally:
            if self._custom_code:
                self.user_had_control()

    def user_had_control(self) -> None:
        """Code of the user's has run: it may have put other memory below the model's weights."""
        if self.graphs is not None:
            self.graphs.user_had_control()

    def put_back(self, step: Step) -> None:
        with torch.cuda.stream(self._stream), self.runner.surroundings():  # which are those of the stream
            if self.graphs is not None:
                self.graphs.close(self._stream)  # they hold memory that no other step can use; new ones can be captured
            self.runner.restore()
            self._put_back([request for request in step.sampling() if not request.done])

    def _put_back(self, going: Sequence[Request]) -> None:
        """Forget what a step that failed has left of these requests."""

    @property
    def replays(self) -> bool:
        return self.graphs is not None and self.graphs.replays

    @property
    def is_steady(self) -> bool:
        """Whether the latest step took as long as others will: see ``Launcher``."""
        return self.graphs is None or self.graphs.is_steady

    @property
    def capture_seconds(self) -> float:
        return 0.0 if self.graphs is None else self.graphs.seconds

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
        if self.graphs is not None:
            self.graphs.close(self._stream)


class GraphLauncher(StepsAsGraphs, Launcher):
    """A ``Launcher`` whose steps run in that way."""

    _still_running: StillRunning | None = None  # of the requests that `start` was given last
    _all_have_begun = False  # since `start`: all prompts have been run once
    _end_of_latest: torch.cuda.Event | None = None  # the step that was launched last

    def start(self, requests: Sequence[Request], most_rows: int) -> None:
        super().start(requests, most_rows)
        self._all_have_begun = False
        if self.graphs is not None:
            self._still_running = StillRunning(requests, self.graphs.storage, most_rows)

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], Any]:
        with self.surroundings(runs_model=self.graphs is None or not self.graphs.only_replays(batch)):
            return self._launch(batch, sampling)

    @abstractmethod
    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], Any]:
        """Launch the step on the stream."""

    def prepare_graphs(self, sampling: Sequence[Request], only_largest: bool = False, of_prompts: bool = False) -> None:
        """A step with these requests has been launched: capture a graph while the device is at work on earlier ones.

        only_largest: none before it is known how many rows there will be at most. of_prompts: whether that step has
        some. After the last of them the next step waits for its graph in any case, so that one is captured at once.
        """
        running = self._still_running
        if self.graphs is None or running is None or not self.graphs.prepares:
            return
        running.begin(sampling)
        ahead = not self._is_behind()
        next_waits = of_prompts and not self._all_have_begun and running.all_have_begun
        self._all_have_begun |= next_waits
        if (not ahead or next_waits) and (not only_largest or running.most_is_known()):
            left, may_stop = running.tokens_left()
            if not ahead:
                self.graphs.prepare(left, may_stop, False)
            elif max(left, default=0) > WORTHWHILE_STEPS:  # these are counted with the token of this step
                self.graphs.prepare(left, may_stop, True)

    def _is_behind(self) -> bool:
        """Whether the device is still at work on the step before this one: then the host has time."""
        if self._stream is None:
            return False
        before, self._end_of_latest = self._end_of_latest, torch.cuda.Event()
        self._end_of_latest.record()
        return before is not None and not before.query()
