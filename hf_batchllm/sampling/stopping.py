"""Finds where sequences end: by tokens, strings, criteria of the user's own, and time, as in ``generate``.

Nothing waits for the device: tokens are looked at when they are collected, and tokens that a row has beyond its end
are cut off then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from ..errors import NothingToDrawError
from ..inputs.processors_and_criteria import CRITERIA, call_factory, callable_name, say_where
from ..model.transfers import current_device, to_device
from ..planning.requests_and_prefixes import FinishReason, Request
from ..wording import either
from .stop_rules import StopRules
from .stop_strings import StopStringSearch

Scores = Callable[[Request, int], Any]  # a request, a number of its new tokens -> the scores that criteria are given
Ends = dict[int, tuple[int, FinishReason | None]]  # row -> (how many of its new tokens are real, why no more are)


class Endings:
    """The ends of a call's sequences.

    ``rules``: of each prompt, by a request's ``index``. ``began``: when the call began, by ``time.time()``.
    ``time_by_token``: as in ``generate``, a sequence whose time is over ends with its next token. Otherwise ``late``
    gives such sequences. ``rows``: prompts that came as a tensor, padding included, as ``generate`` shows to criteria.
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
        self._looks_back = any(each.looks_back for each in kinds)
        self._strings = {string: StopStringSearch(string, self._prompt) for each in kinds for string in each.strings}
        self._own_criteria: dict[Request, StoppingCriteriaList] = {}  # made when they are first needed
        # On a stream of their own, criteria that read their tensors do not wait for the steps that were launched.
        self._calls_criteria = any(each.others or each.factory for each in kinds)
        self._stream = torch.cuda.Stream(device) if self._calls_criteria and device.type == "cuda" else None
        deadlines = [each.deadlines for each in kinds]
        deadlines_of = dict(zip(kinds, deadlines, strict=True))
        waiting: dict[tuple[float, float], list[Request]] = {}
        for request in requests:
            for since, seconds in deadlines_of[rules[request.index]]:
                waiting.setdefault((began if since is None else since, seconds), []).append(request)
        self._deadlines = sorted(waiting.items(), key=lambda item: -sum(item[0]))  # the next one stands last
        self._late: dict[Request, None] = {}
        self._turn: frozenset[Request] | None = None  # the requests of one adapter; None: all requests

    # -- time --------------------------------------------------------------------------------------------------

    def take_turn(self, requests: Sequence[Request]) -> None:
        """These requests alone are scheduled now. Others, if their time is over, end in their own turn."""
        self._turn = frozenset(requests)

    def late(self) -> list[Request]:
        """The requests of this turn whose time is over, and which have not ended."""
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
        """The rows of ``tokens`` [rows, times] that end. Of each row, up to ``counts`` tokens are new ones."""
        no_token, stops = tokens < 0, self._stop_tokens(requests, tokens)
        last = no_token | stops
        ends: Ends = {}
        for row in np.flatnonzero(last.any(axis=1)).tolist():
            has = min(counts[row], 1 + int(last[row].argmax()))
            ends[row] = has, FinishReason.STOP if stops[row, has - 1] else None
        if self._looks_back:
            self._look_back(requests, counts, tokens, ends)
        for row, (has, _) in ends.items():
            if no_token[row, has - 1] and not requests[row].done:
                raise NothingToDrawError
        if self._time_by_token and (late := self._overdue()):
            for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
                has, reason = ends.get(row, (count, None))
                if request in late and reason is None and len(request.generated) + has < request.max_new_tokens:
                    ends[row] = has, FinishReason.TIME
        return ends

    def _stop_tokens(self, requests: Sequence[Request], tokens: np.ndarray) -> np.ndarray:
        stops = np.isin(tokens, self._stops)
        if self._stops_differ:  # few tokens are left, which can be looked at one by one
            for row, column in zip(*(axis.tolist() for axis in stops.nonzero()), strict=True):
                stops[row, column] = int(tokens[row, column]) in self._rules[requests[row].index].stop_tokens
        return stops

    def _look_back(self, requests: Sequence[Request], counts: Sequence[int], tokens: np.ndarray, ends: Ends) -> None:
        """Finds ends that a single token does not tell, if they come before those in ``ends``."""
        rows = [row for row, each in enumerate(requests) if not each.done and self._rules[each.index].looks_back]
        real = {row: ends[row][0] if row in ends else counts[row] for row in rows}
        real = {row: has - int(tokens[row, has - 1] < 0) for row, has in real.items()}  # a negative one is no token
        for strings in self._strings:
            some = [row for row in rows if strings in self._rules[requests[row].index].strings]
            for row, has in self._strings[strings].first(requests, some, real, tokens).items():
                real[row], ends[row] = has, (has, FinishReason.STOP)
        with torch.no_grad(), current_device(self._device), torch.cuda.stream(self._stream):
            for row in rows:
                own = self._criteria(requests[row])
                end = self._first_end(requests[row], own, tokens[row, : real[row]]) if own else None
                if end is not None:
                    ends[row] = end, FinishReason.STOP

    def _first_end(self, request: Request, own: StoppingCriteriaList, tokens: np.ndarray) -> int | None:
        """How many of the new ``tokens`` there are when a criterion ends the request; None if none does.

        As in ``generate``, all criteria are asked after each token, and none after the end.
        """
        prompt = self._prompt(request)
        before = len(prompt) + len(request.generated)
        ids = to_device(np.concatenate([prompt, request.generated, tokens]).astype(np.int64)[None], self._device)
        for has in range(1, len(tokens) + 1):
            scores = None if self._scores is None else self._scores(request, len(request.generated) + has)
            if bool(self._asked(own, request, ids[:, : before + has], scores).all()):
                self._own_criteria.pop(request, None)
                return has
        return None

    @staticmethod
    def _asked(own: StoppingCriteriaList, request: Request, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        try:
            return own(ids, scores)  # type: ignore[no-any-return]
        except Exception as error:
            names = either([callable_name(each) for each in own])
            say_where(error, f"a stopping criterion ({names})", request.index)
            raise

    def _prompt(self, request: Request) -> np.ndarray:
        return request.prompt_ids if self._rows is None else self._rows[request.index]

    def _criteria(self, request: Request) -> StoppingCriteriaList:
        if request not in self._own_criteria:
            rules = self._rules[request.index]
            own = list(rules.others)
            if rules.factory is not None:
                own += call_factory(CRITERIA, rules.factory, request.index, request.prompt_ids.tolist())
            self._own_criteria[request] = StoppingCriteriaList(own)
        return self._own_criteria[request]
