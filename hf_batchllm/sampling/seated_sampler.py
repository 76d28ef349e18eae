"""Picks tokens on the device and keeps each request's last one at the request's seat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..inputs.options import Options
from ..inputs.seeds import Seeds, as_int64, noise_key
from ..planning.units import Request
from .device_sampler import DeviceSampler, RowsState, minimum_of, penalised_by
from .sampling_kernels import SamplingKernels


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
        noise = [noise_key(self._seeds or 0, request.index) for request in requests]
        numbers = [
            (number, request.sample, sampler.kinds[each], minimum_of(each, len(request.prompt_ids)), line)
            for request, (_, number), each, line in zip(requests, noise, options, own, strict=True)
        ]
        with torch.inference_mode(False):  # a later step may run outside
            self._numbers = torch.from_numpy(np.array([*numbers, nobody], dtype=np.int32).T.copy()).to(self._device)
            if each_its_own:
                self._own_seed = torch.tensor([*(as_int64(seed) for seed, _ in noise), 0], device=self._device)
            if bits:
                self._seen = torch.from_numpy(np.stack(bits)).to(self._device)
        return sampler
