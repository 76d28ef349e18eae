"""From logits to tokens: greedy or sampled, through transformers' own processors.

Noise depends on (seed, prompt index, sample index, position) alone, so it does not matter which requests share a step;
with a seed for each prompt, on (its seed, sample index, position).
A token is drawn by inverting the distribution function in the order of the vocabulary, however it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LogitsProcessor
from transformers.generation import logits_process as processors

from ..inputs.options import Options
from ..inputs.seeds import Seeds, noise_key
from ..notices import Notices
from ..planning.units import Request
from .processor_chains import Chain, Chains, Layout, look_back, run, to_device

# These cut off unlikely tokens, and do so in the order of the scores: the best ones may be all they need to see.
_CUTTING = (processors.TopKLogitsWarper, processors.TopPLogitsWarper, processors.MinPLogitsWarper)

# To these it makes no difference whether tokens are left out that have been cut off, or have scores of -inf.
_AFTER_A_CUT = (*_CUTTING, processors.TemperatureLogitsWarper, processors.LogitNormalization)

NO_DISTRIBUTION = (
    "there is nothing to draw from: the model gave logits that are not numbers (NaN or infinite), or processors left "
    "no token a chance"
)
_TIES = 64  # a shortlist for top-k has this many more than k: with bfloat16 logits there are many equals
_SHORTLIST = 1024  # for cuts whose number is not known beforehand
_WIDER = 16  # times, when a shortlist was too short
_DOUBT = 1e-6  # relative: closer to the edge of a nucleus, float32 rounding decides, and transformers' is taken
_BLOCK = 512  # of the vocabulary: the distribution function is inverted among blocks, then within one
_OPEN, _INVALID = -1, -2  # instead of a token: the shortlist was too short; there is no distribution

Record = Callable[[Sequence[Request], torch.Tensor, torch.Tensor], None]


class HostSampler:
    """``options``: by a request's index.

    ``record`` is told of each token that is about to be picked: the requests of some rows, the logits of those rows
    [rows, vocabulary], and their scores after all processors. All of it is good until it returns.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Sequence[Options],
        seed: Seeds | None,
        record: Record | None = None,
        notices: Notices | None = None,
    ) -> None:
        self._chains = Chains(model, options, notices)
        self._seed = seed
        self._record = record

    @torch.no_grad()
    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """The next token of each request; ``logits`` is [requests, vocabulary] float32.

        They are left as they are: what the model gave may have been kept by a hook of its owner.
        """
        self._chains.forget_done()
        chains = [self._chains.of(request) for request in requests]
        alike: dict[Layout, list[int]] = {}
        for row, chain in enumerate(chains):
            alike.setdefault(chain.layout, []).append(row)
        tokens = [0] * len(requests)
        at_once = rows_at_once(logits)
        for group in alike.values():
            for begin in range(0, len(group), at_once):
                rows = group[begin : begin + at_once]
                # As a rule there is one group, whose rows lie side by side: no copy.
                some = logits[rows] if len(alike) > 1 else logits[begin : begin + at_once]
                picked = self._next(some, [requests[row] for row in rows], [chains[row] for row in rows])
                for row, token in zip(rows, picked, strict=True):
                    tokens[row] = token
        return tokens

    def _next(self, logits: torch.Tensor, requests: Sequence[Request], chains: Sequence[Chain]) -> list[int]:
        """The chains have the same Layout, and so the same options and the same end."""
        scores, blind = look_back(logits, requests, chains), chains[0].blind
        sampled = chains[0].layout.options.do_sample
        final = run(blind, scores) if self._record is not None or not sampled else None
        if self._record is not None:
            self._record(requests, logits, final)
        if not sampled:
            return final.argmax(dim=-1).tolist()  # the lowest index among equals
        assert self._seed is not None
        return draw_tokens(scores, to_device(uniforms(self._seed, requests), scores.device), blind)


# -- drawing ---------------------------------------------------------------------------------------------------


def draw_tokens(scores: torch.Tensor, uniform: torch.Tensor, warpers: Sequence[LogitsProcessor]) -> list[int]:
    """A token a row from the softmax of what the warpers, blind to history, make of ``scores`` [rows, vocabulary].

    It is the one at which the distribution function passes the row's ``uniform``.
    """
    width = _first_width(warpers)
    tokens = _attempt(scores, uniform, warpers, width).tolist()  # the only wait for the device, as a rule
    while missed := [row for row, token in enumerate(tokens) if token == _OPEN]:
        width *= _WIDER
        again = _attempt(scores[missed], uniform[missed], warpers, width).tolist()
        for row, token in zip(missed, again, strict=True):
            tokens[row] = token
    if _INVALID in tokens:
        raise RuntimeError(NO_DISTRIBUTION)
    return tokens


def _attempt(
    scores: torch.Tensor, uniform: torch.Tensor, warpers: Sequence[LogitsProcessor], width: int
) -> torch.Tensor:
    """If a warper cuts, by the ``width`` best scores alone; _OPEN in rows where they do not tell all.

    A row without a distribution, because of NaN or infinities, gets _INVALID.
    """
    if width >= scores.shape[-1] or not _can_be_short(warpers):
        return _invert(run(warpers, scores).softmax(dim=-1), uniform)
    ids, short, certain = _shortlist(scores, warpers, width)
    place = _invert(short.softmax(dim=-1), uniform)
    token = ids.gather(-1, place.clamp(min=0)[:, None])[:, 0]
    return torch.where(place == _INVALID, place, torch.where(certain, token, _OPEN))


def _can_be_short(warpers: Sequence[LogitsProcessor]) -> bool:
    """Whether some warper cuts, and no other one after it would have to see what it has cut off."""
    kinds = [type(warper) for warper in warpers]
    first = next((place for place, kind in enumerate(kinds) if kind in _CUTTING), None)
    return first is not None and all(kind in _AFTER_A_CUT for kind in kinds[first:])


def _shortlist(
    scores: torch.Tensor, warpers: Sequence[LogitsProcessor], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best tokens [rows, width], in the vocabulary's order; their scores after all warpers; and in which rows the
    warpers would leave no other.
    """
    cut = next(place for place, warper in enumerate(warpers) if type(warper) in _CUTTING)
    scores = run(warpers[:cut], scores)
    ids = scores.topk(width, sorted=False).indices.sort(dim=-1).values
    short, certain = _cut(scores, scores.gather(-1, ids), warpers[cut])
    return ids, run(warpers[cut + 1 :], short), certain


def _first_width(warpers: Sequence[LogitsProcessor]) -> int:
    first = next((warper for warper in warpers if type(warper) in _CUTTING), None)
    return first.top_k + _TIES if isinstance(first, processors.TopKLogitsWarper) else _SHORTLIST


def _cut(scores: torch.Tensor, short: torch.Tensor, warper: LogitsProcessor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cutting warper leaves of the best scores; and in which rows it would take away all others.

    No score outside ``short`` is above the lowest within: where that one goes, so do they.
    """
    lowest = short.amin(dim=-1, keepdim=True)
    if isinstance(warper, processors.TopPLogitsWarper):  # the only one to which the mass of the others matters
        left, certain = _nucleus(scores, short, warper)
    else:
        left, certain = warper(None, short), torch.ones_like(lowest[:, 0], dtype=torch.bool)
    return left, certain & ~((short == lowest) & (left > -torch.inf)).any(dim=-1)


def _nucleus(
    scores: torch.Tensor, short: torch.Tensor, warper: processors.TopPLogitsWarper
) -> tuple[torch.Tensor, torch.Tensor]:
    """The warper's rule for the best scores, in float64; and in which rows rounding to float32 cannot matter to it.

    Which of several equals at the edge stay is as open as it is with the warper, whose sort is not stable.
    """
    weights = scores.softmax(dim=-1)
    # Softmax adds up a long row with an error that is seen in the result; these sums of sums have next to none.
    total = _sums(weights)[0].double().sum(dim=-1, keepdim=True)
    best = scores.amax(dim=-1, keepdim=True)
    ordered, order = short.sort(dim=-1)
    mass = (ordered - best).exp().double() * (weights.amax(dim=-1, keepdim=True).double() / total)
    reached = 1 - mass.sum(dim=-1, keepdim=True) + mass.cumsum(dim=-1)  # by a token and all that are worse
    edge = 1 - warper.top_p
    removed = reached <= edge
    removed[:, -warper.min_tokens_to_keep :] = False
    doubtful = ((reached - edge).abs() < _DOUBT * edge)[:, : -warper.min_tokens_to_keep].any(dim=-1)
    left = short.masked_fill(removed.scatter(-1, order, removed), warper.filter_value)
    return left, ~doubtful


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index in each row of ``weights`` [rows, n] at which the distribution function passes ``uniform`` [rows].

    An index with a weight of 0 never comes. _INVALID where the weights have no sum.
    """
    sums, blocks = _sums(weights)
    block, uniform, valid = _pass(sums, uniform)
    within, _, _ = _pass(blocks[torch.arange(len(blocks), device=blocks.device), block], uniform)
    return torch.where(valid, block * blocks.shape[-1] + within, _INVALID)


def _sums(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of blocks [rows, blocks], and the blocks themselves [rows, blocks, size]; zeros fill up the last one."""
    size = min(_BLOCK, weights.shape[-1])
    lacking = -weights.shape[-1] % size
    blocks = (F.pad(weights, (0, lacking)) if lacking else weights).unflatten(-1, (-1, size))
    return blocks.sum(dim=-1), blocks


def _pass(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the distribution function of a row passes ``uniform``, how far into that step, and whether there is one.

    In float64 and with 52 random bits: the far tail of a large vocabulary keeps its exact share.
    """
    reached = weights.double().cumsum(dim=-1)
    total = reached[:, -1:]
    # Below the total, whatever rounding does: so there is always a step that goes beyond, and it has a weight.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(reached, target, right=True).clamp(max=weights.shape[-1] - 1)  # or nothing is a number
    before, after = F.pad(reached, (1, 0)).gather(-1, index), reached.gather(-1, index)
    into = ((target - before) / (after - before)).clamp(min=0)
    return index[:, 0], into[:, 0], (torch.isfinite(total) & (total > 0))[:, 0]


# -- noise -----------------------------------------------------------------------------------------------------


def uniforms(seeds: Seeds, requests: Sequence[Request]) -> np.ndarray:  # [requests] float64
    """A number in (0, 1), neither end included, that belongs to each request and its position."""
    noise = [noise_key(seeds, request.index) for request in requests]
    counter = [
        (len(request.generated), request.sample, number, 0)
        for request, (_, number) in zip(requests, noise, strict=True)
    ]
    bits = philox(np.array(counter, dtype=np.uint64).T, np.array([seed for seed, _ in noise], dtype=np.uint64))
    # 52 bits: with one more, the half that is added would round the largest number up to 1.
    return (((bits[0] << 20) | (bits[1] >> 12)).astype(np.float64) + 0.5) * 2.0**-52


def philox(counter: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Philox4x32 with ten rounds: four words of 32 random bits for each four of ``counter`` [4, n] and its ``key`` [n].

    No state, all rows at once, and arithmetic that a kernel can repeat bit for bit.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b, c, d = counter.astype(np.uint64)
    key_a, key_b = key & low, key >> half
    for _ in range(10):
        x, y = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (y >> half) ^ b ^ key_a, y & low, (x >> half) ^ d ^ key_b, x & low
        key_a, key_b = (key_a + np.uint64(0x9E3779B9)) & low, (key_b + np.uint64(0xBB67AE85)) & low
    return a, b, c, d


# -- devices ---------------------------------------------------------------------------------------------------


def rows_at_once(logits: torch.Tensor) -> int:
    """On a CPU, what each thread works on stays in its cache; elsewhere, the copies that warpers make stay small."""
    scores = (1 << 19) * torch.get_num_threads() if logits.device.type == "cpu" else 1 << 25
    return max(1, scores // logits.shape[-1])
