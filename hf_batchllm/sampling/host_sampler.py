"""From logits to tokens, on the host: greedy or sampled, through transformers' own processors.

How a token is drawn does not matter: from all scores, or from the best ones where these tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import LogitsProcessor
from transformers.generation import logits_process as processors

from ..errors import NothingToDrawError
from ..inputs.options import Options
from ..inputs.seeds import Seeds
from ..kernels.lists.sampling_recipes import Recipe
from ..kernels.reference.sample_torch import block_sums
from ..model.float64 import in_float64
from ..model.transfers import to_device
from ..notices import Notices
from ..planning.requests_and_prefixes import Request
from .device_options import cuts_of
from .grammar_masks import GrammarMasks, TokenMasks
from .noise import INVALID, Noise
from .processor_chains import ChainLayout, ProcessorChain, ProcessorChains
from .rows_together import Histories, TokensSoFar, apply_blind, apply_looking_back
from .sampling_kernels import SamplingKernels
from .seated_sampler import SeatedSampler

# These cut off unlikely tokens in the order of the scores: the best tokens may be all they need to see.
_CUTTING = (processors.TopKLogitsWarper, processors.TopPLogitsWarper, processors.MinPLogitsWarper)

# These give the same, whether tokens that were cut off are left out or have scores of -inf.
_AFTER_A_CUT = (*_CUTTING, processors.TemperatureLogitsWarper, processors.LogitNormalization)


_TIES = 64  # tokens that a shortlist for top-k has beyond k: bfloat16 logits are often equal
_SHORTLIST = 1024  # tokens, for cuts that keep a number not known beforehand
_WIDER = 16  # times as many, when a shortlist was too short
_DOUBT = 1e-6  # relative: closer to the edge of a nucleus, rounding decides, and transformers' own is taken
_TOO_SHORT = -2  # instead of a token: the shortlist does not tell
SCORES_AT_ONCE = 3 << 24  # that are processed at a time on a device: processors make copies of them
_SCORES_PER_CPU_THREAD = 1 << 20  # so many stay in a cache

RecordScores = Callable[[Sequence[Request], torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class _Prepared:
    requests: Sequence[Request]
    chains: dict[int, ProcessorChain]  # by the row, of those that have one
    groups: dict[ChainLayout, list[int]]  # rows whose chains have this layout
    histories: Histories
    plain: list[int]  # the other rows
    seats: torch.Tensor | None  # [plain rows]
    made: torch.Tensor | None  # [plain rows] int32  new tokens so far


class HostSampler:
    """Picks the next token of each request. ``options``: of each prompt, by a request's ``index``.

    ``record`` is called before tokens are picked: with the requests of some rows, their logits [rows, vocabulary], and
    their scores after all processors. The tensors are valid until it returns.
    ``kernels``: where the device may pick tokens as well.
    ``grammars``: what the answers' grammars allow. Masks that were begun are waited for.
    ``seated``: picks the tokens of prompts whose options ask for nothing else, whatever others need. ``plain``: whether
    a prompt is one of these.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Sequence[Options],
        seed: Seeds | None,
        record: RecordScores | None = None,
        notices: Notices | None = None,
        kernels: SamplingKernels | None = None,
        grammars: GrammarMasks | None = None,
        seated: SeatedSampler | None = None,
        plain: Sequence[bool] = (),
    ) -> None:
        self._seated = seated
        self._plain = plain
        self._kernels = kernels
        self.grammars = grammars
        self._chains = ProcessorChains(model, options, notices, grammars is not None)
        self._seed = seed
        self._record = record
        self._prepared: _Prepared | None = None
        self._tokens = TokensSoFar()
        self._cuts: dict[ChainLayout, tuple[int, Recipe] | None] = {}

    @property
    def calls_custom_code(self) -> bool:
        """Whether tokens are picked with code of the user's own."""
        return self._chains.calls_custom_code

    def may_repeat(self, requests: Sequence[Request]) -> bool:
        """Whether a step of these requests may be picked from twice."""
        return self._chains.may_repeat([each for each in requests if not (self._plain and self._plain[each.index])])

    def prepare(self, requests: Sequence[Request], device: torch.device) -> None:
        """Get ready for the next tokens of these requests, while their logits are on the way."""
        if self.grammars is not None:
            self.grammars.begin(requests)
        self._get_ready(requests, device)

    def _get_ready(self, requests: Sequence[Request], device: torch.device) -> None:
        self._chains.forget_done()
        self._tokens.forget_done()
        chains: dict[int, ProcessorChain] = {}
        groups: dict[ChainLayout, list[int]] = {}
        plain: list[int] = []
        for row, request in enumerate(requests):
            if self._seated is not None and self._plain[request.index]:
                plain.append(row)
            else:
                chain = chains[row] = self._chains.of(request)
                groups.setdefault(chain.layout, []).append(row)
        histories = Histories(requests, device, self._tokens)
        if any(layout.reads_histories for layout in groups):
            histories.send()
        seats = made = None
        if plain:
            seats = to_device(np.array([requests[row].seat for row in plain]), device)
            made = to_device(np.array([len(requests[row].generated) for row in plain], dtype=np.int32), device)
        self._prepared = _Prepared(requests, chains, groups, histories, plain, seats, made)

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """The next token of each request; ``logits`` is [requests, vocabulary] float32.

        Logits are not written to: a hook of the model's user may have kept them.
        """
        tokens: list[int] = self.without_waiting(logits, requests).tolist()
        if tokens and min(tokens) < 0:
            raise NothingToDrawError
        return tokens

    @torch.no_grad()
    def without_waiting(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:  # [requests] int64
        """The same, where the logits are; a negative number where there is nothing to draw from.

        Nothing waits for the device, unless a processor does, or a cut has to be looked at.
        """
        if self._prepared is None or self._prepared.requests is not requests:
            self._get_ready(requests, logits.device)
        assert self._prepared is not None
        ready, self._prepared = self._prepared, None
        chains, groups, histories = ready.chains, ready.groups, ready.histories
        masks = self._masks(requests, logits.device)
        at_once = rows_at_once(logits)
        picked: list[torch.Tensor] = []
        for layout, group in groups.items():
            noise = self._noise([requests[row] for row in group], logits) if layout.options.do_sample else None
            for begin in range(0, len(group), at_once):
                rows = group[begin : begin + at_once]
                # As a rule there is one group, whose rows lie side by side: no copy.
                alone = len(group) == len(requests)
                some = logits[begin : begin + at_once] if alone else logits[to_device(np.array(rows), logits.device)]
                picked.append(
                    self._pick(
                        some,
                        [requests[row] for row in rows],
                        [chains[row] for row in rows],
                        histories.some(rows),
                        None if masks is None else masks.of(rows),
                        None if noise is None else noise.of(slice(begin, begin + at_once)),
                    )
                )
        if ready.plain:  # last: what they keep of their tokens is then never kept twice
            assert self._seated is not None and ready.seats is not None and ready.made is not None
            some = logits if not groups else logits[to_device(np.array(ready.plain), logits.device)]
            picked.append(self._seated(some, ready.seats, ready.made))
        if len(picked) == 1:
            return picked[0]
        tokens = torch.cat(picked) if picked else torch.empty(0, dtype=torch.long, device=logits.device)
        if len(groups) + bool(ready.plain) > 1:
            order = np.array([row for group in [*groups.values(), ready.plain] for row in group])
            tokens = torch.empty_like(tokens).index_copy_(0, to_device(order, logits.device), tokens)
        return tokens

    def _noise(self, requests: Sequence[Request], logits: torch.Tensor) -> Noise:
        assert self._seed is not None
        return Noise.for_requests(self._seed, requests, logits.shape[1], logits.device, self._kernels)

    def _masks(self, requests: Sequence[Request], device: torch.device) -> TokenMasks | None:
        if self.grammars is None:
            return None
        made = self.grammars.of(requests)
        return made.to(device) if self._kernels is None else made.to(device, self._kernels.mask_tokens)

    def _pick(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        chains: Sequence[ProcessorChain],
        histories: Callable[[int], torch.Tensor],
        masks: TokenMasks | None,
        noise: Noise | None,
    ) -> torch.Tensor:
        """The chains have the same layout, and so the same options and the same blind processors."""
        scores, blind = apply_looking_back(logits, requests, chains, histories, masks=masks), chains[0].blind
        if self._record is not None or noise is None:
            final = apply_blind(blind, scores)
            if self._record is not None:
                self._record(requests, logits, final)
            if noise is None:
                best = final.argmax(dim=-1)  # the lowest index among equals
                if masks is None:
                    return best
                return best.masked_fill_(final.amax(dim=-1) == -torch.inf, INVALID)  # the best of none is any
        layout = chains[0].layout
        if layout not in self._cuts:
            self._cuts[layout] = cuts_of(blind, layout.options) if self._record is None else None
        cuts = self._cuts[layout]
        if cuts is not None and self._kernels is not None:  # without a wait, as the device's sampler does it
            begin, recipe = cuts
            return noise.token_of(recipe, apply_blind(blind[:begin], scores))
        return drawn(scores, noise, blind)


# -- drawing ---------------------------------------------------------------------------------------------------


def drawn(scores: torch.Tensor, noise: Noise, warpers: Sequence[LogitsProcessor]) -> torch.Tensor:  # [rows] int64
    """Draw a token for each row of ``scores`` [rows, vocabulary], after the ``warpers``, which are blind to history.

    INVALID in rows without a distribution.
    """
    width = _first_width(warpers)
    tokens = _attempt(scores, noise, warpers, width)
    # Where the best scores may not tell, whether they do is the only wait for the device, as a rule.
    while width < scores.shape[-1] and _can_be_short(warpers):
        missed = [row for row, token in enumerate(tokens.tolist()) if token == _TOO_SHORT]
        if not missed:
            break
        width *= _WIDER
        tokens[missed] = _attempt(scores[missed], noise.of(missed), warpers, width)
    return tokens


def _attempt(scores: torch.Tensor, noise: Noise, warpers: Sequence[LogitsProcessor], width: int) -> torch.Tensor:
    """Draw from the ``width`` best scores alone, if a warper cuts; _TOO_SHORT in rows where these do not tell.

    A row without a distribution, because of NaN or infinities, gets INVALID.
    """
    if width >= scores.shape[-1] or not _can_be_short(warpers):
        return noise.token(apply_blind(warpers, scores))
    ids, short, certain = _shortlist(scores, warpers, width)
    token = noise.token(short, ids)
    return torch.where((token == INVALID) | certain, token, _TOO_SHORT)


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
    total = in_float64(block_sums(weights)).sum(dim=-1, keepdim=True)
    best = scores.amax(dim=-1, keepdim=True)
    ordered, order = short.sort(dim=-1)
    mass = in_float64((ordered - best).exp()) * (in_float64(weights.amax(dim=-1, keepdim=True)) / total)
    reached = 1 - mass.sum(dim=-1, keepdim=True) + _running_sums(mass)  # by each token and all worse ones
    edge = 1 - warper.top_p
    removed = reached <= edge
    removed[:, -warper.min_tokens_to_keep :] = False
    doubtful = ((reached - edge).abs() < _DOUBT * edge)[:, : -warper.min_tokens_to_keep].any(dim=-1)
    removed, doubtful = removed.to(scores.device), doubtful.to(scores.device)  # float64 may have been on the host
    left = short.masked_fill(removed.scatter(-1, order, removed), warper.filter_value)
    return left, ~doubtful


def _running_sums(mass: torch.Tensor) -> torch.Tensor:
    """The sums of each row's numbers up to each place."""
    if mass.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return mass.cumsum(dim=-1)
    # In PyTorch's deterministic mode a GPU refuses to add up floats like this.
    return mass.cpu().cumsum(dim=-1).to(mass.device)


# -- devices ---------------------------------------------------------------------------------------------------


def rows_at_once(logits: torch.Tensor) -> int:
    """How many rows are processed at a time."""
    on_a_cpu = logits.device.type == "cpu"
    scores = _SCORES_PER_CPU_THREAD * torch.get_num_threads() if on_a_cpu else SCORES_AT_ONCE
    return max(1, scores // logits.shape[-1])
