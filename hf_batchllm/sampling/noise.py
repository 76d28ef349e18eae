"""The noise that the host draws tokens with.

It depends on (seed, prompt index, sample index, position) alone, or, with a seed for each prompt, on (its seed, sample
index, position): it does not matter which requests share a step. Nor does it matter who picks a call's tokens, the host
or the device: for a model on a GPU, both use the noise of the device's sampler. One prompt's options may have the host
pick for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from ..inputs.seeds import Seeds, as_int64, noise_key
from ..kernels.sampling_recipes import Recipe
from ..model.float64 import in_float64, place_of_float64
from ..model.transfers import to_device
from ..planning.requests_and_prefixes import Request
from .sampling_kernels import SamplingKernels

INVALID = -2  # instead of a token: there is no distribution
_BLOCK = 512  # tokens: the distribution function is inverted among blocks, then within one


class Noise(Protocol):
    """Of several rows."""

    def of(self, rows: list[int]) -> Noise:
        """The noise of some of the rows."""

    def token(self, scores: torch.Tensor, ids: torch.Tensor | None, vocabulary: int) -> torch.Tensor:  # [rows] int64
        """Draw a token for each row of ``scores`` [rows, n]. ``ids`` [rows, n]: the tokens, in the vocabulary's order;
        None: all. INVALID where scores are NaN or infinite, or all are -inf."""


class Inversion:
    """The token at which the distribution function, in the order of the vocabulary, passes a number of the row's.

    The numbers are where float64 is, which may be the host.
    """

    def __init__(self, uniform: torch.Tensor) -> None:  # [rows] float64
        self._uniform = uniform

    @classmethod
    def for_requests(cls, seeds: Seeds, requests: Sequence[Request], device: torch.device) -> Inversion:
        return cls(to_device(uniforms(seeds, requests), place_of_float64(device)))

    def of(self, rows: list[int]) -> Inversion:
        return Inversion(self._uniform[rows])

    def token(self, scores: torch.Tensor, ids: torch.Tensor | None, vocabulary: int) -> torch.Tensor:
        place = _invert(scores.softmax(dim=-1), self._uniform)
        if ids is None:
            return place
        return torch.where(place == INVALID, place, ids.gather(-1, place.clamp(min=0)[:, None])[:, 0])


class DeviceNoise:
    """As the device's sampler draws."""

    def __init__(self, keys: torch.Tensor, kernels: SamplingKernels) -> None:
        self._keys = keys  # [4, rows] int64  seed, prompt, sample, position
        self._kernels = kernels

    @classmethod
    def for_requests(
        cls, seeds: Seeds, requests: Sequence[Request], device: torch.device, kernels: SamplingKernels
    ) -> DeviceNoise:
        noise = [noise_key(seeds, request.index) for request in requests]
        keys = [
            (as_int64(seed), number, request.sample, len(request.generated))
            for request, (seed, number) in zip(requests, noise, strict=True)
        ]
        return cls(to_device(np.array(keys, dtype=np.int64).T.copy(), device), kernels)

    def of(self, rows: list[int]) -> DeviceNoise:
        return DeviceNoise(self._keys[:, rows].contiguous(), self._kernels)

    def token(self, scores: torch.Tensor, ids: torch.Tensor | None, vocabulary: int) -> torch.Tensor:
        if ids is not None:  # the noise of a token depends on its place in the vocabulary
            scores = scores.new_full((len(scores), vocabulary), -torch.inf).scatter_(-1, ids, scores)
        tokens = self._kernels.gumbel_sample(scores, 1.0, *self._keys)
        return torch.where(tokens < 0, INVALID, tokens)

    def token_of(self, recipe: Recipe, scores: torch.Tensor) -> torch.Tensor:  # [rows] int64
        """Draw a token for each row of ``scores`` [rows, vocabulary], after the recipe's cuts; negative: INVALID."""
        cuts = {"temperature": recipe.temperature, "top_k": recipe.top_k, "top_p": recipe.top_p, "min_p": recipe.min_p}
        edge = self._kernels.cutoffs(scores, **cuts)
        return self._kernels.gumbel_sample(scores, recipe.temperature, *self._keys, threshold=edge)


# -- numbers between 0 and 1 -----------------------------------------------------------------------------------


def uniforms(seeds: Seeds, requests: Sequence[Request]) -> np.ndarray:  # [requests] float64
    """A number in (0, 1), both ends excluded, for each request at its position."""
    noise = [noise_key(seeds, request.index) for request in requests]
    counter = [
        (len(request.generated), request.sample, number, 0)
        for request, (_, number) in zip(requests, noise, strict=True)
    ]
    bits = philox(np.array(counter, dtype=np.uint64).T, np.array([seed for seed, _ in noise], dtype=np.uint64))
    # 52 bits: with 53, adding the half would round the largest number up to 1.
    return (((bits[0] << 20) | (bits[1] >> 12)).astype(np.float64) + 0.5) * 2.0**-52


def philox(counter: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Philox4x32 with ten rounds: four words of 32 random bits for each column of ``counter`` [4, n] and ``key`` [n].

    It has no state, does all rows at once, and a kernel can repeat it bit for bit.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b, c, d = counter.astype(np.uint64)
    key_a, key_b = key & low, key >> half
    for _ in range(10):
        x, y = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (y >> half) ^ b ^ key_a, y & low, (x >> half) ^ d ^ key_b, x & low
        key_a, key_b = (key_a + np.uint64(0x9E3779B9)) & low, (key_b + np.uint64(0xBB67AE85)) & low
    return a, b, c, d


# -- the distribution function ---------------------------------------------------------------------------------


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index in each row of ``weights`` [rows, n] at which the distribution function passes ``uniform`` [rows].

    An index with a weight of 0 is never given. INVALID where the weights' sum is 0 or not finite.
    """
    sums, blocks = block_sums(weights)
    block, uniform, valid = _pass(sums, uniform)
    chosen = blocks[torch.arange(len(blocks), device=blocks.device), block.to(blocks.device)]
    within, _, _ = _pass(chosen, uniform)
    return torch.where(valid, block * blocks.shape[-1] + within, INVALID).to(weights.device)


def block_sums(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of blocks [rows, blocks], and the blocks [rows, blocks, size]; the last one is padded with zeros."""
    size = min(_BLOCK, weights.shape[-1])
    lacking = -weights.shape[-1] % size
    blocks = (F.pad(weights, (0, lacking)) if lacking else weights).unflatten(-1, (-1, size))
    return blocks.sum(dim=-1), blocks


def _pass(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The step at which a row's distribution function passes ``uniform``, how far into it, and whether there is one.

    In float64 and with 52 random bits, so that the far tail of a large vocabulary keeps its exact share. The result is
    where float64 is.
    """
    reached = running_sums(in_float64(weights))
    total = reached[:, -1:]
    # Below the total, whatever rounding does: some step always goes beyond it, and has a weight.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(reached, target, right=True).clamp(max=weights.shape[-1] - 1)  # beyond with NaN
    before, after = F.pad(reached, (1, 0)).gather(-1, index), reached.gather(-1, index)
    into = ((target - before) / (after - before)).clamp(min=0)
    return index[:, 0], into[:, 0], (torch.isfinite(total) & (total > 0))[:, 0]


def running_sums(weights: torch.Tensor) -> torch.Tensor:
    """The sums of each row's numbers up to each place."""
    if weights.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return weights.cumsum(dim=-1)
    # In PyTorch's deterministic mode a GPU refuses to add up floats like this.
    return weights.cpu().cumsum(dim=-1).to(weights.device)
