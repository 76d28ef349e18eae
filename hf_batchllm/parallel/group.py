"""Processes that have a model together, and how the hosts talk: the leader to each follower, and each to the leader.

A frame is a tuple that begins with its kind. The leader's:

- ``begin``: all ask for the same, and the call begins;
- ``do``: a method of a numbered thing is to be called, as the leader calls its own;
- ``all``: what each has said, where all exchange something;
- ``result``: one of a stream; ``over``: the call is, and how.

A follower's are ``here`` (it has come to the call), ``said``, ``failed`` and ``over``. Each has what it says, and what
the follower's device was given by then.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import selectors
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as distributed

from ..engine.device_loop.decode_graphs import DecodeGraphs
from ..engine.devices import Devices
from ..errors import RanksError
from ..model.device_memory import is_out_of_memory
from ..model.model_in_use import ModelInUse
from ..model.transfers import current_device
from ..notices import Notices, warn_user
from ..patches.all_reduced_rows import AllReduce, GroupAllReduce
from ..results.generations import Generation
from ..wording import first_line
from .rank_watch import GONE, RankWatch

_SILENCE = 1.0  # seconds, after which it is looked whether the group has ended
_PATIENCE = 60.0  # seconds for the others to come to a call, before a warning
_SAME_CALLS = "each rank must make the same calls, with the same prompts and options in the same order"
_SAME_MODEL = "load the same checkpoint on each"
INTERRUPTED = "was interrupted"


class Failure(NamedTuple):
    """A rank's, as it tells the others."""

    rank: int
    why: str  # words that follow "rank 1"
    no_memory: bool = False


class Ending(NamedTuple):
    """A call's. ``how``: done, failed or interrupted; ``rank``: whose error it is, which the others get in words."""

    how: str
    rank: int | None = None
    said: str = ""
    results: bytes = b""


@dataclass
class Turn:
    """A call of this kind, on one rank."""

    kind: str
    begun: bool = False
    is_over: bool = False
    results: Any = None
    # Of a follower alone:
    failed: BaseException | None = None  # in the latest frame that failed
    left: bool = False  # it has failed where nobody waits for an answer, and does nothing more
    told: bool = False  # the watch has heard of a failure, and the leader may not have
    error: BaseException | None = None  # what is raised in the end


class Group:
    """This process, ``rank`` of ``size``, of which 0 leads.

    devices: the group over which the devices add up what they have. exchanged: how often this one was to.
    """

    def __init__(self, watch: RankWatch, devices: Any = None, exchanged: Callable[[], int] = lambda: 0) -> None:
        self.rank, self.size = watch.rank, watch.size
        self.watch = watch
        watch.generators += 1
        self.number = watch.generators  # the same on all ranks, which make theirs in the same order
        self._devices = devices
        self._exchanged = exchanged
        self._connections = watch.connections
        self._incoming = selectors.DefaultSelector()
        for other, connection in watch.connections.items():
            self._incoming.register(connection, selectors.EVENT_READ, other)
        self.digests: dict[str, int] = {}  # of what each has the whole of, and all have to have alike
        self._all_reduce: AllReduce | None = None
        self._graphs: DecodeGraphs | None = None  # of the call
        self._before = 0, 0

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def followers(self) -> range:
        return range(1, self.size)

    # -- frames ----------------------------------------------------------------------------------------------------

    def send(self, rank: int, *frame: Any) -> None:
        self._send(rank, packed(frame))

    def answer(self, kind: str, said: Any = None) -> None:
        """The leader."""
        self.send(0, kind, said, self.given())

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._connections[rank].send_bytes(data)
        except OSError as error:
            raise self._gone(rank) from error

    def tell(self, *frame: Any) -> None:
        """All followers. Each of them hears it, also where one is gone."""
        data, gone = packed(frame), None
        for rank in self.followers:
            try:
                self._send(rank, data)
            except RanksError as error:
                gone = error
        if gone is not None:
            raise gone

    def receive(self, rank: int = 0) -> Any:
        try:
            with self.watch.listening():
                self._wait_for(rank)
                data = self._connections[rank].recv_bytes()
        except (EOFError, OSError) as error:
            raise self._gone(rank) from error
        return pickle.loads(data)

    def wait_for(self, rank: int = 0) -> None:
        """Until a frame comes where a call begins: it may never. An interrupt meanwhile leaves all frames whole."""
        with self.watch.listening():
            self._wait_for(rank, _PATIENCE)

    def _wait_for(self, rank: int, patience: float = math.inf) -> None:
        waits: Callable[[float], Any] = self._connections[rank].poll if self.leads else self._incoming.select
        began = time.monotonic()
        while not waits(_SILENCE):
            self.check()  # once the group has ended, none may come
            if time.monotonic() - began > patience:
                patience = math.inf
                warn_user(
                    f"rank {self.rank} has waited {_PATIENCE:.0f} s for the other ranks that run this model together "
                    "to make the same call, and goes on waiting: each rank must make it (is it in a block such as "
                    "`if rank == 0`?)"
                )

    def listen(self) -> None:
        """An error if a follower has failed, or is gone."""
        for key, _ in self._incoming.select(0):
            raise self.error_of(self.receive(key.data)[1])

    def end(self, ending: Ending) -> list[tuple[tuple[int, int], Failure | None]]:
        """A call, on all followers. What the device of each was given, and why it has failed if it has."""
        self.tell("over", ending)
        return [] if self.watch.failure is not None else [self._end_of(rank) for rank in self.followers]

    def _end_of(self, rank: int) -> tuple[tuple[int, int], Failure | None]:
        failure = None
        while (frame := self.receive(rank))[0] != "over":
            failure = frame[1] if frame[0] == "failed" else failure
        return frame[2], failure

    def _gone(self, rank: int) -> BaseException:
        """This one's device may still wait for that rank."""
        self.watch.end(rank, GONE)
        return self._error_of_end()

    # -- what all of them do at the same place -----------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """What each of them says. Nothing may fail on one of them alone between two of these."""
        if not self.leads:
            self.answer("said", value)
            each: list[Any] = self.receive()[1]
            return each
        each = [value, *(self.receive(rank)[1] for rank in self.followers)]
        self.tell("all", each)
        return each

    def failure(self, error: BaseException) -> Failure:
        return Failure(self.rank, in_words(error), is_out_of_memory(error))

    def error_of(self, failure: Failure) -> BaseException:
        if failure.why == INTERRUPTED:
            return KeyboardInterrupt()
        error = RanksError(f"rank {failure.rank} of the {self.size} that run this model together {failure.why}")
        error._failure = failure
        return error

    def different(self, what: str, rank: int) -> RanksError:
        return RanksError(
            f"the {self.size} ranks that run this model together have different {what} (rank {rank} has others than "
            f"rank 0): {_SAME_MODEL if what in self.digests else _SAME_CALLS}"
        )

    # -- devices -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A call does, on all of them. From here on it may wait for its device."""
        self._graphs = None
        self._level()
        self.watch.start()

    def _level(self) -> None:
        """From here on all devices are given the same."""
        self._before = self._given_so_far()

    def given(self) -> tuple[int, int]:
        """What this device was given in the call: exchanges, and steps of graphs."""
        exchanged, steps = self._given_so_far()
        return exchanged - self._before[0], steps - self._before[1]

    def _given_so_far(self) -> tuple[int, int]:
        made = 0 if self._all_reduce is None else self._all_reduce.made
        return self._exchanged() + made, 0 if self._graphs is None else self._graphs.steps

    def counts(self, graphs: DecodeGraphs) -> None:
        """Replays of their steps are exchanges that nothing else counts; one that cannot capture has counted fewer."""
        self._graphs, graphs.level = graphs, self._level

    def broadcast(self, tokens: torch.Tensor) -> torch.Tensor:
        """The leader's tokens on all devices. No host waits for them."""
        distributed.broadcast(tokens, src=distributed.get_global_rank(self._devices, 0), group=self._devices)
        return tokens

    def all_reduce(self, device: torch.device, notices: Notices) -> AllReduce:
        """How they add up what each has a part of. Every rank asks."""
        if self._all_reduce is None:
            self._all_reduce = self._opened(device, notices)
        return self._all_reduce

    def _opened(self, device: torch.device, notices: Notices) -> AllReduce:
        if device.type == "cuda":
            from .peer_all_reduce import CannotReachPeers, open_peer_all_reduce

            try:
                return open_peer_all_reduce(self, self._devices, device)
            except CannotReachPeers as why:
                notices(
                    "all-reduce",
                    f"all-reduces are made by {distributed.get_backend(self._devices)}, which takes longer than in "
                    f"memory that they share: {why}",
                )
        return GroupAllReduce(self._devices)

    def check(self) -> None:
        """What has come from the device means nothing where a rank has failed meanwhile: an error then."""
        if self.watch.failure is not None:
            raise self._error_of_end()

    def _error_of_end(self) -> BaseException:
        assert self.watch.failure is not None
        rank, why = self.watch.failure
        ended = "The others had waited for it on their devices, and their connection was ended"
        return self.error_of(Failure(rank, f"{why}. {ended}: start the processes again"))

    def close(self) -> None:
        """Give back the memory of all-reduces."""
        if self._all_reduce is not None:
            self._all_reduce.close()
        self._all_reduce = None


class GroupsDevices(Devices):
    """The device of one rank."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def model_in_use(self, *given: Any) -> ModelInUse:
        use = super().model_in_use(*given)
        use.all_reduce = partial(self.group.all_reduce, use.device, use.notices)
        return use

    def graphs(self, *given: Any) -> DecodeGraphs | None:
        graphs = super().graphs(*given)
        if graphs is not None:
            self.group.counts(graphs)
        return graphs

    def close(self) -> None:
        self.group.close()


class _Packer(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        """A tensor's own pickle takes many times as long, and names the device that the tensor was on."""
        if isinstance(thing, torch.Tensor) and thing.device.type != "cpu":
            return _moved, (thing.cpu(), thing.device.type)
        if isinstance(thing, torch.Tensor) and not thing.dtype.is_floating_point:
            return _pinned if thing.is_pinned() else torch.from_numpy, (thing.numpy(),)
        if isinstance(thing, Generation):  # followers have the prompts, and a chat may hold what cannot be sent
            return replace(thing, prompt_token_ids=[], prompt=None).__reduce_ex__(5)
        return NotImplemented


def _pinned(numbers: np.ndarray) -> torch.Tensor:
    """A copy of other memory to the device would make the host wait for the steps before."""
    return torch.from_numpy(numbers).pin_memory()


def _moved(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    return tensor.to(kind)  # the current device of this kind


def packed(frame: Any) -> bytes:
    made = io.BytesIO()
    _Packer(made, protocol=5).dump(frame)
    return made.getvalue()


def unpacked(data: bytes, device: torch.device) -> Any:
    """Tensors that were on another process's device are on ``device`` then."""
    with current_device(device):
        return pickle.loads(data)


def digest(parts: Iterable[bytes]) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(part)
    return made.digest()


def in_words(error: BaseException) -> str:
    """Words that follow "rank 1"."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, GeneratorExit):
        return "has left its stream"
    said = first_line(error) if isinstance(error, Exception) else str(error)
    return f"failed: {type(error).__name__}: {said}"
