"""Picks tokens on the device and keeps each request's last one at the request's seat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..inputs.options import Options
from ..inputs.seeds import Seeds, as_int64, noise_key
from ..model.transfers import to_device
from ..planning.requests_and_prefixes import Request
from .device_sampler import DeviceSampler, RowsState, minimum_of, penalised_by
from .sampling_kernels import SamplingKernels


class SeatedSampler:
    """A DeviceSampler that knows which request has which seat. The last seat belongs to no request.

    ``options``: of each prompt; a request's ``index`` is its prompt's place among them.
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
        self._sampler: DeviceSampler | None = None  # made once the width of logits is known
        self._numbers: torch.Tensor | None = None  # [5, seats] int32: prompt, sample, kind, minimum, line
        self._own_seed: torch.Tensor | None = None  # [seats] int64, if prompts have seeds of their own
        self._seen: torch.Tensor | None = None  # [lines, words]  tokens that a request has had, prompt included
        self._lines: list[int] = []  # of each seat: its line in `_seen`, -1 for none

    def __call__(self, logits: torch.Tensor, seats: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        if self._sampler is None:
            self._sampler = self._make_sampler(logits.shape[1])
        assert self._numbers is not None
        prompt, sample, kind, minimum, line = self._numbers.index_select(1, seats)
        seed = None if self._own_seed is None else self._own_seed.index_select(0, seats)
        return self._sampler(logits, RowsState(prompt, sample, made, kind, minimum, line, self._seen, seed))

    def put_back(self, requests: Sequence[Request]) -> None:
        """Forget tokens picked in a step that failed. The host has seen all tokens of these requests."""
        if self._sampler is None or self._seen is None:
            return
        for request in requests:
            if self._lines[request.seat] >= 0:
                bits = self._sampler.seen(request.tokens(0, request.length))
                self._seen[self._lines[request.seat]] = torch.from_numpy(bits).to(self._device)

    def _make_sampler(self, vocabulary: int) -> DeviceSampler:
        requests, options = self._requests, self._options
        common = self._seeds if isinstance(self._seeds, int) else None
        sampler = DeviceSampler(dict.fromkeys(options), common, vocabulary, self._device, self._kernels)
        penalised = {each for each in sampler.kinds if penalised_by(each)}
        lines: list[int] = []
        bits: list[np.ndarray] = []
        for request, each in zip(requests, options, strict=True):
            lines.append(len(bits) if each in penalised else -1)
            if each in penalised:
                bits.append(sampler.seen(request.prompt_ids))
        of_no_request = (0, 0, 0, 0, -1)
        noise = [noise_key(self._seeds or 0, request.index) for request in requests]
        numbers = [
            (number, request.sample, sampler.kinds[each], minimum_of(each, request.prompt_tokens), line)
            for request, (_, number), each, line in zip(requests, noise, options, lines, strict=True)
        ]
        with torch.inference_mode(False):  # a later step may run outside it
            self._numbers = to_device(np.array([*numbers, of_no_request], dtype=np.int32).T.copy(), self._device)
            if self._seeds is not None and common is None:
                own = np.array([*(as_int64(seed) for seed, _ in noise), 0], dtype=np.int64)
                self._own_seed = to_device(own, self._device)
            if bits:
                self._seen = to_device(np.stack(bits), self._device)
        self._lines = lines
        return sampler
