"""Running ahead: tokens are picked on the device and stay there, and copies of them reach the host later.

The device keeps each request's last token at the request's seat. So the next step can be launched before the host has
seen the tokens that it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...model.batch import ModelBatch, sent
from ...model.draft_rows import DraftRows
from ...model.runner import ModelRunner
from ...model.transfers import start_copy_to_host
from ...planning.requests_and_prefixes import Request
from ...sampling.device_logprobs import NotedRows
from ...sampling.seated_sampler import SeatedSampler
from ..call_outputs import LogProbNotes
from .decode_graphs import DecodeGraphs
from .seats import Seats
from .steps_as_graphs import GraphLauncher

_ALL = slice(None)


class RunAhead(GraphLauncher):
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
        super().__init__(runner, seats, graphs, device)
        self.pick = pick
        self.notes = notes
        self._behind: set[Request] = set()  # their seats have an earlier token, since they ran with drafts

    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        if batch.draft_rows is not None:
            return self._run_drafts(batch, batch.draft_rows, sampling)
        if self._behind and (behind := [request for request in sampling if request in self._behind]):
            self.seats.put(behind)
            self._behind.difference_update(behind)
        wait = self._run(batch, sampling)
        self.prepare_graphs(sampling, of_prompts=batch.burst is None)
        return wait

    def _run(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        burst = batch.burst
        if self.graphs is not None and burst is not None:
            produced = self.graphs.run(batch, int(burst.left.max()))
            if produced is not None:
                places = batch.tokens.made.numpy()[:, None] + np.arange(burst.times)  # [rows, times]
                return self._copied(sampling, produced.tokens, produced.noted, places % produced.tokens.shape[1])
        tokens = batch.tokens
        logits = self.runner.step(batch, self.seats)
        if not sampling:
            return lambda: np.empty((0, 1), dtype=np.int64)
        picked = self._picked(logits, batch)
        self.seats.store(tokens.sample_seats, picked)
        noted = None
        if self.notes is not None:
            noted = self.notes.on_device.room(len(picked))
            self.notes.on_device.note(noted, logits, picked)
        return self._copied(sampling, picked[:, None], noted)

    def _run_drafts(self, batch: ModelBatch, rows: DraftRows, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        """The host has seen all tokens so far. What comes back gives those that count, [samples, most]."""
        self._behind.update(sampling)
        produced = None
        if self.graphs is not None and batch.burst is not None:
            produced = self.graphs.run(batch, int(batch.burst.left.max()))
        if produced is not None:
            places = batch.tokens.made.numpy()[:, None] % produced.tokens.shape[1]
            seen = self._seen(produced.tokens, produced.noted, places, rows.places)
        else:
            logits = self.runner.step(batch)
            picked = self._picked(logits, batch)
            noted = None
            if self.notes is not None:
                noted = self.notes.on_device.room(len(picked))
                self.notes.on_device.note(noted, logits, picked)
            seen = self._seen(picked[:, None], noted, None)

        def wait() -> np.ndarray:
            drawn, of_notes = seen()
            found = rows.that_count(drawn[:, 0])
            if of_notes is not None and self.notes is not None:
                self.notes.put(sampling, found, *(each[:, 0][rows.row] for each in of_notes))
            return found

        return wait

    def _picked(self, logits: torch.Tensor, batch: ModelBatch) -> torch.Tensor:  # [samples] int64
        tokens, device = batch.tokens, self.seats.last.device
        return self.pick(logits, sent(tokens.sample_seats, device), sent(tokens.made, device))

    def _copied(
        self,
        sampling: Sequence[Request],
        tokens: torch.Tensor,
        noted: NotedRows | None,
        places: np.ndarray | None = None,
    ) -> Callable[[], np.ndarray]:
        """Start copies to the host. What comes back gives the tokens, and takes down what was noted beside them."""
        seen = self._seen(tokens, noted, places)

        def wait() -> np.ndarray:
            found, of_notes = seen()
            if of_notes is not None and self.notes is not None:
                self.notes.put(sampling, found, *of_notes)
            return found

        return wait

    @staticmethod
    def _seen(
        tokens: torch.Tensor,
        noted: NotedRows | None,
        places: np.ndarray | None,
        rows: np.ndarray | slice = _ALL,
    ) -> Callable[[], tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]]:
        """Start copies to the host. What comes back gives them: the tokens, and the ids and values of notes.

        rows: those that are asked for. places: [rows, times], where a row's tokens and notes stand in it; None: in
        their order.
        """
        copied = start_copy_to_host(tokens)
        copied_notes = None if noted is None else noted.copied()

        def seen() -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
            found = copied()[rows]
            if places is not None:
                found = np.take_along_axis(found, places, axis=1)
            if copied_notes is None:
                return found, None
            ids, values = (each[rows] for each in copied_notes())
            if places is not None:
                ids, values = (np.take_along_axis(each, places[:, :, None], axis=1) for each in (ids, values))
            return found, (ids, values)

        return seen

    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        return True

    def _put_back(self, going: Sequence[Request]) -> None:
        self.seats.put(going)
        self._behind.difference_update(going)
        self.pick.put_back(going)
