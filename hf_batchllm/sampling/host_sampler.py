"""From logits to tokens, on the host: greedy or sampled, through transformers' own processors.

Noise depends on (seed, prompt index, sample index, position) alone, or, with a seed for each prompt, on (its seed,
sample index, position): it does not matter which requests share a step.
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
from ..model.transfers import to_device
from ..notices import Notices
from ..planning.requests_and_prefixes import Request
from .processor_chains import ChainLayout, ProcessorChain, ProcessorChains, apply_blind, apply_looking_back

# These cut off unlikely tokens in the order of the scores: the best tokens may be all they need to see.
_CUTTING = (processors.TopKLogitsWarper, processors.TopPLogitsWarper, processors.MinPLogitsWarper)

# These give the same, whether tokens that were cut off are left out or have scores of -inf.
_AFTER_A_CUT = (*_CUTTING, processors.TemperatureLogitsWarper, processors.LogitNormalization)

NO_DISTRIBUTION = (
    "there is nothing to draw from: the model gave logits that are not numbers (NaN or infinite), or processors left "
    "no token a chance"
)
_TIES = 64  # tokens that a shortlist for top-k has beyond k: bfloat16 logits are often equal
_SHORTLIST = 1024  # tokens, for cuts that keep a number not known beforehand
_WIDER = 16  # times as many, when a shortlist was too short
_DOUBT = 1e-6  # relative: closer to the edge of a nucleus, rounding decides, and transformers' own is taken
_BLOCK = 512  # tokens: the distribution function is inverted among blocks, then within one
_TOO_SHORT, _INVALID = -1, -2  # instead of a token: the shortlist does not tell; there is no distribution
SCORES_AT_ONCE = 1 << 25  # that are processed at a time on a device: processors make copies of them
_SCORES_PER_CPU_THREAD = 1 << 19  # so many stay in a core's cache

RecordScores = Callable[[Sequence[Request], torch.Tensor, torch.Tensor], None]


class HostSampler:
    """Picks the next token of each request. ``options``: of each prompt, by a request's ``index``.

    ``record`` is called before tokens are picked: with the requests of some rows, their logits [rows, vocabulary], and
    their scores after all processors. The tensors are valid until it returns.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Sequence[Options],
        seed: Seeds | None,
        record: RecordScores | None = None,
        notices: Notices | None = None,
    ) -> None:
        self._chains = ProcessorChains(model, options, notices)
        self._seed = seed
        self._record = record

    def may_repeat(self, requests: Sequence[Request]) -> bool:
        """Whether a step of these requests may be picked from twice."""
        return self._chains.may_repeat(requests)

    @torch.no_grad()
    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """The next token of each request; ``logits`` is [requests, vocabulary] float32.

        Logits are not written to: a hook of the model's owner may have kept them.
        """
        self._chains.forget_done()
        chains = [self._chains.of(request) for request in requests]
        groups: dict[ChainLayout, list[int]] = {}
        for row, chain in enumerate(chains):
            groups.setdefault(chain.layout, []).append(row)
        tokens = [0] * len(requests)
        at_once = rows_at_once(logits)
        for group in groups.values():
            for begin in range(0, len(group), at_once):
                rows = group[begin : begin + at_once]
                # As a rule there is one group, whose rows lie side by side: no copy.
                some = logits[rows] if len(groups) > 1 else logits[begin : begin + at_once]
                picked = self._pick(some, [requests[row] for row in rows], [chains[row] for row in rows])
                for row, token in zip(rows, picked, strict=True):
                    tokens[row] = token
        return tokens

    def _pick(self, logits: torch.Tensor, requests: Sequence[Request], chains: Sequence[ProcessorChain]) -> list[int]:
        """The chains have the same layout, and so the same options and the same blind processors."""
        scores, blind = apply_looking_back(logits, requests, chains), chains[0].blind
        sampled = chains[0].layout.options.do_sample
        if self._record is not None or not sampled:
            final = apply_blind(blind, scores)
            if self._record is not None:
                self._record(requests, logits, final)
            if not sampled:
                greedy: list[int] = final.argmax(dim=-1).tolist()  # the lowest index among equals
                return greedy
        assert self._seed is not None
        return draw_tokens(scores, to_device(uniforms(self._seed, requests), scores.device), blind)


# -- drawing ---------------------------------------------------------------------------------------------------


def draw_tokens(scores: torch.Tensor, uniform: torch.Tensor, warpers: Sequence[LogitsProcessor]) -> list[int]:
    """Draw a token for each row of ``scores`` [rows, vocabulary], after the ``warpers``, which are blind to history.

    It is the token at which the distribution function passes the row's ``uniform``.
    """
    width = _first_width(warpers)
    tokens = _attempt(scores, uniform, warpers, width).tolist()  # the only wait for the device, as a rule
    while missed := [row for row, token in enumerate(tokens) if token == _TOO_SHORT]:
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
    """Draw from the ``width`` best scores alone, if a warper cuts; _TOO_SHORT in rows where these do not tell.

    A row without a distribution, because of NaN or infinities, gets _INVALID.
    """
    if width >= scores.shape[-1] or not _can_be_short(warpers):
        return _invert(apply_blind(warpers, scores).softmax(dim=-1), uniform)
    ids, short, certain = _shortlist(scores, warpers, width)
    place = _invert(short.softmax(dim=-1), uniform)
    token = ids.gather(-1, place.clamp(min=0)[:, None])[:, 0]
    return torch.where(place == _INVALID, place, torch.where(certain, token, _TOO_SHORT))


def _can_be_short(warpers: Sequence[LogitsProcessor]) -> bool:
    """Whether a warper cuts, and none after it has to see the tokens that were cut off."""
    kinds = [type(warper) for warper in warpers]
    first = next((place for place, kind in enumerate(kinds) if kind in _CUTTING), None)
    return first is not None and all(kind in _AFTER_A_CUT for kind in kinds[first:])


def _shortlist(
    scores: torch.Tensor, warpers: Sequence[LogitsProcessor], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best tokens [rows, width] in the vocabulary's order, their scores after all warpers, and in which rows no
    other token would be left.
    """
    cut = next(place for place, warper in enumerate(warpers) if type(warper) in _CUTTING)
    scores = apply_blind(warpers[:cut], scores)
    ids = scores.topk(width, sorted=False).indices.sort(dim=-1).values
    short, certain = _cut(scores, scores.gather(-1, ids), warpers[cut])
    return ids, apply_blind(warpers[cut + 1 :], short), certain


def _first_width(warpers: Sequence[LogitsProcessor]) -> int:
    first = next((warper for warper in warpers if type(warper) in _CUTTING), None)
    return first.top_k + _TIES if isinstance(first, processors.TopKLogitsWarper) else _SHORTLIST


def _cut(scores: torch.Tensor, short: torch.Tensor, warper: LogitsProcessor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cutting warper leaves of the best scores, and in which rows it would cut off all others.

    No score outside ``short`` is above the lowest within: where that one is cut off, so are they.
    """
    lowest = short.amin(dim=-1, keepdim=True)
    if isinstance(warper, processors.TopPLogitsWarper):  # the only one that also needs the mass of the others
        left, certain = _nucleus(scores, short, warper)
    else:
        left, certain = warper(None, short), torch.ones_like(lowest[:, 0], dtype=torch.bool)
    return left, certain & ~((short == lowest) & (left > -torch.inf)).any(dim=-1)


def _nucleus(
    scores: torch.Tensor, short: torch.Tensor, warper: processors.TopPLogitsWarper
) -> tuple[torch.Tensor, torch.Tensor]:
    """The warper's rule for the best scores, in float64, and in which rows rounding to float32 cannot change it.

    Which of several equals at the edge stay is not defined: the warper's own sort is not stable either.
    """
    weights = scores.softmax(dim=-1)
    # The sum within softmax has an error that would show in the result; these sums of sums have next to none.
    total = _sums(weights)[0].double().sum(dim=-1, keepdim=True)
    best = scores.amax(dim=-1, keepdim=True)
    ordered, order = short.sort(dim=-1)
    mass = (ordered - best).exp().double() * (weights.amax(dim=-1, keepdim=True).double() / total)
    reached = 1 - mass.sum(dim=-1, keepdim=True) + _running_sums(mass)  # by each token and all worse ones
    edge = 1 - warper.top_p
    removed = reached <= edge
    removed[:, -warper.min_tokens_to_keep :] = False
    doubtful = ((reached - edge).abs() < _DOUBT * edge)[:, : -warper.min_tokens_to_keep].any(dim=-1)
    left = short.masked_fill(removed.scatter(-1, order, removed), warper.filter_value)
    return left, ~doubtful


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index in each row of ``weights`` [rows, n] at which the distribution function passes ``uniform`` [rows].

    An index with a weight of 0 is never given. _INVALID where the weights' sum is 0 or not finite.
    """
    sums, blocks = _sums(weights)
    block, uniform, valid = _pass(sums, uniform)
    within, _, _ = _pass(blocks[torch.arange(len(blocks), device=blocks.device), block], uniform)
    return torch.where(valid, block * blocks.shape[-1] + within, _INVALID)


def _sums(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of blocks [rows, blocks], and the blocks [rows, blocks, size]; the last one is padded with zeros."""
    size = min(_BLOCK, weights.shape[-1])
    lacking = -weights.shape[-1] % size
    blocks = (F.pad(weights, (0, lacking)) if lacking else weights).unflatten(-1, (-1, size))
    return blocks.sum(dim=-1), blocks


def _pass(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The step at which a row's distribution function passes ``uniform``, how far into it, and whether there is one.

    In float64 and with 52 random bits, so that the far tail of a large vocabulary keeps its exact share.
    """
    reached = _running_sums(weights.double())
    total = reached[:, -1:]
    # Below the total, whatever rounding does: some step always goes beyond it, and has a weight.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(reached, target, right=True).clamp(max=weights.shape[-1] - 1)  # beyond with NaN
    before, after = F.pad(reached, (1, 0)).gather(-1, index), reached.gather(-1, index)
    into = ((target - before) / (after - before)).clamp(min=0)
    return index[:, 0], into[:, 0], (torch.isfinite(total) & (total > 0))[:, 0]


def _running_sums(weights: torch.Tensor) -> torch.Tensor:
    """The sums of each row's numbers up to each place."""
    if weights.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return weights.cumsum(dim=-1)
    # In PyTorch's deterministic mode a GPU refuses to add up floats like this.
    return weights.cpu().cumsum(dim=-1).to(weights.device)


# -- noise -----------------------------------------------------------------------------------------------------


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


# -- devices ---------------------------------------------------------------------------------------------------


def rows_at_once(logits: torch.Tensor) -> int:
    """How many rows are processed at a time."""
    on_a_cpu = logits.device.type == "cpu"
    scores = _SCORES_PER_CPU_THREAD * torch.get_num_threads() if on_a_cpu else SCORES_AT_ONCE
    return max(1, scores // logits.shape[-1])
