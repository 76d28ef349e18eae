"""From logits to tokens: greedy or sampled, through transformers' own processors.

Noise depends on (seed, prompt index, sample index, position) alone, so it does not matter which requests share a step.
A token is drawn by inverting the distribution function in the order of the vocabulary, however it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as processors

from .architecture import base_model
from .options import Options, make_processors
from .request import Request

# These cut off unlikely tokens, and do so in the order of the scores: the best ones may be all they need to see.
_CUTTING = (processors.TopKLogitsWarper, processors.TopPLogitsWarper, processors.MinPLogitsWarper)

# These look at the scores alone, never at the tokens before: they can be given all rows at once.
_BLIND_TO_HISTORY = (
    *_CUTTING,
    processors.TemperatureLogitsWarper,
    processors.TopHLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.SuppressTokensLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
)

_MINIMA = (processors.MinLengthLogitsProcessor, processors.MinNewTokensLengthLogitsProcessor)

NO_DISTRIBUTION = "the model gave logits that are not numbers (NaN or infinite): there is nothing to draw from"
_TIES = 64  # a shortlist for top-k has this many more than k: with bfloat16 logits there are many equals
_SHORTLIST = 1024  # for cuts whose number is not known beforehand
_WIDER = 16  # times, when a shortlist was too short
_DOUBT = 1e-6  # relative: closer to the edge of a nucleus, float32 rounding decides, and transformers' is taken
_BLOCK = 512  # of the vocabulary: the distribution function is inverted among blocks, then within one
_OPEN, _INVALID = -1, -2  # instead of a token: the shortlist was too short; there is no distribution


class Sampler:
    """``options``: by a request's index. ``record(requests, logits, scores)`` is told before tokens are picked."""

    def __init__(
        self,
        model: nn.Module,
        options: Sequence[Options],
        seed: int | None,
        record: Callable[[Sequence[Request], torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        self._record = record
        self._model = base_model(model)
        self._options = options[0]
        self._seed = seed
        self._lists: dict[tuple[int, int], tuple[LogitsProcessorList, LogitsProcessorList]] = {}

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """The next token of each request; ``logits`` is [requests, vocabulary] float32.

        They are left as they are: what the model gave may have been kept by a hook of its owner.
        """
        tokens: list[int] = []
        rows = _rows_at_once(logits)
        for begin in range(0, len(requests), rows):
            tokens += self._next(logits[begin : begin + rows], requests[begin : begin + rows])
        return tokens

    def _next(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        scores = self._with_history(logits, requests)
        together = self._processors(requests[0])[1]  # the same for all: they depend on options alone
        if self._record is not None:
            self._record(requests, logits, _run(together, scores))
        if not self._options.do_sample:
            return _run(together, scores).argmax(dim=-1).tolist()  # the lowest index among equals
        assert self._seed is not None
        return draw(scores, _to(uniforms(self._seed, requests), scores.device), together)

    # -- processors that look back -----------------------------------------------------------------------------

    def _with_history(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """The scores after those processors that look at the tokens before, or at their number."""
        own = [self._processors(request)[0] for request in requests]
        scores = logits
        for place, processor in enumerate(own[0]):  # options decide which there are; the prompt, with what values
            if _penalises_repetition(processor):
                scores = processor(_to(_padded(requests), scores.device), scores)
            elif type(processor) in _MINIMA:
                short = [row for row, request in enumerate(requests) if _is_short(own[row][place], request)]
                scores = self._without_eos(scores, short)
            else:
                rest = [LogitsProcessorList(every[place:]) for every in own]
                return torch.cat([self._alone(*row) for row in zip(rest, scores.split(1), requests, strict=True)])
        return scores

    def _alone(self, own: LogitsProcessorList, scores: torch.Tensor, request: Request) -> torch.Tensor:
        """Each row by itself: a processor of whatever kind sees the row's own tokens, without padding."""
        ids = request.tokens(0, request.length).astype(np.int64)
        return own(_to(ids[None], scores.device), scores.clone())  # it may work in place

    def _without_eos(self, scores: torch.Tensor, rows: list[int]) -> torch.Tensor:
        eos = [token for token in sorted(self._options.eos_token_ids) if 0 <= token < scores.shape[-1]]
        if not rows or not eos:
            return scores
        where = np.repeat(rows, len(eos)), np.tile(eos, len(rows))
        nothing = torch.full((), -torch.inf, dtype=scores.dtype, device=scores.device)
        return scores.index_put(tuple(_to(index, scores.device) for index in where), nothing)

    def _processors(self, request: Request) -> tuple[LogitsProcessorList, LogitsProcessorList]:
        """Those that look back, or may do so; then those that do not. In transformers' order."""
        key = (len(request.prompt_ids), request.max_new_tokens)
        if key not in self._lists:
            every = make_processors(self._model, self._options, *key)
            blind = 0
            while blind < len(every) and type(every[len(every) - 1 - blind]) in _BLIND_TO_HISTORY:
                blind += 1
            split = len(every) - blind
            self._lists[key] = LogitsProcessorList(every[:split]), LogitsProcessorList(every[split:])
        return self._lists[key]


def _penalises_repetition(processor: LogitsProcessor) -> bool:
    """In whatever order the tokens come, and however often each of them."""
    return type(processor) is processors.RepetitionPenaltyLogitsProcessor and processor.prompt_ignore_length is None


def _is_short(processor: LogitsProcessor, request: Request) -> bool:
    """Whether a processor of ``_MINIMA`` forbids the request to end."""
    if isinstance(processor, processors.MinLengthLogitsProcessor):
        return request.length < processor.min_length
    assert isinstance(processor, processors.MinNewTokensLengthLogitsProcessor)
    return request.length - processor.prompt_length_to_skip < processor.min_new_tokens


def _padded(requests: Sequence[Request]) -> np.ndarray:  # [requests, longest]
    """All tokens of each request, then its first one again and again, which adds nothing to the set of them."""
    ids = np.empty((len(requests), max(request.length for request in requests)), dtype=np.int64)
    for row, request in zip(ids, requests, strict=True):
        row[: request.length] = request.tokens(0, request.length)
        row[request.length :] = row[0]
    return ids


def _run(some: Sequence[LogitsProcessor], scores: torch.Tensor) -> torch.Tensor:
    """Processors that do not look back."""
    ids = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
    for processor in some:
        scores = processor(ids, scores)
    return scores


# -- drawing ---------------------------------------------------------------------------------------------------


def draw(scores: torch.Tensor, uniform: torch.Tensor, warpers: Sequence[LogitsProcessor]) -> list[int]:
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
    if width >= scores.shape[-1] or not any(type(warper) in _CUTTING for warper in warpers):
        return _invert(_run(warpers, scores).softmax(dim=-1), uniform)
    ids, short, certain = _shortlist(scores, warpers, width)
    place = _invert(short.softmax(dim=-1), uniform)
    token = ids.gather(-1, place.clamp(min=0)[:, None])[:, 0]
    return torch.where(place == _INVALID, place, torch.where(certain, token, _OPEN))


def _shortlist(
    scores: torch.Tensor, warpers: Sequence[LogitsProcessor], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best tokens [rows, width], in the vocabulary's order; their scores after all warpers; and in which rows the
    warpers would leave no other.
    """
    cut = next(place for place, warper in enumerate(warpers) if type(warper) in _CUTTING)
    scores = _run(warpers[:cut], scores)
    ids = scores.topk(width, sorted=False).indices.sort(dim=-1).values
    short, certain = _cut(scores, scores.gather(-1, ids), warpers[cut])
    return ids, _run(warpers[cut + 1 :], short), certain


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


def uniforms(seed: int, requests: Sequence[Request]) -> np.ndarray:  # [requests] float64
    """A number in (0, 1), neither end included, that belongs to each request and its position."""
    counter = [(len(request.generated), request.sample, request.index, 0) for request in requests]
    bits = philox(np.array(counter, dtype=np.uint64).T, seed)
    # 52 bits: with one more, the half that is added would round the largest number up to 1.
    return (((bits[0] << 20) | (bits[1] >> 12)).astype(np.float64) + 0.5) * 2.0**-52


def philox(counter: np.ndarray, key: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Philox4x32 with ten rounds: four words of 32 random bits for each four of ``counter`` [4, n] and a 64-bit key.

    No state, all rows at once, and arithmetic that a kernel can repeat bit for bit.
    """
    low = 0xFFFFFFFF
    a, b, c, d = counter.astype(np.uint64)
    key_a, key_b = key & low, key >> 32
    for _ in range(10):
        x, y = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (y >> 32) ^ b ^ key_a, y & low, (x >> 32) ^ d ^ key_b, x & low
        key_a, key_b = (key_a + 0x9E3779B9) & low, (key_b + 0xBB67AE85) & low
    return a, b, c, d


# -- devices ---------------------------------------------------------------------------------------------------


def _rows_at_once(logits: torch.Tensor) -> int:
    """On a CPU, what each thread works on stays in its cache; elsewhere, the copies that warpers make stay small."""
    scores = (1 << 19) * torch.get_num_threads() if logits.device.type == "cpu" else 1 << 25
    return max(1, scores // logits.shape[-1])


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
