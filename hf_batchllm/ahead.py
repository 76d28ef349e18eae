"""Running ahead: tokens are picked on the device and stay there, while copies of them come back later.

The device keeps the last token of each request, each at its own seat, so that a request's next step can be launched
before anyone on the host has seen what it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .batch import ModelBatch
from .request import Request
from .runner import ModelRunner

Picker = Callable[[torch.Tensor, ModelBatch], torch.Tensor]  # logits [samples, vocabulary] -> tokens [samples]


class Ahead:
    def __init__(self, runner: ModelRunner, pick: Picker, seats: int, device: torch.device) -> None:
        self.runner = runner
        self.pick = pick
        self.device = device
        with torch.inference_mode(False):  # it is written in steps that may run outside
            self.last = torch.zeros(seats + 1, dtype=torch.long, device=device)  # of each seat; one is nobody's

    @torch.no_grad()
    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], list[int]]:
        batch = batch.to(self.device)
        tokens = batch.tokens
        rows = len(tokens.row_seats)
        if rows:
            tokens.input_ids[:rows] = self.last[tokens.row_seats]
        logits = self.runner.step(batch)
        if not sampling:
            return list
        picked = self.pick(logits, batch)
        self.last[tokens.sample_seats] = picked
        return self._on_its_way(picked)

    def _on_its_way(self, picked: torch.Tensor) -> Callable[[], list[int]]:
        if self.device.type != "cuda":
            return picked.tolist
        landed = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True)
        landed.copy_(picked, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def wait() -> list[int]:
            event.synchronize()
            return landed.tolist()

        return wait


def greedy(logits: torch.Tensor, batch: ModelBatch) -> torch.Tensor:
    return logits.argmax(dim=-1)  # the lowest index among equals
