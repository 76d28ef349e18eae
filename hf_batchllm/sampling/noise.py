"""The noise that the host draws tokens with: that of the device's sampler, whatever device the model is on.

It depends on (seed, prompt index, sample index, position) alone, or, with a seed for each prompt, on (its seed, sample
index, position): it does not matter which requests share a step. Nor does it matter who picks a call's tokens, the host
or the device. One prompt's options may have the host pick for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..inputs.seeds import Seeds, as_int64, noise_key
from ..kernels.lists.sampling_recipes import Recipe
from ..kernels.reference.sample_torch import SAMPLE_BLOCK, block_noise, draw
from ..model.float64 import place_of_float64
from ..model.transfers import to_device
from ..planning.requests_and_prefixes import Request
from .sampling_kernels import SamplingKernels

INVALID = -1  # instead of a token: there is no distribution


@dataclass(frozen=True)
class Noise:
    """The noise of several rows."""

    keys: torch.Tensor  # [4, rows] int64  seed, prompt, sample, position
    vocabulary: int
    kernels: SamplingKernels | None  # where the device may pick tokens as well
    blocks: torch.Tensor | None  # [rows, blocks]  without kernels

    @classmethod
    def for_requests(
        cls,
        seeds: Seeds,
        requests: Sequence[Request],
        vocabulary: int,
        device: torch.device,
        kernels: SamplingKernels | None = None,
    ) -> Noise:
        noise = [noise_key(seeds, request.index) for request in requests]
        every = [
            (as_int64(seed), number, request.sample, len(request.generated))
            for request, (seed, number) in zip(requests, noise, strict=True)
        ]
        keys = to_device(np.array(every, dtype=np.int64).T.copy(), place_of_float64(device))
        return cls(keys, vocabulary, kernels, block_noise(vocabulary, keys) if kernels is None else None)

    def of(self, rows: slice | list[int]) -> Noise:
        """The noise of some of the rows."""
        return replace(self, keys=self.keys[:, rows], blocks=None if self.blocks is None else self.blocks[rows])

    def token(self, scores: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:  # [rows] int64
        """Draw a token for each row of ``scores`` [rows, n]. ``ids`` [rows, n]: the tokens that have them; None: all.
        INVALID where scores are NaN or infinite, or all are -inf."""
        # Kernels know no lists. On a GPU sums over lists would depend on the order of threads. And of all tokens, few
        # are given noise.
        by_list = self.kernels is None and self.keys.device.type == "cpu" and scores.shape[1] <= SAMPLE_BLOCK
        if ids is not None and not by_list:
            whole = scores.new_full((len(scores), self.vocabulary), -torch.inf)
            scores, ids = whole.scatter_(-1, ids, scores), None
        if self.kernels is not None:
            return self.kernels.gumbel_sample(scores, 1.0, *self.keys)
        assert self.blocks is not None
        return draw(scores, self.keys, self.blocks, ids)

    def token_of(self, recipe: Recipe, scores: torch.Tensor) -> torch.Tensor:  # [rows] int64
        """Draw a token for each row of ``scores`` [rows, vocabulary] with kernels, after the recipe's cuts."""
        assert self.kernels is not None
        cuts = {"temperature": recipe.temperature, "top_k": recipe.top_k, "top_p": recipe.top_p, "min_p": recipe.min_p}
        edge = self.kernels.cutoffs(scores, **cuts)
        return self.kernels.gumbel_sample(scores, recipe.temperature, *self.keys, threshold=edge)
