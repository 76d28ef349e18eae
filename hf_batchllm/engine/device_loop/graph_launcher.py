"""What launchers that use graphs have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...model.batch import ModelBatch
from ...planning.requests_and_prefixes import Request
from .graph_sizes import WORTHWHILE_STEPS
from .steps_as_graphs import StepsAsGraphs
from .still_running import StillRunning


class GraphLauncher(StepsAsGraphs, ABC):
    """A ``Launcher`` whose steps run in that way."""

    _still_running: StillRunning | None = None  # of the requests that `start` was given last
    _all_have_begun = False  # since `start`: all prompts have been run once
    _end_of_latest: torch.cuda.Event | None = None  # the step that was launched last

    def start(self, requests: Sequence[Request], most_rows: int) -> None:
        super().start(requests, most_rows)
        self._all_have_begun = False
        if self.graphs is not None:
            self._still_running = StillRunning(requests, self.graphs.storage, most_rows)

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        with self.surroundings(runs_model=self.graphs is None or not self.graphs.only_replays(batch)):
            return self._launch(batch, sampling)

    @abstractmethod
    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
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
        # Before a capture that holds sums of all ranks, each rank must find its device at work.
        ranks = self.runner.architecture.ranks
        ahead = ranks.any("time for a capture", not self._is_behind())
        next_waits = of_prompts and not self._all_have_begun and running.all_have_begun and ranks.size == 1
        self._all_have_begun |= next_waits
        if (not ahead or next_waits) and (not only_largest or running.most_is_known()):
            left, may_stop = running.tokens_left()
            if not ahead:
                self.graphs.prepare(left, may_stop)
            elif max(left, default=0) > WORTHWHILE_STEPS:  # these are counted with the token of this step
                self.graphs.prepare(left, may_stop, only_next=True)

    def _is_behind(self) -> bool:
        """Whether the device is still at work on the step before this one: then the host has time."""
        if self._stream is None:
            return False
        before, self._end_of_latest = self._end_of_latest, torch.cuda.Event()
        self._end_of_latest.record()
        return before is not None and not before.query()

    def tokens_were_seen(self) -> None:
        """As ``Launcher`` has it."""

    @abstractmethod
    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        """As ``Launcher`` has it."""
