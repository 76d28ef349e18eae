"""Running ahead: tokens are picked on the device and stay there, while copies of them come back later.

The device keeps the last token of each request, each at its own seat, so that a request's next step can be launched
before anyone on the host has seen what it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from .batch import ModelBatch
from .decode_graphs import DecodeGraphs
from .device_sampling import DeviceSampler, RowsState, SamplingKernels
from .options import Options
from .request import Request
from .runner import ModelRunner, current_device


class Pick(Protocol):
    """Picks tokens without the host."""

    def __call__(
        self,
        logits: torch.Tensor,  # [samples, vocabulary]
        seats: torch.Tensor,  # [samples]
        made: torch.Tensor,  # [samples]
    ) -> torch.Tensor: ...  # [samples]


class SeatedSampler:
    """A DeviceSampler that knows who sits where. Nobody's seat is the last."""

    def __init__(
        self,
        requests: Sequence[Request],
        options: Options,
        seed: int | None,
        device: torch.device,
        kernels: SamplingKernels,
    ) -> None:
        self._make = lambda vocabulary: DeviceSampler(options, seed, vocabulary, device, kernels)
        self._sampler: DeviceSampler | None = None  # made when it is known how wide logits are
        self._requests = requests
        self._device = device
        minimum = self._make(1).minimum
        self._prompt = self._of_seats([request.index for request in requests], torch.long)
        self._sample = self._of_seats([request.sample for request in requests], torch.long)
        self._minimum = self._of_seats([minimum(len(request.prompt_ids)) for request in requests], torch.int32)
        self._seen: torch.Tensor | None = None  # [seats, words]  which tokens a request has had, prompt included

    def __call__(self, logits: torch.Tensor, seats: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        if self._sampler is None:
            self._sampler = self._make(logits.shape[1])
            if self._sampler.needs_seen:
                bits = [self._sampler.seen(request.prompt_ids) for request in self._requests]
                with torch.inference_mode(False):
                    self._seen = torch.from_numpy(np.stack([*bits, bits[0]])).to(self._device)
        seen = None if self._seen is None else self._seen[seats]
        rows = RowsState(self._prompt[seats], self._sample[seats], made, self._minimum[seats], seen)
        tokens = self._sampler(logits, rows)
        if self._seen is not None:
            self._seen[seats] = seen  # with what was picked just now
        return tokens

    def _of_seats(self, values: list[int], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.tensor([*values, 0], dtype=dtype).to(self._device)


class Ahead:
    def __init__(self, runner: ModelRunner, pick: Pick, seats: int, device: torch.device) -> None:
        self.runner = runner
        self.pick = pick
        self.device = device
        self.graphs: DecodeGraphs | None = None
        # All steps go to one stream, whatever is the caller's between two results: a page's next owner writes to it
        # after whoever was found to have ended.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._outside: torch.cuda.Stream | None = None  # during a step, the caller's
        with torch.inference_mode(False):  # it is written in steps that may run outside
            self.last = torch.zeros(seats + 1, dtype=torch.long, device=device)  # of each seat

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], list[int]]:
        if self._stream is not None:
            self._outside = torch.cuda.current_stream()
        with current_device(self.device), torch.cuda.stream(self._stream):
            wait = self._launch(batch, sampling)
        self._outside = None
        return wait

    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], list[int]]:
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
        picked = self.pick(logits, tokens.sample_seats, tokens.made)
        self.last[tokens.sample_seats] = picked.clamp(min=0)  # -1 is no token, and the next step may be on its way
        return self._on_its_way(picked)

    def back(self) -> None:
        if self.graphs is not None:
            self.graphs.look_again = True

    @property
    def summary(self) -> str:
        """For the report; empty where there are no graphs."""
        graphs = self.graphs
        if graphs is None or not graphs.captured:
            return ""
        return f"{graphs.steps:,} steps by {graphs.captured} of them, captured in {graphs.seconds:.1f} s"

    def close(self) -> None:
        if self._outside is not None:  # an interrupt came while a step put things back
            torch.cuda.set_stream(self._outside)
            self._outside = None
        if self.graphs is not None:
            self.graphs.close(self._stream)

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
