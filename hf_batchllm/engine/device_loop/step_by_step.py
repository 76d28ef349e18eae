"""Steps whose tokens the host picks: the model runs as a graph, and the host waits for the logits of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...model.batch import ModelBatch
from ...model.runner import ModelRunner
from ...planning.requests_and_prefixes import Request
from ..timekeeper import Timekeeper
from .decode_graphs import DecodeGraphs
from .graph_launcher import GraphLauncher
from .seats import Seats


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
        self._picking = False

    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        self._picking = False
        logits = self._logits(batch)
        tokens: list[int] = []
        if sampling:
            if self.owners_code:
                self.owner_gets_control()
            self._picking = True
            with self.runner.adapted():
                self.prepare(sampling, self.device)
                self.timekeeper.switch("tokens")
                tokens = self.sampler(self.runner.in_float32(logits), sampling)
            if self.owners_code:
                self.owner_had_control()
        return lambda: np.array(tokens, dtype=np.int64)[:, None]

    def _logits(self, batch: ModelBatch) -> torch.Tensor:  # [samples, vocabulary]
        if self.graphs is not None and batch.burst is not None:
            produced = self.graphs.run(batch, int(batch.burst.left.max()))
            if produced is not None:
                assert produced.logits is not None
                return produced.logits
        return self.runner.step(batch)

    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        return not self._picking or self.may_pick_again(sampling)
