"""What a scheduler is: three methods that decide, and abilities that it may have beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from .claims import Claims
from .paged_cache import PagedCache
from .requests_and_prefixes import Request
from .step import Step


class BaseScheduler(ABC):
    """Decides what goes into the next step. Write its three methods and pass an object: ``BatchConfig(scheduler=...)``.

    After ``next()`` the engine runs the step as it stands. Every chunk in it counts as computed from then on, and its
    pages are reserved. A unit may be run beside the prefix that it stands on if the prefix comes before it.

    Where layers of the model carry a state from token to token, ``cache.slots`` is not None: each unit with pages has a
    slot, too. A request lacks ``cache.missing_slots(request)`` of them, and ``cache.slots.free`` are free.

    Where ``unit.two_way`` is not None, tokens of an image see each other both ways, and no chunk may end inside of one:
    ask ``unit.chunk_end(begin, end)``, and if that is ``begin``, ``unit.shortest_chunk_end(begin)``.
    """

    preemptions: int = 0
    """How often a request gave its pages back, for the report."""

    runs_ahead: bool = False
    """Whether ``next()`` may be called before the tokens of earlier steps have been seen.

    Requests then have ``pending`` tokens. Those that are ``exhausted`` only wait for theirs.
    """

    ends_waiting: bool = False
    """Whether ``finish()`` may come for a request that has not begun, or was preempted, because its time is over.

    Otherwise each request still gets a token when ``max_time`` is over, as in ``generate``.
    """

    takes_jumps: bool = False
    """Whether a running request may get several tokens at once, which were not run: its ``todo`` is then above 1.

    The scheduler reserves their pages, and puts them into a step as a chunk. Otherwise each is run as a row of its own.
    """

    claims: Claims | None = None
    """Is set before ``start()`` where several processes run a call together.

    A scheduler that ``asks_claims`` asks ``claims.take(request.index)`` just before a request begins. If the answer is
    no, it calls ``request.end(FinishReason.WITHDRAWN)`` and ``cache.retire(request)``, and forgets the request.
    """

    asks_claims: bool = False
    """Whether it does. Otherwise all requests of a call are this process's from the start."""

    @abstractmethod
    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        """A call begins: ``requests`` with their prefixes attached, the cache ready.

        They come in any order. The plan's is that of ``request.rank``, in which neighbours share most.
        Where prompts have different adapters, the call begins with the requests of one adapter. It begins again with
        those of the next one when the first are done.
        """

    @abstractmethod
    def next(self) -> Step | None:
        """The next step; None when every request has finished, or only waits for tokens that were not seen yet."""

    @abstractmethod
    def finish(self, request: Request) -> None:
        """``request`` has ended: give back what it holds."""

    def must_know(self) -> bool:
        """Whether the next step may preempt a request whose tokens have not all been seen.

        A preempted request is computed again from its tokens, so these must be known. A scheduler that runs ahead and
        preempts must override this.
        """
        return False

    def limit_steps(self, tokens: int | None) -> None:  # noqa: B027 -- the engine cuts larger steps
        """From now on steps should have at most so many tokens, as a larger one ran out of memory; None: as at first.

        Without it larger steps are cut into parts, which run one after the other.
        """

    def lengthen(self, request: Request, end: int) -> int:
        """Reserve pages of a running request up to position ``end``, or to as far as there are some to spare.

        They are for tokens that are guessed, and run beside its last one. Gives the position up to which it has pages.
        """
        return request.length

    def repeat(self, step: Step, most: int) -> int:
        """How many times in a row a step of rows alone runs before its tokens are looked at, from 1 to ``most``.

        Each row grows by as many tokens, or by those that it may still have if these are fewer. Reserve its pages up to
        position ``end = length + tokens - 1``, and set its ``computed`` to ``end``.
        """
        return 1


def scheduler_name(scheduler: BaseScheduler) -> str:
    """The user's own class, for a message."""
    return type(_inner(scheduler)).__name__


def lengthens(scheduler: BaseScheduler) -> bool:
    """Whether it has a ``lengthen`` of its own."""
    own = getattr(_inner(scheduler), "lengthen", None)
    return own is not None and getattr(own, "__func__", own) is not BaseScheduler.lengthen


def _inner(scheduler: BaseScheduler) -> Any:
    return _inner(scheduler.inner) if isinstance(scheduler, WrappedScheduler) else scheduler


def as_base_scheduler(given: Any) -> BaseScheduler:
    """``given`` itself, or around an object of another class, which need not have the optional abilities."""
    return given if isinstance(given, BaseScheduler) else WrappedScheduler(given)


class WrappedScheduler(BaseScheduler):
    """A scheduler within another one. It may be of any class: what it lacks is as BaseScheduler has it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        # Without `must_know` it cannot be told whether running ahead is safe.
        self.runs_ahead = bool(getattr(inner, "runs_ahead", False)) and callable(getattr(inner, "must_know", None))
        self.ends_waiting = bool(getattr(inner, "ends_waiting", False))
        self.takes_jumps = bool(getattr(inner, "takes_jumps", False))

    @property
    def preemptions(self) -> int:  # type: ignore[override]
        return int(getattr(self.inner, "preemptions", 0))

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        self.inner.start(requests, cache, max_batch_tokens)

    def next(self) -> Step | None:
        step: Step | None = self.inner.next()
        return step

    def finish(self, request: Request) -> None:
        self.inner.finish(request)

    def must_know(self) -> bool:
        return bool(self.inner.must_know())

    def limit_steps(self, tokens: int | None) -> None:
        limit = getattr(self.inner, "limit_steps", None)
        if limit is not None:
            limit(tokens)

    def lengthen(self, request: Request, end: int) -> int:
        lengthen = getattr(self.inner, "lengthen", None)
        return request.length if lengthen is None else int(lengthen(request, end))

    def repeat(self, step: Step, most: int) -> Any:  # the engine checks what comes back
        repeat = getattr(self.inner, "repeat", None)
        return 1 if repeat is None else repeat(step, most)
