"""Running ahead: tokens are picked on the device and stay there, while copies of them come back later.

The device keeps the last token of each request, each at its own seat, so that a request's next step can be launched
before anyone on the host has seen what it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .batch import ModelBatch
from .decode_graphs import DecodeGraphs, Pick
from .request import Request
from .runner import ModelRunner


class Ahead:
    def __init__(self, runner: ModelRunner, pick: Pick, seats: int, device: torch.device) -> None:
        self.runner = runner
        self.pick = pick
        self.device = device
        self.graphs: DecodeGraphs | None = None
        with torch.inference_mode(False):  # it is written in steps that may run outside
            self.last = torch.zeros(seats + 1, dtype=torch.long, device=device)  # of each seat; one is nobody's

    @torch.no_grad()
    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], list[int]]:
        if self.graphs is not None:
            to_come = max((request.max_new_tokens - request.made for request in sampling), default=0)
            picked = self.graphs.run(batch, to_come)
            if picked is not None:
                return self._on_its_way(picked)
        batch = batch.to(self.device)
        tokens = batch.tokens
        rows = len(tokens.row_seats)
        if rows:
            tokens.input_ids[:rows] = self.last[tokens.row_seats]
        logits = self.runner.step(batch)
        if not sampling:
            return list
        picked = self.pick(logits)
        self.last[tokens.sample_seats] = picked
        return self._on_its_way(picked)

    @property
    def summary(self) -> str:
        """For the report; empty where there are no graphs."""
        graphs = self.graphs
        if graphs is None or not graphs.captured:
            return ""
        return f"{graphs.steps:,} steps by {graphs.captured} of them, captured in {graphs.seconds:.1f} s"

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()

    def _on_its_way(self, picked: torch.Tensor) -> Callable[[], list[int]]:
        if self.device.type != "cuda":
            tokens = picked.tolist()  # now: the next step writes to the same place
            return lambda: tokens
        landed = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True)
        landed.copy_(picked, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def wait() -> list[int]:
            event.synchronize()
            return landed.tolist()

        return wait


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The best token of each row, the lowest among equals."""
    if logits.device.type != "cuda":
        return logits.argmax(dim=-1)
    from .kernels.sample_triton import greedy as best

    return best(logits)
