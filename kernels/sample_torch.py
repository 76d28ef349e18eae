"""Plain PyTorch twins of ``sample_triton``: same signatures, same results, also in place.

They pick tokens on a CPU, and are the reference in the kernels' tests.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch.nn import functional

from .sampling_recipes import Recipe, RowRecipes

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
    rows, vocabulary = logits.shape
    size = min(SAMPLE_BLOCK, vocabulary)
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
    scores = functional.pad(logits.double() / temperatures, (0, -vocabulary % size), value=-float("inf"))
    scores = scores.view(rows, -1, size)  # [rows, blocks, size]
    keys = [each.long().unsqueeze(1) for each in (seed, prompt, sample, position)]
    begin = torch.arange(0, vocabulary, size, device=logits.device)
    # Of exponential variables divided by weights, each is the smallest with a probability in proportion to its weight.
    heavy = scores.logsumexp(dim=2) - exponential(begin.expand(rows, -1), *keys, second=True).log()  # [rows, blocks]
    best, block = torch.where(heavy.isnan(), float("inf"), heavy).max(dim=1)
    inside = scores[torch.arange(rows, device=logits.device), block]  # [rows, size]
    token = begin[block].unsqueeze(1) + torch.arange(size, device=logits.device)
    tokens = begin[block] + (inside - exponential(token, *keys).log()).argmax(dim=1)
    tokens = torch.where(drawing, torch.where(best.isfinite(), tokens, -1), best_tokens)
    return tokens if out is None else out.copy_(tokens)


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
    counter = torch.broadcast_tensors(token, position, sample, prompt)
    words = philox(counter, (seed & _WORD, seed >> 32 & _WORD))
    high, low = words[2:] if second else words[:2]
    # 63 bits make a number below one half, the last bit says at which end of (0, 1) it lies.
    half = (high >> 1).double() * 2.0**-32 + (low.double() + 0.5) * 2.0**-64
    return -torch.where(high & 1 == 1, torch.log1p(-half), half.log())


def philox(
    counter: tuple[torch.Tensor, ...] | list[torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> list[torch.Tensor]:
    """Philox 4x32: four words from four and a key of two, each in the low half of an int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        (high0, low0), (high1, low1) = _times(c0, _MULTIPLIERS[0]), _times(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return [c0, c1, c2, c3]


def _times(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of a product, without passing int64's sign."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


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
