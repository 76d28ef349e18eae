"""What ends a sequence: tokens, strings, criteria of the user's own, time. With ``generate``'s meaning, for each row.

transformers makes the list of criteria; here it is taken apart by what each kind needs. Nothing waits for the device:
tokens are looked at when they are collected, and whatever a row has run beyond its end is cut off then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.generation import stopping_criteria as criteria
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from ..errors import OptionValueError, TokenizerError
from ..inputs.base_model import base_model
from ..inputs.options import Options, config_for_prompt
from ..inputs.processors_and_criteria import CRITERIA, Factory, call_factory, factory_of, shared_list
from ..model.runner import current_device
from ..notices import Notices
from ..planning.units import FinishReason, Request
from .host_sampler import NO_DISTRIBUTION
from .stop_strings import KnownStrings, _Strings

Scores = Callable[[Request, int], Any]  # a request, a number of its new tokens -> what criteria are told of them
Ends = dict[int, tuple[int, FinishReason | None]]  # row -> how many of its new tokens are real, and why no more are


_LONG_PREPARATION = 500_000  # tokens gone through for stop strings: 60,000 take about a second


@dataclass(frozen=True, eq=False)
class StopRules:
    """What ends the sequences of some prompts, beside being as long as they may become."""

    stop_tokens: frozenset[int] = frozenset()  # the device has to know the same ones
    max_lengths: tuple[int, ...] = ()  # of the user's own MaxLengthCriteria; prompts count, and padding
    deadlines: tuple[tuple[float | None, float], ...] = ()  # since when (None: the call's beginning), and how long
    strings: tuple[StopStringCriteria, ...] = ()
    others: tuple[Any, ...] = ()  # called for each sequence by itself
    factory: Factory | None = None  # of others, for each sequence its own

    @property
    def looks(self) -> bool:
        """Whether the host has to look at more than single tokens."""
        return bool(self.strings or self.others or self.factory)

    @property
    def can_stop(self) -> bool:
        """Whether a sequence may end before it is as long as it may become, if there is time."""
        return bool(self.stop_tokens) or self.looks

    def limit(self, prompt_tokens: int, new_tokens: int) -> int:
        """How many new tokens there may be where the options allow ``new_tokens``.

        A MaxLengthCriteria takes the place of the options' length. It is asked after each token, so there is one.
        """
        if not self.max_lengths or new_tokens <= 0:  # then the options alone are wrong already
            return new_tokens
        return max(1, min(self.max_lengths) - prompt_tokens)


def rules_of_each(
    model: nn.Module,
    options: Sequence[Options],
    tokenizer: Callable[[], Any],
    in_tensors: bool,
    notices: Notices,
    known: KnownStrings,
) -> list[StopRules]:
    """Of each prompt; those with the same options have the same rules."""
    _tell_of_long_preparation(model, options, notices)
    made = {each: rules_of(model, each, tokenizer, known) for each in dict.fromkeys(options)}
    rules = [made[each] for each in options]
    several = in_tensors and sum(each.num_return_sequences for each in options) > 1 and options[0].num_beams == 1
    # Each row is filled up from where it ends. ``generate``, without an EOS token, runs it on until all rows end.
    if several and options[0].pad_token_id is None and (rules[0].can_stop or rules[0].deadlines):
        raise OptionValueError("pad_token_id", "is None, and rows may end at different lengths: set it")
    return rules


def _tell_of_long_preparation(model: nn.Module, options: Sequence[Options], notices: Notices) -> None:
    sets = {_strings_of(each) for each in dict.fromkeys(options)} - {None}
    vocabulary = base_model(model).config.get_text_config(decoder=True).vocab_size
    if len(sets) > 1 and len(sets) * vocabulary > _LONG_PREPARATION:
        notices(
            "stop_strings",
            f"prompts have {len(sets):,} different `stop_strings`, and for each of them all {vocabulary:,} tokens of "
            "the vocabulary are gone through first, which takes seconds: the same for all prompts need one pass",
        )


def _strings_of(options: Options) -> tuple[str, ...] | None:
    strings = options.config.stop_strings
    return None if strings is None else (strings,) if isinstance(strings, str) else tuple(strings)


def rules_of(
    model: nn.Module, options: Options, tokenizer: Callable[[], Any], known_strings: KnownStrings
) -> StopRules:
    """As ``generate`` has them: of the user's criteria, one of a kind that the options ask for takes its place."""
    mine = shared_list(options.arguments.stopping_criteria)
    config = config_for_prompt(options, 1, 1)
    config.is_assistant = False  # it drafts for nobody here
    strings = config.stop_strings
    found = options.arguments.tokenizer
    if strings is not None and found is None:
        found = _tokenizer_for_strings(tokenizer)
    of_strings = _strings_of(options)
    known = None
    try:
        if of_strings is not None and not any(type(each) is StopStringCriteria for each in mine):
            known = known_strings.get(found, of_strings)
        if known is not None:
            config.stop_strings = None
        merged = base_model(model)._get_stopping_criteria(config, StoppingCriteriaList(mine), found)
    except Exception as error:
        if strings is None:
            raise
        why = f"cannot be looked for in tokens of this tokenizer ({type(error).__name__}: {error})"
        raise OptionValueError("stop_strings", why) from error
    kinds: dict[type, list[Any]] = {}
    for each in merged:  # of a kind of the user's own, whatever it is derived from, nothing is known
        kinds.setdefault(type(each) if type(each) in _KNOWN else object, []).append(each)
    of_a_kind = kinds.setdefault(StopStringCriteria, [])
    own = {id(each) for each in mine}
    if known is not None:
        of_a_kind.append(known)
    elif of_strings is not None and id(of_a_kind[0]) not in own:
        known_strings.put(found, of_strings, of_a_kind[0])
    lengths, times, eos = (kinds.get(kind, []) for kind in _KNOWN[:3])
    return StopRules(
        stop_tokens=frozenset(token for each in eos for token in each.eos_token_id.reshape(-1).tolist()),
        max_lengths=tuple(each.max_length for each in lengths if id(each) in own),
        deadlines=tuple((each.initial_timestamp if id(each) in own else None, each.max_time) for each in times),
        strings=tuple(of_a_kind),
        others=tuple(kinds.get(object, ())),
        factory=factory_of(options.arguments.stopping_criteria),
    )


def looks_at_each_row_alone(criterion: Any) -> bool:
    """Whether it comes to the same for a row, in a batch or alone."""
    return type(criterion) in _KNOWN


def looks_at_no_padding(criterion: Any) -> bool:
    """Whether it comes to the same with padding before the prompt: others may count how many tokens there are."""
    return looks_at_each_row_alone(criterion) and type(criterion) is not criteria.MaxLengthCriteria


_KNOWN = (criteria.MaxLengthCriteria, criteria.MaxTimeCriteria, criteria.EosTokenCriteria, StopStringCriteria)


def _tokenizer_for_strings(tokenizer: Callable[[], Any]) -> Any:
    try:
        return tokenizer()
    except TokenizerError as error:
        raise TokenizerError(f"`stop_strings` need a tokenizer: {error}, or pass `tokenizer=` here") from error


class Endings:
    """``rules``: by a request's index. ``began``: when the call did, by ``time.time()``.

    ``rows``: prompts that came as a tensor, padding included: criteria see them as they came, as in ``generate``.
    ``time_by_token``: a sequence whose time is over still gets a token first, as in ``generate``. Else ``late`` tells.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        rules: Sequence[StopRules],
        began: float,
        device: torch.device,
        time_by_token: bool = False,
        scores: Scores | None = None,
        rows: np.ndarray | None = None,  # [prompts, tokens]
    ) -> None:
        self._rules = rules
        self._rows = rows
        self._device = device
        self._time_by_token = time_by_token
        self._scores = scores
        kinds = list(dict.fromkeys(rules[request.index] for request in requests))
        self._stops = np.array(sorted(frozenset().union(*(each.stop_tokens for each in kinds))), dtype=np.int64)
        self._stops_differ = len({each.stop_tokens for each in kinds}) > 1
        self._looks = any(each.looks for each in kinds)
        self._strings = {string: _Strings(string, self._prompt) for each in kinds for string in each.strings}
        self._own: dict[Request, StoppingCriteriaList] = {}  # once they are needed
        # Criteria that look at what they are given wait for a stream of their own, not for steps on their way.
        called = any(each.others or each.factory for each in kinds)
        self._stream = torch.cuda.Stream(device) if called and device.type == "cuda" else None
        waiting: dict[tuple[float, float], list[Request]] = {}
        for request in requests:
            for since, seconds in rules[request.index].deadlines:
                waiting.setdefault((began if since is None else since, seconds), []).append(request)
        self._deadlines = sorted(waiting.items(), key=lambda item: -sum(item[0]))  # the next one is the last
        self._late: dict[Request, None] = {}
        self._turn: frozenset[Request] | None = None  # whose it is; None: everybody's

    # -- time --------------------------------------------------------------------------------------------------

    def take_turn(self, requests: Sequence[Request]) -> None:
        """The others are not with the scheduler now: should their time be over, they end in a turn of their own."""
        self._turn = frozenset(requests)

    def late(self) -> list[Request]:
        """Who has not ended though there is no time left."""
        late = [] if self._time_by_token else list(self._overdue())
        return late if self._turn is None else [request for request in late if request in self._turn]

    def _overdue(self) -> dict[Request, None]:
        now = time.time() if self._deadlines else 0.0
        while self._deadlines:
            (since, seconds), requests = self._deadlines[-1]
            if now - since <= seconds:
                break
            self._late |= dict.fromkeys(requests)
            del self._deadlines[-1]
        if self._late:
            self._late = {request: None for request in self._late if not request.done}
        return self._late

    # -- tokens ------------------------------------------------------------------------------------------------

    def find(self, requests: Sequence[Request], counts: Sequence[int], tokens: np.ndarray) -> Ends:
        """The rows of ``tokens`` [rows, times] that end, of which up to ``counts`` are new ones."""
        none, stops = tokens < 0, self._stop_tokens(requests, tokens)
        last = none | stops
        ends: Ends = {}
        for row in np.flatnonzero(last.any(axis=1)).tolist():
            has = min(counts[row], 1 + int(last[row].argmax()))
            ends[row] = has, FinishReason.STOP if stops[row, has - 1] else None
        if self._looks:
            self._look(requests, counts, tokens, ends)
        for row, (has, _) in ends.items():
            if none[row, has - 1] and not requests[row].done:
                raise RuntimeError(NO_DISTRIBUTION)
        if self._time_by_token and (late := self._overdue()):
            for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
                has, reason = ends.get(row, (count, None))
                if request in late and reason is None and len(request.generated) + has < request.max_new_tokens:
                    ends[row] = has, FinishReason.TIME
        return ends

    def _stop_tokens(self, requests: Sequence[Request], tokens: np.ndarray) -> np.ndarray:
        stops = np.isin(tokens, self._stops)
        if self._stops_differ:  # then few tokens are left to be looked at one by one
            for row, column in zip(*(axis.tolist() for axis in stops.nonzero()), strict=True):
                stops[row, column] = int(tokens[row, column]) in self._rules[requests[row].index].stop_tokens
        return stops

    def _look(self, requests: Sequence[Request], counts: Sequence[int], tokens: np.ndarray, ends: Ends) -> None:
        """Ends that more than one token tells, before those found so far."""
        rows = [row for row, each in enumerate(requests) if not each.done and self._rules[each.index].looks]
        real = {row: ends[row][0] if row in ends else counts[row] for row in rows}
        real = {row: has - int(tokens[row, has - 1] < 0) for row, has in real.items()}  # that one is no token
        for strings in self._strings:
            those = [row for row in rows if strings in self._rules[requests[row].index].strings]
            for row, has in self._strings[strings].first(requests, those, real, tokens).items():
                real[row], ends[row] = has, (has, FinishReason.STOP)
        with torch.no_grad(), current_device(self._device), torch.cuda.stream(self._stream):
            for row in rows:
                own = self._criteria(requests[row])
                has = self._first_end(requests[row], own, tokens[row, : real[row]]) if own else None
                if has is not None:
                    ends[row] = has, FinishReason.STOP

    def _first_end(self, request: Request, own: StoppingCriteriaList, tokens: np.ndarray) -> int | None:
        """Criteria are asked after each token, as ``generate`` asks them: all of them, and no more once one said so."""
        prompt = self._prompt(request)
        before = len(prompt) + len(request.generated)
        ids = np.concatenate([prompt, request.generated, tokens]).astype(np.int64)
        ids = torch.from_numpy(ids)[None].to(self._device)  # [1, tokens]
        for has in range(1, len(tokens) + 1):
            scores = None if self._scores is None else self._scores(request, len(request.generated) + has)
            if bool(own(ids[:, : before + has], scores).all()):
                self._own.pop(request, None)
                return has
        return None

    def _prompt(self, request: Request) -> np.ndarray:
        return request.prompt_ids if self._rows is None else self._rows[request.index]

    def _criteria(self, request: Request) -> StoppingCriteriaList:
        if request not in self._own:
            rules = self._rules[request.index]
            own = list(rules.others)
            if rules.factory is not None:
                own += call_factory(CRITERIA, rules.factory, request.index, request.prompt_ids.tolist())
            self._own[request] = StoppingCriteriaList(own)
        return self._own[request]
