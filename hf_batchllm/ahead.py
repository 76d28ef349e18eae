"""Running ahead: tokens are picked on the device and stay there, while copies of them come back later.

The device keeps the last token of each request, each at its own seat, so that a request's next step can be launched
before anyone on the host has seen what it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from .batch import ModelBatch
from .decode_graphs import DecodeGraphs
from .decode_rows import Pick, Seats
from .device_sampling import DeviceSampler, RowsState, SamplingKernels, minimum_of, penalised_by
from .options import Options
from .request import Request
from .results import shown_size
from .runner import ModelRunner, current_device
from .seeds import Seeds, noise_of, signed
from .unended import Unended


class SeatedSampler:
    """A DeviceSampler that knows who sits where. Nobody's seat is the last.

    ``options`` are those of the list's prompts, which requests have their ``index`` in.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        options: Sequence[Options],
        seed: Seeds | None,
        device: torch.device,
        kernels: SamplingKernels,
    ) -> None:
        self._requests = requests
        self._options = [options[request.index] for request in requests]
        self._seeds = seed
        self._device = device
        self._kernels = kernels
        self._sampler: DeviceSampler | None = None  # made when it is known how wide logits are
        self._numbers: torch.Tensor | None = None  # [5, seats] int32: all that a row's state has of its seat
        self._own_seed: torch.Tensor | None = None  # [seats] int64, if each prompt has one of its own
        self._seen: torch.Tensor | None = None  # [lines, words]  which tokens a request has had, prompt included

    def __call__(self, logits: torch.Tensor, seats: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        if self._sampler is None:
            self._sampler = self._made(logits.shape[1])
        assert self._numbers is not None
        prompt, sample, kind, minimum, line = self._numbers.index_select(1, seats)
        seed = None if self._own_seed is None else self._own_seed.index_select(0, seats)
        return self._sampler(logits, RowsState(prompt, sample, made, kind, minimum, line, self._seen, seed))

    def _made(self, vocabulary: int) -> DeviceSampler:
        requests, options = self._requests, self._options
        each_its_own = not (self._seeds is None or isinstance(self._seeds, int))
        common = None if each_its_own else self._seeds
        sampler = DeviceSampler(dict.fromkeys(options), common, vocabulary, self._device, self._kernels)
        penalised = {each for each in sampler.kinds if penalised_by(each)}
        own, bits = [], []
        for request, each in zip(requests, options, strict=True):
            own.append(len(bits) if each in penalised else -1)
            if each in penalised:
                bits.append(sampler.seen(request.prompt_ids))
        nobody = (0, 0, 0, 0, -1)
        noise = [noise_of(self._seeds or 0, request.index) for request in requests]
        numbers = [
            (number, request.sample, sampler.kinds[each], minimum_of(each, len(request.prompt_ids)), line)
            for request, (_, number), each, line in zip(requests, noise, options, own, strict=True)
        ]
        with torch.inference_mode(False):  # a later step may run outside
            self._numbers = torch.from_numpy(np.array([*numbers, nobody], dtype=np.int32).T.copy()).to(self._device)
            if each_its_own:
                self._own_seed = torch.tensor([*(signed(seed) for seed, _ in noise), 0], device=self._device)
            if bits:
                self._seen = torch.from_numpy(np.stack(bits)).to(self._device)
        return sampler


class Ahead:
    def __init__(
        self, runner: ModelRunner, pick: Pick, seats: Seats, graphs: DecodeGraphs | None, device: torch.device
    ) -> None:
        self.runner = runner
        self.pick = pick
        self.seats = seats
        self.graphs = graphs
        self.device = device
        # All steps go to one stream, whatever is the caller's between two results: a page's next owner writes to it
        # after whoever was found to have ended.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._outside: torch.cuda.Stream | None = None  # during a step, the caller's
        self._unended: Unended | None = None  # of the requests of this turn
        self._latest: torch.cuda.Event | None = None  # when the step that was launched last is over

    def start(self, requests: Sequence[Request], most_rows: int) -> None:
        """All requests begin, or those of one adapter; no more than ``most_rows`` of them run in a step."""
        if self.graphs is not None:
            self._unended = Unended(requests, self.graphs.storage, most_rows)
            self.graphs.look_again = True  # what they have captured may be another adapter's

    @property
    def most_times(self) -> int:
        return self.graphs.most_times if self.graphs is not None and self.runner.backend.does_all else 1

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        if self._stream is not None:
            self._outside = torch.cuda.current_stream()
        with current_device(self.device), torch.cuda.stream(self._stream):
            wait = self._launch(batch, sampling)
            if self.graphs is not None and self._unended is not None and self.graphs.prepares:
                self._unended.begin(sampling)
                if self._is_behind():
                    self.graphs.prepare(*self._unended.left())
        self._outside = None
        return wait

    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        burst = batch.burst
        if self.graphs is not None and burst is not None:
            produced = self.graphs.run(batch, int(burst.left.max()))
            if produced is not None:
                landed = self._on_its_way(produced)
                places = batch.tokens.made.numpy()[:, None] + np.arange(burst.times)  # [rows, times]
                return lambda: np.take_along_axis(landed(), places % produced.shape[1], axis=1)
        batch = batch.to(self.device)
        tokens = batch.tokens
        rows = len(tokens.row_seats)
        if rows:
            tokens.input_ids[:rows] = self.seats.last[tokens.row_seats]
        logits = self.runner.step(batch)
        if not sampling:
            return lambda: np.empty((0, 1), dtype=np.int64)
        picked = self.pick(logits, tokens.sample_seats, tokens.made)
        self.seats.take(tokens.sample_seats, picked)
        return self._on_its_way(picked[:, None])

    def _is_behind(self) -> bool:
        """Whether the device was still at work on the step before this one: then the host has time."""
        if self._stream is None:
            return False
        before, self._latest = self._latest, torch.cuda.Event()
        self._latest.record()
        return before is not None and not before.query()

    def back(self) -> None:
        if self.graphs is not None:
            self.graphs.look_again = True

    @property
    def summary(self) -> str:
        """For the report; empty where there are no graphs."""
        graphs = self.graphs
        if graphs is None or not graphs.captured:
            return ""
        count = f"{graphs.captured} graph{'s' if graphs.captured > 1 else ''}"
        taken = f"{1000 * graphs.seconds:,.0f} ms and {shown_size(graphs.bytes)}"
        beside = f" ({1000 * graphs.seconds_beside:,.0f} ms while other steps ran)" if graphs.seconds_beside else ""
        why = f"; no more while other steps run ({graphs.not_prepared.splitlines()[0]})" if graphs.not_prepared else ""
        return f"{graphs.steps:,} steps replayed from {count}, which took {taken} to capture{beside}{why}"

    def close(self) -> None:
        if self._outside is not None:  # an interrupt came while a step put things back
            torch.cuda.set_stream(self._outside)
            self._outside = None
        if self.graphs is not None:
            self.graphs.close(self._stream)

    def _on_its_way(self, tokens: torch.Tensor) -> Callable[[], np.ndarray]:
        if self.device.type != "cuda":
            now = tokens.cpu().numpy().copy()  # the next step writes to the same place
            return lambda: now
        landed = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        landed.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def wait() -> np.ndarray:
            event.synchronize()
            return landed.numpy()

        return wait
