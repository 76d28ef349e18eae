"""Processes that run one model together, each with a part of its weights (tensor parallelism): what they agree on.

Every rank makes the same calls, and plans the same steps by itself. What ranks may see differently (free memory, the
clock, random numbers, interrupts) is agreed on here, among the hosts: the devices are asked for nothing.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from ..errors import RanksError
from ..notices import Notices, warn_user
from ..patches.summed_rows import GroupSums, Sums
from ..wording import first_line
from .held_interrupts import HeldInterrupts
from .rank_watch import RankWatch

T = TypeVar("T")
_VOTED = 3  # numbers that ranks exchange at a time
_PATIENCE = 60.0  # seconds for the others to come to a call, before a warning
_SAME_CALLS = "each rank must make the same calls, with the same prompts and options in the same order"
_INTERRUPTED = "was interrupted"
_KNOWN = "_all_ranks_know"  # what an error has that all of them raise, or have heard of


class News(Protocol):
    """What the first rank hears of while a call runs, and the others have to know."""

    @property
    def waits(self) -> bool:
        """Whether there is any."""

    def agree(self, of_first: Callable[[Any], Any]) -> bool:
        """On all ranks. Whether the call is to be broken off."""


class TensorRanks:
    """One rank of ``size``. Alone, it agrees with itself at no cost.

    hosts: the group over which hosts talk to each other; devices: that of the model itself, and ``exchanged`` says how
    many times this rank's device was to exchange something in it.
    """

    _open: ClassVar[int] = 0  # blocks that fail together, one in another

    def __init__(
        self,
        hosts: Any = None,
        devices: Any = None,
        watch: RankWatch | None = None,
        exchanged: Callable[[], int] = lambda: 0,
    ) -> None:
        self._exchanged = exchanged
        self._exchanged_before = 0  # when hosts met last, before a step
        self._comes_first = False  # what ranks exchange next is the first of a call
        self._launched = False  # whether graphs of that step are on the device: their sums are not counted
        self._watch = watch
        self._hosts, self._devices = hosts, devices
        self._sums: Sums | None = None
        self._interrupts: HeldInterrupts | None = None  # while steps run
        self.size, self.rank = 1, 0
        if hosts is not None:
            import torch.distributed as dist

            self._dist = dist
            self.size, self.rank = dist.get_world_size(hosts), dist.get_rank(hosts)
            self._first = dist.get_global_rank(hosts, 0)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def most_of_each(self, what: str, *numbers: int) -> list[int]:
        """The largest that any rank has of each, of three at most. An error if a rank has failed instead.

        what: the numbers are, in words. Ranks that exchange another thing at this time are an error on all of them.
        """
        if self.size == 1:
            return list(numbers)
        with self._uninterrupted():
            return self._most_of_each(what, numbers)

    def _most_of_each(self, what: str, numbers: Sequence[int]) -> list[int]:
        try:
            most, failed = self._vote(0, what, numbers)
        except RuntimeError as error:  # PyTorch's
            raise _known(self._one_is_gone()) from error
        if failed is not None and failed[1] == _INTERRUPTED:
            raise _known(KeyboardInterrupt())
        if failed is not None:
            said = f"rank {failed[0]} of the {self.size} that run this model together {failed[1]}"
            one_failed = RanksError(said)
            one_failed._are_level = self._watch is None or self._watch.failure is None
            raise _known(one_failed)
        highest, lowest, *most = most
        if highest != -lowest:
            differ = RanksError(
                f"the {self.size} ranks that run this model together are at different places (this one: {what}): "
                f"{_SAME_CALLS}"
            )
            raise _known(differ)
        return most

    def _vote(
        self, failed: int, what: str, numbers: Sequence[int] = (), why: str = ""
    ) -> tuple[list[int], tuple[int, str] | None]:
        """All that hosts exchange begins with this, so a rank that fails can always tell the others.

        failed: this rank's number, counted from one, if it has.
        """
        kind = zlib.crc32(what.encode())
        voted = [failed, kind, -kind, *numbers, *[0] * (_VOTED - len(numbers))]
        together = torch.tensor(voted, dtype=torch.int64, device="cpu")
        with self._says_that_it_waits(), nullcontext() if self._watch is None else self._watch.listening():
            self._dist.all_reduce(together, op=self._dist.ReduceOp.MAX, group=self._hosts)
        first, *most = together.tolist()
        if not first:
            return most[: 2 + len(numbers)], None
        failure = first - 1, self._sent(first - 1, why)
        self._end_if_apart(*failure)
        return [], failure

    @contextmanager
    def _says_that_it_waits(self) -> Iterator[None]:
        """Where a call begins: the others may never come."""
        if not self._comes_first:
            yield
            return
        self._comes_first = False
        said = (
            f"rank {self.rank} has waited {_PATIENCE:.0f} s for the other ranks that run this model together to make "
            "the same call, and goes on waiting: each rank must make it (is it in a block such as `if rank == 0`?)"
        )
        timer = threading.Timer(_PATIENCE, warn_user, [said])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end_if_apart(self, rank: int, why: str) -> None:
        """After a failure in the midst of a step, devices of others wait for ever, and would take what comes next for
        what they wait for: their group is of no use any more."""
        own = 2 * (self._given() - self._exchanged_before) + self._launched
        together = torch.tensor([own, -own], dtype=torch.int64, device="cpu")
        self._dist.all_reduce(together, op=self._dist.ReduceOp.MAX, group=self._hosts)
        most, least = together.tolist()
        if most != -least and self._watch is not None:
            self._watch.end(rank, why)

    def _are_level(self) -> None:
        """All devices have been given the same up to here."""
        self._exchanged_before, self._launched = self._given(), False

    def _given(self) -> int:
        """How many times this rank's device was to exchange something."""
        return self._exchanged() + (0 if self._sums is None else self._sums.made)

    def launched(self) -> None:
        """Graphs of the step for which ranks have met last, all of them."""
        self._launched = True

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Ctrl-C waits until the exchange is over: what the others still wait for would not come."""
        interrupts = HeldInterrupts()
        if self.size > 1:
            interrupts.hold_back()
        try:
            yield
        except BaseException:
            interrupts.let_through(deliver=False)  # all have heard of an error, and it must stay the one that they know
            raise
        interrupts.let_through()

    def _sent(self, rank: int, value: T) -> T:
        """What the rank has."""
        holder, here = [value], torch.device("cpu")
        source = self._dist.get_global_rank(self._hosts, rank)
        self._dist.broadcast_object_list(holder, src=source, group=self._hosts, device=here)
        return holder[0]

    @contextmanager
    def failing_together(self, ends: bool = True) -> Iterator[None]:
        """An error in the block ends it on all ranks, with one that names it: at the next thing that they exchange.

        ends: they wait for each other at its end, so that all of them come there, or none.
        """
        self.check()
        self._are_level()
        self._comes_first, ended = self.size > 1, False
        TensorRanks._open += 1
        try:
            with nullcontext() if self._watch is None else self._watch.during_a_call():
                yield
                with self._uninterrupted():
                    if ends:
                        self.meet("the end of a call")
                    ended = True
        except BaseException as error:
            if self.size > 1 and not _is_known(error) and not ended:
                with self._uninterrupted():
                    self._tell(error)
                    _known(error)
            if TensorRanks._open == 1:
                error.__dict__.pop(_KNOWN, None)  # an owner's code may raise the same one again
            raise
        finally:
            TensorRanks._open -= 1

    def _tell(self, error: BaseException) -> None:
        """The other ranks of what has happened here."""
        if self._watch is not None:
            self._watch.tell(_in_words(error))
        try:
            self._vote(1 + self.rank, "a failure", why=_in_words(error))
        except RuntimeError:  # PyTorch's; and ``error`` may say what it came to while it waited for that rank
            raise _known(self._one_is_gone()) from error
        if self._watch is not None:
            self._watch.all_have_heard()

    def start(self) -> None:
        """From here on the call may wait for its device."""
        if self._watch is not None:
            self._watch.start()

    def check(self) -> None:
        """What has come from the device means nothing where a rank has failed meanwhile: an error then."""
        if self._watch is not None and self._watch.failure is not None:
            rank, why = self._watch.failure
            one = "one" if rank is None else f"rank {rank}"
            raise RanksError(
                f"{one} of the {self.size} that run this model together {why}. The others had waited for it on "
                "their devices, and their connection was ended: start the processes again"
            )

    def _one_is_gone(self) -> RanksError:
        if self._watch is not None:
            self._watch.end_as_one_is_gone()
        return RanksError(
            f"one of the {self.size} ranks that run this model together is gone: its process was killed, or has ended"
        )

    def meet(self, what: str) -> None:
        """Wait until all ranks are here. An error if one has failed instead."""
        self.most_of_each(what)

    def most(self, what: str, number: int) -> int:
        return self.most_of_each(what, number)[0]

    def least(self, what: str, number: int) -> int:
        return -self.most(what, -number)

    def latest(self, what: str, seconds: float) -> float:
        """Of what the ranks' clocks say, up to a microsecond."""
        return seconds if self.size == 1 else self.most(what, int(1e6 * seconds)) / 1e6

    def any(self, what: str, said: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.most(what, int(said)))

    def on_all(self, what: str, make: Callable[[], T], another: Exception) -> T:
        """What ``make`` gives, where all ranks can make it. Its own error where it fails here, and else ``another``."""
        if self.size == 1:
            return make()
        try:
            made = make()
        except Exception:
            self.any(what, True)
            raise
        if self.any(what, False):
            raise another
        return made

    def of_first(self, what: str, value: T) -> T:
        """What the first rank has."""
        if self.size == 1:
            return value
        with self._uninterrupted():
            self.meet(what)
            return self._sent(0, value)

    def tokens_of_first(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first rank's, in the place of this one's. On the device, where nobody waits for it."""
        if self.size > 1:
            self._dist.broadcast(tokens, src=self._first, group=self._devices)
        return tokens

    def failed(self, what: str, how_badly: int, error: Exception | None) -> int:
        """How badly a step has failed, at most, that all ranks have launched together: 0 where it has not.

        error: this rank's.
        """
        if self.size == 1:
            return how_badly
        why = "failed in a step that was tried" if error is None else _in_words(error)
        with self._uninterrupted():
            if error is not None and self._watch is not None:
                self._watch.tell(why)  # the others may wait for their devices
            most = self.most(what, how_badly)
            if most:
                self._end_if_apart(self.rank, why)
                self.check()
            if error is not None and self._watch is not None:
                self._watch.all_have_heard()
        return most

    def have_the_same(self, what: str, parts: Iterable[bytes]) -> bool:
        """Whether all ranks do."""
        if self.size == 1:
            return True
        digest = hashlib.blake2b(digest_size=7)
        for part in parts:
            digest.update(part)
        number = int.from_bytes(digest.digest(), "big")
        highest, lowest = self.most_of_each(what, number, -number)
        return highest == -lowest

    def must_agree(self, what: str, parts: Iterable[bytes], advice: str = _SAME_CALLS) -> None:
        """An error on all ranks where they do not have the same. ``advice``: what to do then."""
        if not self.have_the_same(what, parts):
            differ = RanksError(f"the {self.size} ranks that run this model together have different {what}: {advice}")
            raise _known(differ)

    def sums(self, device: torch.device, notices: Notices) -> Sums:
        """How they add up what each has a part of. Every rank asks."""
        if self._sums is None:
            self._sums = self._opened(device, notices)
        return self._sums

    def _opened(self, device: torch.device, notices: Notices) -> Sums:
        if device.type == "cuda":
            from .peer_sums import CannotReachPeers, open_peer_sums

            try:
                return open_peer_sums(self, self._devices, device)
            except CannotReachPeers as why:
                notices(
                    "sums",
                    f"the GPUs' sums are made by {self._dist.get_backend(self._devices)}, which takes longer than in "
                    f"memory that they share: {why}",
                )
        return GroupSums(self._devices)

    def close(self) -> None:
        """Give back the memory of sums."""
        if self._sums is not None:
            self._sums.close()
        self._sums = None

    @contextmanager
    def interrupts(self, news: News | None = None) -> Iterator[Callable[[int], None]]:
        """Ctrl-C waits until all ranks are at the same place: what this gives is to be called there by all of them.

        It takes a number that says what the rank is about to do, and that must be the same on all of them. What the
        first rank has heard meanwhile, its ``news``, is agreed on there, too.
        """
        if self.size == 1:
            yield lambda _: None
            return
        interrupts = self._interrupts = HeldInterrupts()

        def meet(plan: int) -> None:
            heard = 2 if interrupts.came else int(news is not None and news.waits)
            heard, highest, lowest = self.most_of_each("a step", heard, plan, -plan)
            stops = heard == 1 and news is not None and news.agree(lambda value: self.of_first("a request", value))
            if heard == 2 or stops:
                raise _known(KeyboardInterrupt())
            if highest != -lowest:
                differ = RanksError(
                    f"the {self.size} ranks that run this model together have planned different steps: what a "
                    "scheduler or a callback of your own does must be the same on each of them"
                )
                raise _known(differ)
            self._are_level()

        try:
            interrupts.hold_back()
            yield meet
        except BaseException as error:
            interrupts.let_through(deliver=not _is_known(error))
            raise
        finally:
            self._interrupts = None
            interrupts.let_through()

    @contextmanager
    def owner_in_control(self) -> Iterator[None]:
        """Between two results of a stream: Ctrl-C ends what the owner does, and a failure elsewhere can wait."""
        interrupts = self._interrupts
        if interrupts is not None:
            interrupts.let_through(deliver=False)  # one that has come is for the next place where ranks meet
        with nullcontext() if self._watch is None else self._watch.elsewhere():
            yield
        if interrupts is not None:
            interrupts.hold_back()


def _known(error: BaseException) -> BaseException:
    """That all ranks know of the error, so that none tells it to the others."""
    error.__dict__[_KNOWN] = True
    return error


def _is_known(error: BaseException) -> bool:
    return _KNOWN in error.__dict__


def _in_words(error: BaseException) -> str:
    """That follow "rank 1"."""
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    if isinstance(error, GeneratorExit):
        return "has left its stream"
    said = first_line(error) if isinstance(error, Exception) else str(error)
    return f"failed: {type(error).__name__}: {said}"
