"""The launcher of a call whose tokens the host picks, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from ..model.batch import ModelBatch
from ..model.runner import ModelRunner
from ..planning.requests_and_prefixes import Request
from ..planning.step import Step
from .loop import Launcher
from .timekeeper import Timekeeper


class AtOnce(Launcher):
    """The host picks tokens, from logits that it waits for."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Callable[[torch.Tensor, Sequence[Request]], list[int]],
        timekeeper: Timekeeper,
        may_pick_again: Callable[[Sequence[Request]], bool] = lambda _: True,
        runs_model: bool = False,  # whether picking may: with code of the user's, or guidance
    ) -> None:
        self._runs_model = runs_model
        self.runner = runner
        self.sampler = sampler
        self.timekeeper = timekeeper
        self.may_pick_again = may_pick_again
        self._picking = False
        self._drafted: torch.Tensor | None = None  # [tokens, vocabulary] float32  logits of the latest step's drafts

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        with self.runner.surroundings():
            self._picking = False
            logits = self.runner.step(batch)
            self._picking = True
            self.timekeeper.switch("tokens")
            logits = self.runner.in_float32(logits)
            samples = len(sampling)
            self._drafted = logits[samples:] if batch.drafted else None
            tokens = self._picked(logits[:samples], sampling)
        return lambda: tokens

    def pick_drafted(self, rows: Sequence[int], requests: Sequence[Request]) -> np.ndarray:  # [requests, 1]
        """The next tokens of requests, from these rows of the logits of the latest step's drafts."""
        assert self._drafted is not None
        with self.runner.surroundings():
            return self._picked(
                self._drafted[torch.tensor(rows, dtype=torch.long, device=self._drafted.device)], requests
            )

    def _picked(self, logits: torch.Tensor, requests: Sequence[Request]) -> np.ndarray:  # [requests, 1]
        with self.runner.control.users_turn() if self._runs_model else nullcontext():
            tokens = self.sampler(logits, requests) if requests else []
        return np.array(tokens, dtype=np.int64)[:, None]

    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        return not self._picking or self.may_pick_again(sampling)

    def put_back(self, step: Step) -> None:
        self.runner.restore()
