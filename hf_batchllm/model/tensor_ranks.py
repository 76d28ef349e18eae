"""Processes that run one model together, each with a part of its weights (tensor parallelism): what they agree on.

Every rank makes the same calls, and plans the same steps by itself. What ranks may see differently (free memory, the
clock, random numbers, interrupts) is agreed on here, among the hosts: the devices are asked for nothing.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from ..errors import RanksError
from ..notices import Notices
from ..patches.summed_rows import GroupSums, Sums
from ..wording import first_line
from .rank_watch import RankWatch

T = TypeVar("T")
_VOTED = 3  # numbers that ranks exchange at a time


class News(Protocol):
    """What the first rank hears of while a call runs, and the others have to know."""

    @property
    def waits(self) -> bool:
        """Whether there is any."""

    def agree(self, of_first: Callable[[Any], Any]) -> bool:
        """On all ranks. Whether the call is to be broken off."""


class TensorRanks:
    """One rank of ``size``. Alone, it agrees with itself at no cost.

    hosts: the group over which hosts talk to each other; devices: that of the model itself.
    """

    def __init__(self, hosts: Any = None, devices: Any = None, watch: RankWatch | None = None) -> None:
        self._watch = watch
        self._hosts, self._devices = hosts, devices
        self._sums: tuple[Any, Sums] | None = None  # with what they are for
        self._agreed: BaseException | None = None  # an error that all ranks raise
        self.size, self.rank = 1, 0
        if hosts is not None:
            import torch.distributed as dist

            self._dist = dist
            self.size, self.rank = dist.get_world_size(hosts), dist.get_rank(hosts)
            self._first = dist.get_global_rank(hosts, 0)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def most_of_each(self, *numbers: int) -> list[int]:
        """The largest that any rank has of each, of three at most. An error if a rank has failed instead."""
        if self.size == 1:
            return list(numbers)
        try:
            most, failed = self._vote(0, numbers)
        except RuntimeError as error:  # PyTorch's
            self._agreed = self._one_is_gone()
            raise self._agreed from error
        if failed is not None:
            self._agreed = RanksError(f"rank {failed[0]} of the {self.size} that run this model together {failed[1]}")
            raise self._agreed
        return most

    def _vote(self, failed: int, numbers: Sequence[int], why: str = "") -> tuple[list[int], tuple[int, str] | None]:
        """All that hosts exchange begins with this, so a rank that fails can always tell the others.

        failed: this rank's number, counted from one, if it has.
        """
        voted = [failed, *numbers, *[0] * (_VOTED - len(numbers))]
        together = torch.tensor(voted, dtype=torch.int64, device="cpu")
        with nullcontext() if self._watch is None else self._watch.listening():
            self._dist.all_reduce(together, op=self._dist.ReduceOp.MAX, group=self._hosts)
        first, *most = together.tolist()
        if not first:
            return most[: len(numbers)], None
        return [], (first - 1, self._sent(first - 1, why))

    def _sent(self, rank: int, value: T) -> T:
        """What the rank has."""
        holder, here = [value], torch.device("cpu")
        source = self._dist.get_global_rank(self._hosts, rank)
        self._dist.broadcast_object_list(holder, src=source, group=self._hosts, device=here)
        return holder[0]

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """An error in the block ends it on all ranks, with one that names it: at the next thing that they exchange."""
        self._agreed = None
        self.check()
        try:
            with nullcontext() if self._watch is None else self._watch.during_a_call():
                yield
        except BaseException as error:
            if self.size > 1 and error is not self._agreed:
                if self._watch is not None:
                    self._watch.tell(_in_words(error))
                try:
                    self._vote(1 + self.rank, (), _in_words(error))
                except RuntimeError:  # PyTorch's; and ``error`` may say what it came to while it waited for that rank
                    raise self._one_is_gone() from error
                if self._watch is not None:
                    self._watch.all_have_heard()
            raise

    def check(self) -> None:
        """What has come from the device means nothing where a rank has failed meanwhile: an error then."""
        if self._watch is not None and self._watch.failure is not None:
            rank, why = self._watch.failure
            raise RanksError(
                f"rank {rank} of the {self.size} that run this model together {why}. The others had waited for it on "
                "their devices, and their connection was ended: start the processes again"
            )

    def _one_is_gone(self) -> RanksError:
        return RanksError(
            f"one of the {self.size} ranks that run this model together is gone: its process was killed, or has ended"
        )

    def meet(self) -> None:
        """Wait until all ranks are here. An error if one has failed instead."""
        self.most_of_each()

    def most(self, number: int) -> int:
        return self.most_of_each(number)[0]

    def least(self, number: int) -> int:
        return -self.most(-number)

    def latest(self, seconds: float) -> float:
        """Of what the ranks' clocks say, up to a microsecond."""
        return seconds if self.size == 1 else self.most(int(1e6 * seconds)) / 1e6

    def any(self, said: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.most(int(said)))

    def of_first(self, value: T) -> T:
        """What the first rank has."""
        if self.size == 1:
            return value
        self.meet()
        return self._sent(0, value)

    def tokens_of_first(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first rank's, in the place of this one's. On the device, where nobody waits for it."""
        if self.size > 1:
            self._dist.broadcast(tokens, src=self._first, group=self._devices)
        return tokens

    def have_the_same(self, parts: Iterable[bytes]) -> bool:
        if self.size == 1:
            return True
        digest = hashlib.blake2b(digest_size=7)
        for part in parts:
            digest.update(part)
        number = int.from_bytes(digest.digest(), "big")
        highest, lowest = self.most_of_each(number, -number)
        return highest == -lowest

    def must_agree(self, what: str, parts: Iterable[bytes]) -> None:
        """An error on all ranks where they do not have the same."""
        if not self.have_the_same(parts):
            self._agreed = RanksError(
                f"the {self.size} ranks that run this model together have different {what}: each rank must make the "
                "same calls, with the same prompts and options in the same order"
            )
            raise self._agreed

    def sums(self, device: torch.device, width: int, dtype: torch.dtype, notices: Notices) -> Sums:
        """How they add up rows of ``width`` numbers that each has a part of. Every rank asks."""
        wanted = device, width, dtype
        if self._sums is None or self._sums[0] != wanted:
            self._sums = None  # the memory of other sums
            self._sums = wanted, self._opened(device, width, dtype, notices)
        return self._sums[1]

    def _opened(self, device: torch.device, width: int, dtype: torch.dtype, notices: Notices) -> Sums:
        if device.type == "cuda":
            from .peer_sums import CannotReachPeers, open_peer_sums

            try:
                return open_peer_sums(self, self._devices, device, width, dtype)
            except CannotReachPeers as why:
                notices(
                    "sums",
                    f"the GPUs' sums are made by {self._dist.get_backend(self._devices)}, which takes longer than in "
                    f"memory that they share: {why}",
                )
        return GroupSums(self._devices)

    def close(self) -> None:
        """Give back the memory of sums."""
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
        came: list[int] = []

        def meet(plan: int) -> None:
            heard = 2 if came else int(news is not None and news.waits)
            heard, highest, lowest = self.most_of_each(heard, plan, -plan)
            if heard == 2 or (heard and news is not None and news.agree(self.of_first)):
                self._agreed = KeyboardInterrupt()
            elif highest != -lowest:
                self._agreed = RanksError(
                    f"the {self.size} ranks that run this model together have planned different steps: what a "
                    "scheduler or a callback of your own does must be the same on each of them"
                )
            if self._agreed is not None:
                raise self._agreed

        if threading.current_thread() is not threading.main_thread():
            yield meet
            return
        before = signal.signal(signal.SIGINT, lambda *_: came.append(1))
        try:
            yield meet
        finally:
            signal.signal(signal.SIGINT, before)


def _in_words(error: BaseException) -> str:
    """That follow "rank 1"."""
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted"
    if isinstance(error, GeneratorExit):
        return "has left its stream"
    said = first_line(error) if isinstance(error, Exception) else str(error)
    return f"failed: {type(error).__name__}: {said}"


# Of the model's group, by its members: a group over which hosts talk. The model's is held, so no other has its id.
_hosts_of: dict[tuple[int, ...], tuple[Any, Any, RankWatch]] = {}


def ranks_of(model: nn.Module) -> TensorRanks:
    """Those that have ``model`` together. Where there are several, each of them must ask."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
        return TensorRanks()
    import torch.distributed as dist

    devices = (mesh["tp"] if mesh.mesh_dim_names else mesh).get_group()
    members = tuple(dist.get_process_group_ranks(devices))
    made = _hosts_of.get(members)
    if made is None or made[0] is not devices:
        hosts = dist.new_group(list(members), backend="gloo", use_local_synchronization=True)
        made = _hosts_of[members] = devices, hosts, _watched(devices, hosts)
    return TensorRanks(made[1], devices, made[2])


def _watched(devices: Any, hosts: Any) -> RankWatch:
    import torch.distributed as dist

    def exchange(mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(hosts)
        dist.all_gather_object(found, mine, group=hosts)
        return found

    def release() -> None:
        if torch.cuda.is_available() and dist.get_backend(devices) != "gloo":
            from .peer_sums import end_sums_of

            end_sums_of(devices)
            devices._get_backend(torch.device("cuda")).abort()

    return RankWatch(dist.get_rank(hosts), dist.get_world_size(hosts), exchange, release)
