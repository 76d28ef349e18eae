"""Which tokens the grammars of a call allow next: a bit for each token, by one call of llguidance for all rows.

llguidance works on threads of its own and lets go of Python meanwhile. So masks can be made while the device runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

from ..errors import NothingToDrawError
from ..inputs.grammar_options import Grammar
from ..kernels.reference.token_masks_torch import WORD, mask_tokens
from ..model.transfers import to_device
from ..planning.requests_and_prefixes import Request
from .compiled_grammars import CompiledGrammars, error_of

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_FREE = -1  # the line of a row without a grammar
_NEEDS_AN_END = "only token {} can come next, which ends an answer (`eos_token_id`), and the answer would not be whole"


class GrammarError(NothingToDrawError):
    """A sequence cannot go on in its grammar: it takes llguidance too much work, say, or needs an end token."""

    def __init__(self, request: Request, grammar: Grammar, why: str) -> None:
        tokens = len(request.generated)
        whose = f"the `{grammar.option}` of prompt {request.index:,}"
        super().__init__(f"{whose} cannot be followed after {tokens:,} tokens: {why}")


@dataclass(frozen=True, eq=False)
class TokenMasks:
    """The masks of some rows."""

    bits: torch.Tensor  # [lines, ids / 32, rounded up] int32  of at least as many ids as the tokenizer has
    line: torch.Tensor | None = None  # [rows] int32  each row's line, -1 for a free one; None: line i is row i's
    kernel: Callable[..., torch.Tensor] = mask_tokens

    def of(self, rows: Sequence[int]) -> TokenMasks:
        """Those of these rows alone."""
        numbers = to_device(np.array(rows, dtype=np.int32), self.bits.device)
        return replace(self, line=numbers if self.line is None else self.line[numbers])

    def to(self, device: torch.device, kernel: Callable[..., torch.Tensor] = mask_tokens) -> TokenMasks:
        """A copy, for which nothing waits if the bits are in pinned memory. ``kernel``: which applies them there."""
        line = None if self.line is None else to_device(self.line.numpy(), device)
        return TokenMasks(self.bits.to(device, non_blocking=True), line, kernel)

    def fitted(self, vocabulary: int) -> TokenMasks:
        """Pads or cuts the masks to ``vocabulary`` ids: the LM head may have more than the tokenizer, or fewer."""
        words = -(-vocabulary // WORD)
        lacking = max(0, words - self.bits.shape[1])
        bits = F.pad(self.bits, (0, lacking)) if lacking else self.bits[:, :words]
        return replace(self, bits=bits)

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` [rows, vocabulary], with -inf for each token that is not allowed."""
        return self.kernel(scores, self.fitted(scores.shape[1]).bits, line=self.line)


@dataclass(eq=False, slots=True)
class _Follower:
    """How far a sequence is in its grammar."""

    matcher: LLMatcher
    grammar: Grammar
    ends: frozenset[int]
    seen: int = 0  # new tokens that the matcher has taken
    ended: bool = False  # by a token that ends it

    def is_whole_with(self, token: int) -> bool:
        """Whether the answer would be a whole one with this token, which may come next."""
        whole = self.matcher.consume_token(token) and self.matcher.is_accepting()
        self.matcher.rollback(1)  # a copy would take time that grows with the answer
        return whole


@dataclass(frozen=True, eq=False)
class _Unfilled:
    """The masks of some rows, before llguidance has filled them in."""

    requests: list[Request]
    bound: list[Request]  # those with a grammar
    followers: list[_Follower]  # of these
    bits: torch.Tensor  # [bound, words] int32
    going: list[tuple[LLMatcher, int]]  # and the line of each

    def fill(self) -> None:
        from llguidance.numpy import fill_next_token_bitmask_par

        fill_next_token_bitmask_par(_executor(), self.going, self.bits.numpy())


class GrammarMasks:
    """The masks of a call.

    ``grammars``, ``ends``: of each prompt, by a request's ``index``: its grammar, and the tokens that end its answer.
    ``pinned``: whether masks go to a GPU.

    Each sequence has a matcher, which takes each of its new tokens once. Only tokens that the host has seen count.
    """

    def __init__(
        self,
        grammars: Sequence[Grammar | None],
        compiled: CompiledGrammars,
        ends: Sequence[frozenset[int]],
        pinned: bool = False,
    ) -> None:
        self._grammars = grammars
        self._compiled = compiled
        self._ends = ends
        self._buffers = [_Buffer(compiled.vocabulary, pinned) for _ in range(2)]
        self._followers: dict[Request, _Follower] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._begun: tuple[_Unfilled, Future[None] | None] | None = None

    def is_free(self, request: Request) -> bool:
        """Whether it has no grammar."""
        return self._grammars[request.index] is None

    # -- masks ---------------------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[Request]) -> None:
        """Start on the masks of these requests' next tokens, on a thread of its own. ``wait`` gives them.

        ``generated`` must hold all tokens before them, and stay as it is until ``wait`` has returned. The step that
        makes their logits may run meanwhile.
        """
        if self._begun is not None:  # a step that failed did not come to wait for them
            self.wait()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        begun = self._get_ready(requests)
        # Nothing but llguidance's own code runs there: it would have to take turns with Python's here.
        self._begun = begun, self._thread.submit(begun.fill) if begun.going else None

    def wait(self) -> TokenMasks:
        """The masks that were begun. They are valid until those after the next ones are begun."""
        assert self._begun is not None
        (begun, filling), self._begun = self._begun, None
        if filling is not None:
            filling.result()
        return self._finished(begun)

    def of(self, requests: Sequence[Request]) -> TokenMasks:
        """The masks that were begun, if they are those of these requests; else they are made now."""
        if self._begun is not None:
            same = self._begun[0].requests == list(requests)
            made = self.wait()
            if same:
                return made
        return self.now(requests)

    def now(self, requests: Sequence[Request]) -> TokenMasks:
        """The masks, while the caller waits."""
        ready = self._get_ready(requests)
        if ready.going:
            ready.fill()
        return self._finished(ready)

    def _get_ready(self, requests: Sequence[Request]) -> _Unfilled:
        self._forget_done()
        bound = [request for request in requests if not self.is_free(request)]
        followers = self._up_to_date(bound)
        self._buffers.reverse()
        bits = self._buffers[0].lines(len(bound))  # here: pinned memory belongs to the device of the thread that asks
        going = [(each.matcher, line) for line, each in enumerate(followers) if not each.ended]
        return _Unfilled(list(requests), bound, followers, bits, going)

    def _finished(self, filled: _Unfilled) -> TokenMasks:
        bound, bits, requests = filled.bound, filled.bits, filled.requests
        _check(bound, filled.followers)
        self._put_ends(bits.numpy().view(np.uint32), bound, filled.followers)
        line = None
        if len(bound) < len(requests):
            numbers = iter(range(len(bound)))
            own = [_FREE if self.is_free(request) else next(numbers) for request in requests]
            line = torch.tensor(own, dtype=torch.int32, device="cpu")
        return TokenMasks(bits, line)

    def forced(self, request: Request) -> list[int]:
        """The tokens that must come next, as far as its grammar leaves one choice for each. It takes none of them."""
        assert self._begun is None, "masks are being made"
        if self.is_free(request):
            return []
        (follower,) = self._up_to_date([request])
        if follower.ended:
            return []
        tokens = follower.matcher.compute_ff_tokens()
        _check([request], [follower])
        return tokens

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = self._begun = None

    # -- matchers ------------------------------------------------------------------------------------------------

    def _up_to_date(self, requests: Sequence[Request]) -> list[_Follower]:
        """The followers, once they have taken the new tokens. This runs for each row of each step."""
        followers = [self._followers.get(request) or self._begun_with(request) for request in requests]
        single: list[tuple[LLMatcher, int]] = []
        for request, follower in zip(requests, followers, strict=True):
            # The token that the mask is for may be on its way: its logits, that is.
            assert request.pending <= 1, "a token before the next one has not been seen"
            made = len(request.generated)
            if made == follower.seen or follower.ended:
                continue
            if made == follower.seen + 1:
                token = request.generated[-1]
                if token in follower.ends:  # a criterion of the user's may let it go on
                    follower.ended = True
                else:
                    single.append((follower.matcher, token))
            else:
                new = request.generated[follower.seen :]
                follower.ended = not follower.ends.isdisjoint(new)
                if not follower.ended:
                    follower.matcher.consume_tokens(new)
            follower.seen = made
        if single:
            _executor().consume_token_par(single)
        return followers

    def _begun_with(self, request: Request) -> _Follower:
        grammar = self._grammars[request.index]
        assert grammar is not None
        follower = _Follower(self._compiled.matcher(grammar), grammar, self._ends[request.index])
        self._followers[request] = follower
        return follower

    def _forget_done(self) -> None:
        for request in [request for request in self._followers if request.done]:
            del self._followers[request]

    # -- ends ----------------------------------------------------------------------------------------------------

    def _put_ends(self, bits: np.ndarray, requests: Sequence[Request], followers: Sequence[_Follower]) -> None:
        """The end tokens of each prompt in place of the tokenizer's own, in ``bits`` [rows, words] uint32."""
        ended = [row for row, follower in enumerate(followers) if follower.ended]
        bits[ended] = 0
        own = self._compiled.end_tokens
        may_end = _has(bits, own[0])
        may_end[ended] = True
        alike: dict[frozenset[int], list[int]] = {}
        for row, follower in enumerate(followers):
            alike.setdefault(follower.ends, []).append(row)
        for ends, rows in alike.items():
            if not ended and ends == frozenset(own):
                continue
            where = np.array(rows, dtype=np.int64)
            for token in set(own) - ends:
                _clear(bits, where, token)
            ending, going = where[may_end[where]], where[~may_end[where]]
            for token in ends:
                if token < self._compiled.vocabulary:
                    bits[ending, token // WORD] |= np.uint32(1 << token % WORD)
                    # A token of the answer's own may be an end token, too: a comma, say. It would cut the answer off.
                    cuts = [row for row in going[_has(bits, token)[going]] if not followers[row].is_whole_with(token)]
                    _clear(bits, cuts, token)
                    for row in cuts:
                        if not bits[row].any() and not requests[row].done:
                            raise GrammarError(requests[row], followers[row].grammar, _NEEDS_AN_END.format(token))


def _check(requests: Sequence[Request], followers: Sequence[_Follower]) -> None:
    for request, follower in zip(requests, followers, strict=True):
        if follower.matcher.is_error() and not follower.ended:
            raise GrammarError(request, follower.grammar, f"llguidance says: {error_of(follower.matcher)}")


class _Buffer:
    """Memory for masks, kept from step to step."""

    def __init__(self, vocabulary: int, pinned: bool) -> None:
        self._words = -(-vocabulary // WORD)
        self._pinned = pinned
        self._memory = torch.empty(0, self._words, dtype=torch.int32, device="cpu")

    def lines(self, count: int) -> torch.Tensor:  # [count, words] int32
        if len(self._memory) < count:
            size = 1 << (count - 1).bit_length()
            self._memory = torch.empty(size, self._words, dtype=torch.int32, device="cpu", pin_memory=self._pinned)
        return self._memory[:count]


def _has(bits: np.ndarray, token: int) -> np.ndarray:  # [rows] bool
    has: np.ndarray = (bits[:, token // WORD] >> np.uint32(token % WORD) & np.uint32(1)).astype(bool)
    return has


def _clear(bits: np.ndarray, rows: np.ndarray | list[int], token: int) -> None:
    bits[rows, token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)


_EXECUTORS: dict[int, LLExecutor] = {}  # by the process: threads do not live on in a fork


def _executor() -> LLExecutor:
    """llguidance's threads, of which a process has one set."""
    process = os.getpid()
    if process not in _EXECUTORS:
        from llguidance import LLExecutor

        _EXECUTORS.clear()
        _EXECUTORS[process] = LLExecutor()
    return _EXECUTORS[process]
