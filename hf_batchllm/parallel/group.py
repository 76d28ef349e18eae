"""Processes that have a model together, and how the hosts talk: the leader to each follower, and each to the leader.

A frame is a tuple that begins with its kind. The leader's:

- ``begin``: all ask for the same, and the call begins;
- ``do``: a method of a numbered thing is to be called, as the leader calls its own;
- ``all``: what each has said, where all exchange something;
- ``result``: one of a stream; ``over``: the call is.

A follower's are ``here`` (it has come to the call), ``said``, ``failed`` and ``over``.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed

from ..engine.device_loop.decode_graphs import DecodeGraphs
from ..errors import RanksError
from ..interrupts import uninterrupted
from ..model.transfers import current_device
from ..notices import Notices, warn_user
from ..patches.summed_rows import GroupSums, Sums
from ..wording import first_line
from .rank_watch import RankWatch

_PATIENCE = 60.0  # seconds for the others to come to a call, before a warning
INTERRUPTED = "was interrupted"
FAILED = "_of_rank"  # what an error has that tells of a rank's: which, and why


class Over(BaseException):
    """The leader ends the call, where something else was expected of it."""

    def __init__(self, frame: tuple[Any, ...]) -> None:
        self.frame = frame
        super().__init__()


class Group:
    """One process of ``size``. ``rank``: its number; 0 leads.

    devices: the group over which the devices add up what they have. exchanged: how often this one was to.
    connections: with each follower; on a follower, with the leader alone.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        watch: RankWatch,
        connections: dict[int, Connection],
        devices: Any = None,
        exchanged: Callable[[], int] = lambda: 0,
    ) -> None:
        self.rank, self.size = rank, size
        self._devices = devices
        self._connections = connections
        self._exchanged = exchanged
        self._sums: Sums | None = None
        self.watch = watch
        self._before = 0
        self.graphs: DecodeGraphs | None = None  # of the call; their steps are exchanged, and not counted

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def followers(self) -> range:
        return range(1, self.size)

    # -- frames ----------------------------------------------------------------------------------------------------

    def send(self, rank: int, *frame: Any) -> None:
        self._send(rank, packed(frame))

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
                data = self._connections[rank].recv_bytes()
        except (EOFError, OSError) as error:
            raise self._gone(rank) from error
        return pickle.loads(data)

    def waiting(self, rank: int) -> bool:
        """Whether a frame has come."""
        try:
            return self._connections[rank].poll()
        except OSError as error:
            raise self._gone(rank) from error

    def _gone(self, rank: int) -> RanksError:
        self.watch.end_as_one_is_gone()
        return RanksError(
            f"one of the {self.size} ranks that run this model together is gone: its process was killed, or has ended"
        )

    # -- what all of them do at the same place -----------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """What each of them says."""
        if self.leads:
            each = [value, *(self.said_by(rank) for rank in self.followers)]
            self.tell("all", each)
            return each
        self.send(0, "said", value)
        frame = self.receive()
        if frame[0] != "all":
            raise Over(frame)
        found: list[Any] = frame[1]
        return found

    def said_by(self, rank: int) -> Any:
        kind, value = self.receive(rank)[:2]
        if kind == "failed":
            raise self.error_of(rank, value)
        return value

    def any(self, said: bool) -> bool:
        return any(self.exchange(said))

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """An error in the block, which all of them run, is one on all."""
        self.check()
        error: BaseException | None = None
        with self.watch.during_a_call():
            self.watch.start()
            try:
                yield
            except BaseException as own:
                error = own
                self.watch.tell(in_words(own))
            with uninterrupted():
                each = self.exchange(None if error is None else in_words(error))
                if error is not None:
                    self.watch.all_have_heard()
                    raise error
        for rank, why in enumerate(each):
            if why is not None:
                raise self.error_of(rank, why)

    def error_of(self, rank: int, why: str) -> BaseException:
        if why == INTERRUPTED:
            return KeyboardInterrupt()
        error = RanksError(f"rank {rank} of the {self.size} that run this model together {why}")
        setattr(error, FAILED, (rank, why))
        return error

    @contextmanager
    def says_that_it_waits(self) -> Iterator[None]:
        """Where a call begins: the others may never come."""
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

    # -- devices -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A call does, on all of them. From here on it may wait for its device."""
        self._before, self.graphs = 0, None
        self._before = self.given()[0]
        self.watch.start()

    def given(self) -> tuple[int, int]:
        """What this device was given since the call began: exchanges, and steps of graphs."""
        exchanged = self._exchanged() + (0 if self._sums is None else self._sums.made)
        return exchanged - self._before, 0 if self.graphs is None else self.graphs.steps

    def broadcast(self, tokens: torch.Tensor) -> torch.Tensor:
        """The leader's tokens on all devices. No host waits for them."""
        distributed.broadcast(tokens, src=distributed.get_global_rank(self._devices, 0), group=self._devices)
        return tokens

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
                    f"the GPUs' sums are made by {distributed.get_backend(self._devices)}, which takes longer than in "
                    f"memory that they share: {why}",
                )
        return GroupSums(self._devices)

    def check(self) -> None:
        """What has come from the device means nothing where a rank has failed meanwhile: an error then."""
        if self.watch.failure is not None:
            rank, why = self.watch.failure
            one = "one" if rank is None else f"rank {rank}"
            raise RanksError(
                f"{one} of the {self.size} that run this model together {why}. The others had waited for it on "
                "their devices, and their connection was ended: start the processes again"
            )

    def close(self) -> None:
        """Give back the memory of sums."""
        if self._sums is not None:
            self._sums.close()
        self._sums = None


class _Packer(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        """A tensor's own pickle takes many times as long, and names the device that the tensor was on."""
        if isinstance(thing, torch.Tensor) and thing.device.type != "cpu":
            return _moved, (thing.cpu(), thing.device.type)
        if isinstance(thing, torch.Tensor) and not thing.dtype.is_floating_point:
            return _pinned if thing.is_pinned() else torch.from_numpy, (thing.numpy(),)
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
