"""Plain PyTorch references of ``sample_triton``: same signatures, same results, also in place.

They pick tokens on a CPU, and are the reference in the kernels' tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..lists.sampling_recipes import Recipe, RowRecipes

# A row's status. ``advance`` leaves rows alone that are not RUNNING.
RUNNING, STOPPED, FULL, NO_PAGE, NO_TOKEN, PADDING = range(6)

PHILOX_ROUNDS = 10
SAMPLE_BLOCK = 2048  # tokens of the vocabulary: which block is drawn first, then which of its tokens
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def greedy(
    logits: torch.Tensor,  # [rows, vocabulary]
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [rows] int64
    """The best token of each row, the lowest among equals; NaN counts as infinity."""
    tokens = torch.where(logits.isnan(), float("inf"), logits).argmax(dim=-1)
    return tokens if out is None else out.copy_(tokens)


def gumbel_sample(
    logits: torch.Tensor,  # [rows, vocabulary]
    temperature: float | RowRecipes,  # or each row's recipe
    seed: torch.Tensor,  # [1] or [rows] int64  one for all rows, or one for each
    prompt: torch.Tensor,  # [rows] int64 or int32, as are the next two
    sample: torch.Tensor,
    position: torch.Tensor,
    *,
    threshold: torch.Tensor | None = None,  # [rows] float32  tokens with a logit below it never come
    ceiling: torch.Tensor | None = None,  # [rows] float32  nor do those with a logit above this
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # [rows] int64
    """One token a row from softmax(logits / temperature); -1 where a logit is NaN or infinite, or all are -inf.

    The noise of a token depends on (seed, prompt, sample, position, token) alone. First a block of the vocabulary is
    drawn, by the sum of its tokens' weights, then one of its tokens: noise is made for few tokens, not for all.
    Rows whose recipe is greedy get the token of ``greedy``.
    """
    recipes = temperature
    if not isinstance(recipes, RowRecipes):
        recipes = RowRecipes.same(Recipe(temperature=recipes), logits)
    temperatures = recipes.table.temperature[recipes.which]
    drawing, best_tokens = temperatures > 0, greedy(logits)
    temperatures = torch.where(drawing, temperatures, 1.0)[:, None]
    if threshold is not None:
        logits = torch.where(logits < threshold[:, None], -float("inf"), logits.float())
    if ceiling is not None:
        logits = torch.where(logits > ceiling[:, None], -float("inf"), logits.float())
    keys = [each.long() for each in (seed, prompt, sample, position)]
    drawn = draw(logits.double() / temperatures, keys, block_noise(logits.shape[1], keys))
    tokens = torch.where(drawing, drawn, best_tokens)
    return tokens if out is None else out.copy_(tokens)


def draw(
    scores: torch.Tensor,  # [rows, n] float32 or float64
    keys: Iterable[torch.Tensor],  # int64  seed [1] or [rows]; prompt, sample and position [rows]
    blocks: torch.Tensor,  # [rows, blocks]  their noise, as from ``block_noise``
    ids: torch.Tensor | None = None,  # [rows, n] int64  the tokens that have these scores; None: all, in order
) -> torch.Tensor:  # [rows] int64
    """One token a row from softmax(scores), as ``gumbel_sample`` draws it: with ``ids``, as if all others had -inf.

    Noise is made where the keys and ``blocks`` are: on the host, if the scores' device has no float64.
    """
    place, device, vocabulary = blocks.device, scores.device, scores.shape[1]
    if ids is None:
        weights = block_sums(scores.softmax(dim=1)).to(place)
    else:
        scores, ids = scores.to(place), ids.to(place)
        weights = torch.zeros_like(blocks).scatter_add_(1, ids // SAMPLE_BLOCK, scores.double().softmax(dim=1))
    # Of exponential variables divided by weights, each is the smallest with a probability in proportion to its weight.
    best, block = (weights.double().log() - blocks).max(dim=1, keepdim=True)
    if ids is None:
        ids = block * SAMPLE_BLOCK + torch.arange(min(SAMPLE_BLOCK, vocabulary), device=place)
        ids = ids.clamp(max=vocabulary - 1)  # the last token again makes no difference
        inside = scores.gather(1, ids.to(device)).to(place)
    else:
        inside = scores.masked_fill(ids // SAMPLE_BLOCK != block, -float("inf"))
    noise = exponential(ids, *(each.unsqueeze(1) for each in keys)).log()
    drawn = (inside.double() - noise).argmax(dim=1, keepdim=True)
    return torch.where(best.isfinite(), ids.gather(1, drawn), -1)[:, 0].to(device)


def block_noise(vocabulary: int, keys: Iterable[torch.Tensor]) -> torch.Tensor:  # [rows, blocks] float64
    """The noise that blocks are drawn with, to be taken from the logarithms of their weights."""
    columns = [each.unsqueeze(1) for each in keys]
    begin = torch.arange(0, vocabulary + 1, SAMPLE_BLOCK, device=columns[0].device)
    return exponential(begin, *columns, second=True).log()


def block_sums(weights: torch.Tensor) -> torch.Tensor:  # [rows, blocks]
    """What the tokens of each block weigh together. After whole blocks comes one of none."""
    whole = weights.shape[1] // SAMPLE_BLOCK * SAMPLE_BLOCK
    blocks = weights[:, :whole].unflatten(1, (whole // SAMPLE_BLOCK, SAMPLE_BLOCK))
    return torch.cat([blocks.sum(dim=2), weights[:, whole:].sum(dim=1, keepdim=True)], dim=1)


def exponential(
    token: torch.Tensor,  # int64, as are the others, which are broadcast to it
    seed: torch.Tensor,
    prompt: torch.Tensor,
    sample: torch.Tensor,
    position: torch.Tensor,
    *,
    second: bool = False,  # a second variable, from the other two words of the token's draw
) -> torch.Tensor:  # float64
    """Exponential variables, never 0 and never infinite, exact in both tails down to probabilities of 2^-64."""
    given = token, position, sample, prompt, seed & _WORD, seed >> 32 & _WORD
    if token.device.type == "cpu":  # NumPy takes half the time of PyTorch
        words = [torch.from_numpy(word) for word in philox(*(each.numpy() for each in given))]
    else:
        words = philox(*given)
    high, low = words[2:] if second else words[:2]
    # 63 bits make a number below one half, the last bit says at which end of (0, 1) it lies.
    half = (high >> 1).double() * 2.0**-32 + (low.double() + 0.5) * 2.0**-64
    return -torch.where(high & 1 == 1, torch.log1p(-half), half.log())


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> list[Any]:
    """Philox 4x32: four words from four and a key of two, each in the low half of an int64.

    They are tensors, or NumPy's arrays.
    """
    for _ in range(PHILOX_ROUNDS):
        x, y = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # the lowest 64 bits, one of them in a sign's place
        c0, c1, c2, c3 = (y >> 32 ^ c1 ^ k0) & _WORD, y, (x >> 32 ^ c3 ^ k1) & _WORD, x
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return [c0, c1 & _WORD, c2, c3 & _WORD]


@dataclass(frozen=True)
class Rows:
    """The decode rows' state on the device between steps. All tensors but the last two have the shape [rows]."""

    token: torch.Tensor  # int64  the model's next input
    position: torch.Tensor  # int64  of that token, for RoPE
    length: torch.Tensor  # int32  tokens that the row sees, that one included; 0 once the row has ended
    slot: torch.Tensor  # int64  where that token's K and V go; -1 once the row has ended
    made: torch.Tensor  # int32  tokens generated so far
    remaining: torch.Tensor  # int32  tokens that the row may still generate
    status: torch.Tensor  # int32
    start: torch.Tensor  # int32  tokens before the first one of the row's own pages
    pages: torch.Tensor  # [rows, most] int32  its own pages; -1 where there is none yet
    produced: torch.Tensor  # [rows, steps] int64  a ring: generated token i stands at i modulo steps

    def to(self, device: torch.device | str) -> Rows:
        return Rows(*(getattr(self, field.name).to(device) for field in fields(self)))


def advance(
    rows: Rows, sampled: torch.Tensor, eos: torch.Tensor, page_size: int, which: torch.Tensor | None = None
) -> None:
    """Append each row's ``sampled`` token ([rows] int64), see whether that ends it, and move on to it.

    ``eos`` ([any] int64) may be padded with -1. With ``which`` ([rows] int32) it is several such sets ([sets, any]).
    A row that ends keeps its last input, has no slot, and sees no positions any more. A row that lacks the page for its
    token moves on without a slot: it can run again once it is given a page and a slot.
    """
    running = rows.status == RUNNING
    real = running & (sampled >= 0)
    at = real.nonzero().squeeze(1)
    rows.produced[at, (rows.made[at] % rows.produced.shape[1]).long()] = sampled[at]
    rows.made[at] += 1
    rows.remaining[at] -= 1
    stopped = real & (sampled[:, None] == (eos if which is None else eos[which])).any(dim=1)
    full = real & ~stopped & (rows.remaining <= 0)

    moving = (real & ~stopped & ~full).nonzero().squeeze(1)
    rows.token[moving] = sampled[moving]
    rows.position[moving] += 1
    before = rows.length[moving]
    rows.length[running] = 0
    rows.length[moving] = before + 1
    offset = before - rows.start[moving]
    index = offset // page_size
    page = rows.pages[moving, index.clamp(max=rows.pages.shape[1] - 1)].long()
    page = torch.where(index < rows.pages.shape[1], page, -1)
    rows.slot[running] = -1
    rows.slot[moving] = torch.where(page >= 0, page * page_size + offset % page_size, -1)
    rows.status[running & ~real] = NO_TOKEN
    rows.status[stopped] = STOPPED
    rows.status[full] = FULL
    rows.status[moving[page < 0]] = NO_PAGE
