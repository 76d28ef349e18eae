"""Random cases of the kernels that cut distributions and draw from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_batchllm.kernels.reference import sample_torch, top_k_top_p_torch
from hf_batchllm.kernels.reference.sample_torch import FULL, NO_PAGE, NO_TOKEN, PADDING, RUNNING, STOPPED, Rows


def keys(rng: np.random.Generator, rows: int) -> dict[str, torch.Tensor]:
    """Seed and counters, in the whole of their ranges."""
    return {
        "seed": torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, 1)),
        "prompt": torch.from_numpy(rng.integers(0, 2**31 - 1, rows)),
        "sample": torch.from_numpy(rng.integers(0, 9, rows)),
        "position": torch.from_numpy(rng.integers(0, 10**6, rows)),
    }


def gap(scores: torch.Tensor, given: dict[str, torch.Tensor], row: int, *tokens: int) -> float:
    """How near two tokens were to each other: within their block, or their blocks if there are two."""
    size = sample_torch.SAMPLE_BLOCK
    blocks = [token // size for token in tokens]
    seed = given["seed"][row if len(given["seed"]) > 1 else 0]
    mine = [seed, *(given[name][row : row + 1] for name in ("prompt", "sample", "position"))]
    if blocks[0] == blocks[1]:
        noisy = scores[list(tokens)] - sample_torch.exponential(torch.tensor(tokens), *mine).log()
    else:
        weights = torch.stack([part.logsumexp(0) for part in scores.split(size)])
        begin = torch.tensor(blocks) * size
        noisy = weights[blocks] - sample_torch.exponential(begin, *mine, second=True).log()
    return abs(float(noisy[0] - noisy[1]))


PAGES, STEPS, PAGE = 5, 3, 4


def random_rows(rng: np.random.Generator, rows: int) -> Rows:
    start = rng.integers(0, 50, rows)
    position = start + rng.integers(0, PAGES * PAGE, rows)
    pages = rng.permutation(rows * PAGES).reshape(rows, PAGES)
    pages[np.arange(PAGES)[None] > ((position - start) // PAGE + rng.integers(0, 2, rows))[:, None]] = -1
    offset = position - start

    def tensor(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values)).to(dtype)

    return Rows(
        token=tensor(rng.integers(0, 99, rows), torch.int64),
        position=tensor(position - rng.integers(0, 9, rows), torch.int64),  # for RoPE images take less room
        length=tensor(position + 1),
        slot=tensor(pages[np.arange(rows), offset // PAGE] * PAGE + offset % PAGE, torch.int64),
        made=tensor(rng.integers(0, 9, rows)),
        remaining=tensor(rng.integers(1, 4, rows)),
        status=tensor(rng.choice([RUNNING, RUNNING, RUNNING, STOPPED, FULL, NO_PAGE, NO_TOKEN, PADDING], rows)),
        start=tensor(start),
        pages=tensor(pages),
        produced=torch.full((rows, STEPS), -7),
    )


INF, NAN = float("inf"), float("nan")


def spread(bits: torch.Tensor) -> torch.Tensor:
    """Floats of all sizes there are, but for those too small to be normal."""
    scores = torch.where(bits % 256 == 255, bits - 1, bits)  # no infinity, no NaN
    scores = (scores & 0xFF) << 23 | bits >> 8 & 0x807FFFFF
    scores = scores.to(torch.int32).view(torch.float32)
    return torch.where(scores.abs() < 1.2e-38, -0.0, scores)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x * 4,
    "flat": lambda x: x * 0.3,
    "peaked": lambda x: torch.where(x > 3, x * 8, x),
    "bfloat16": lambda x: (x * 4).bfloat16().float(),
    "many ties": lambda x: (x * 2).round(),
    "equal": lambda x: torch.ones_like(x) * -3.5,
    "forbidden": lambda x: torch.where(x > 2, x * 2, -INF),
    "nearly all forbidden": lambda x: torch.where(torch.arange(x.shape[1]) % 501 == 7, x, -INF),
    "large": lambda x: x * 1e4 + 3e5,
    "sorted": lambda x: (x * 3).sort(dim=-1).values,
    "spread": lambda x: spread((x.double() * 2**29).long() & 0xFFFFFFFF),
}


def rows_of(kind: str, rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    noise = np.random.default_rng(seed).standard_normal((rows, vocabulary), dtype=np.float32)
    return KINDS[kind](torch.from_numpy(noise))


def masses(scores: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Of one row's tokens, after temperature and top-k."""
    best = scores.double() / options.get("temperature", 1.0)
    left = scores >= top_k_top_p_torch.cutoffs(scores[None], top_k=options.get("top_k"))
    return torch.where(left, best, -INF).softmax(dim=-1)


NATIVE = [37, 5003, 32000, 50257, 128256, 262144]  # each compiles kernels of its own


def random_options(rng: np.random.Generator, vocabulary: int) -> dict[str, Any]:
    def some(*values: Any) -> Any:
        return values[rng.integers(0, len(values))]

    return {
        "temperature": some(0.1, 0.7, 1.0, 3.0),
        "top_k": some(None, 1, 5, 50, 50, 300, 3000, max(1, vocabulary - 1), vocabulary + 5),
        "top_p": some(None, 0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0),
        "min_p": some(None, None, 0.0, 0.02, 0.3, 1.0),
    }


def assert_near_the_edge(scores: torch.Tensor, ours: float, theirs: float, options: dict[str, Any]) -> None:
    """Two thresholds of a row that differ: the mass from either up is ``top_p`` but for rounding."""
    assert options["top_p"] is not None
    mass = masses(scores, options)
    low, high = sorted((ours, theirs))
    for reached in (mass[scores >= high].sum(), mass[scores > low].sum()):
        assert abs(float(reached) - options["top_p"]) < 3e-6, (ours, theirs, options)


def bits_of(rows: list[list[int]], vocabulary: int) -> torch.Tensor:
    seen = torch.zeros(len(rows), -(-vocabulary // 32), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        for token in set(tokens):
            seen[row, token // 32] += 1 << token % 32
    return torch.where(seen >= 2**31, seen - 2**32, seen).to(torch.int32)
