"""Steps whose tokens the host picks: the model runs as a graph, and the host waits for the logits of each step.

While the device runs a step, the host does all that does not need its tokens: it takes down those of the step before,
schedules the next one, builds it, and gets processors and masks ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ...model.batch import ModelBatch
from ...model.runner import ModelRunner
from ...planning.requests_and_prefixes import Request
from ..timekeeper import Timekeeper
from .decode_graphs import DecodeGraphs
from .graph_launcher import GraphLauncher
from .seats import Seats

_PARTS = 4  # in which tokens are picked where memory did not suffice for all at once
_NONE = -1  # in the place of a token: the row had ended before


@dataclass(eq=False)
class _Launched:
    """A step whose tokens have been picked, or will be before the next one runs."""

    sampling: Sequence[Request]
    logits: torch.Tensor | None  # [samples, vocabulary]  None once its tokens have been picked
    going: list[Request] | None = None  # those that had not ended when picking was prepared
    tokens: np.ndarray | None = None  # [samples] int64
    failed: Exception | None = None  # the error of the first attempt to pick


class StepByStep(GraphLauncher):
    """``sampler``: picks the tokens of some requests from their logits, in float32.

    prepare: gets it ready for these requests, while the device runs.

    owners_code: whether picking calls code of the model's owner, which may do anything to the model.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Callable[[torch.Tensor, Sequence[Request]], list[int]],
        prepare: Callable[[Sequence[Request], torch.device], None],
        may_pick_again: Callable[[Sequence[Request]], bool],
        seats: Seats,
        graphs: DecodeGraphs | None,
        device: torch.device,
        timekeeper: Timekeeper,
        owners_code: bool,
    ) -> None:
        super().__init__(runner, seats, graphs, device)
        self.sampler = sampler
        self.prepare = prepare
        self.may_pick_again = may_pick_again
        self.timekeeper = timekeeper
        self.owners_code = owners_code
        if owners_code and graphs is not None:
            graphs.check_later()
        self._latest: _Launched | None = None  # the step that was launched last

    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        before = self._latest
        if before is not None:
            self._pick(before)
            self._fill_in(batch, sampling, before)
            self.timekeeper.switch(self.timekeeper.launching)
        launched = self._latest = _Launched(sampling, self.logits(batch))
        if not any(request.pending for request in sampling):  # otherwise tokens before those have yet to be seen
            self._prepare(launched)
        return lambda: self._tokens_of(launched)

    def tokens_were_seen(self) -> None:
        if self._latest is not None and self._latest.tokens is None:
            with self.surroundings():
                self._prepare(self._latest)

    def _prepare(self, launched: _Launched) -> None:
        launched.going = [request for request in launched.sampling if not request.done]
        if launched.going:
            with self._owners_turn():
                self.prepare(launched.going, self.device)

    def _tokens_of(self, launched: _Launched) -> np.ndarray:  # [samples, 1]
        if launched.tokens is None:
            with self.surroundings():
                self._pick(launched)
        assert launched.tokens is not None
        return launched.tokens[:, None]

    def _pick(self, launched: _Launched) -> None:
        """Pick the step's tokens, once. The tokens before them must have been seen."""
        if launched.tokens is not None:
            return
        if launched.failed is not None and not self.may_pick_again(launched.sampling):
            raise launched.failed
        logits, sampling = launched.logits, launched.sampling
        assert logits is not None
        rows = [row for row, request in enumerate(sampling) if not request.done]
        going = launched.going
        if going is None or len(going) != len(rows):
            going = [sampling[row] for row in rows]
        tokens = np.full(len(sampling), _NONE, dtype=np.int64)
        if rows:
            self.timekeeper.switch("tokens")
            some = logits if len(rows) == len(sampling) else logits[rows]
            at_once = len(rows) if launched.failed is None else max(1, len(rows) // _PARTS)
            try:
                with self._owners_turn():
                    tokens[rows] = self._picked(some, going, at_once)
            except Exception as error:
                launched.failed = error
                raise
        launched.tokens, launched.logits = tokens, None

    def _picked(self, logits: torch.Tensor, going: list[Request], at_once: int) -> list[int]:
        if len(going) <= at_once:
            return self.sampler(self.runner.in_float32(logits), going)
        tokens: list[int] = []
        for begin in range(0, len(going), at_once):
            part = slice(begin, begin + at_once)
            tokens += self.sampler(self.runner.in_float32(logits[part]), going[part])
        return tokens

    @staticmethod
    def _fill_in(batch: ModelBatch, sampling: Sequence[Request], before: _Launched) -> None:
        """Give rows the tokens that were picked after the batch was built."""
        assert before.tokens is not None
        picked = dict(zip(before.sampling, before.tokens.tolist(), strict=True))
        ids = batch.tokens.input_ids.numpy()
        for row, request in enumerate(sampling[: batch.attention.rows]):
            if request.pending:
                ids[row] = picked[request]

    @contextmanager
    def _owners_turn(self) -> Iterator[None]:
        """While code of the owner's may run."""
        if self.owners_code:
            self.owner_gets_control()
        try:
            with self.runner.adapted():
                yield
        finally:
            if self.owners_code:
                self.owner_had_control()

    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        return True  # a step fails before any of its tokens are picked
