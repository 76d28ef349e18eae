"""Ranks that run a model together hear at once of one that has failed or is gone, also while their devices wait for it.

A device that adds up what all ranks have computed waits for ever for a rank that does not come. The host waits for the
device, and can be told nothing. So a thread listens meanwhile. Where the host does not come back by itself, the thread
ends the devices' group: what waits for it then ends, with numbers that mean nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from weakref import WeakSet

from ..errors import GeneratorBusyError, RanksError

GONE = "is gone: its process was killed, or has ended"
_GRACE = 5.0  # seconds in which a host comes to the next thing that ranks exchange, if it does not wait for its device
_open: list[RankWatch] = []


class RankWatch:
    """Watches over the other ranks, for as long as this process runs.

    exchange: gives, on each rank, what all of them have passed. release: ends the group of the devices.
    ``connections``: between the first rank and each other one, for all else that hosts tell each other.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Callable[[Any], list[Any]],
        release: Callable[[], None],
        grace: float = _GRACE,
    ) -> None:
        self.rank, self.size = rank, size
        self.exchange = exchange
        self._release, self._grace = release, grace
        self.on_one_machine = len(set(exchange(this_machine()))) == 1
        self._peers = connected(rank, size, exchange, self.on_one_machine)
        self.connections = connected(rank, size, exchange, self.on_one_machine)
        self.all_reduces: WeakSet[Any] = WeakSet()  # whose kernels wait for other ranks
        self._lock = threading.RLock()  # a handler of signals sends, too
        self.generators = 0  # that were made, on this rank
        self._in_a_call = False  # one runs
        self._planning = False  # nothing of the latest call is on the device
        self._elsewhere = 0  # the host is in its user's hands
        self._listens = False  # the host is where the others' failures reach it
        # When the group is ended, unless the host comes before; the rank, what it said, and whether it is gone.
        self._due: tuple[float, int, str, bool] | None = None
        self.failure: tuple[int, str] | None = None  # the rank, and what has become of it; the group is ended then
        self.interrupted = False  # another rank was, and this one is to act on it
        _open.append(self)
        threading.Thread(target=self._watch, name="hf_batchllm-ranks", daemon=True).start()

    @contextlib.contextmanager
    def during_a_call(self) -> Iterator[None]:
        if self._in_a_call:  # its frames would be taken for those of the other
            raise GeneratorBusyError(
                "another generator of this model runs a call, or has a stream open, and processes that have a model "
                "together run one call at a time: let it end (a stream also by its close())"
            )
        self._in_a_call = self._planning = True
        try:
            yield
        finally:
            self._in_a_call = self._planning = False
            self._due = None

    def start(self) -> None:
        """The call has been planned. Until then no device is waited for, and planning may take long."""
        self._planning = False

    @contextlib.contextmanager
    def on_devices(self) -> Iterator[None]:
        """While all run something before a call begins."""
        before, self._planning = self._planning, False
        try:
            yield
        finally:
            self._planning = before

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """While the host is in its user's hands, who may take his time."""
        self._elsewhere += 1
        try:
            yield
        finally:
            self._elsewhere -= 1

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While ranks exchange something: there each hears of a failure by itself."""
        self._listens = True
        try:
            yield
        finally:
            self._listens = False

    def tell(self, why: str) -> None:
        """This rank has failed."""
        self._send("failed", self.rank, why)

    def all_have_heard(self) -> None:
        """Tell that all know of this rank's failure, from an exchange: no group needs to be ended for it."""
        self._send("heard", self.rank, "")

    def tell_of_interrupt(self) -> None:
        """This rank was interrupted, and the first one acts on it."""
        self._send("interrupted", self.rank, "")

    def _send(self, kind: str, rank: int, why: str) -> None:
        with self._lock:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):  # one that is gone is seen where it is read
                    peer.send((kind, rank, why))

    def _watch(self) -> None:
        waiting = selectors.DefaultSelector()
        for rank, peer in self._peers.items():
            waiting.register(peer, selectors.EVENT_READ, rank)
        while True:
            due = self._due
            for key, _ in waiting.select(None if due is None else max(0.0, due[0] - time.monotonic())):
                if not self._read(key.data):
                    waiting.unregister(key.fileobj)
            due = self._due
            if due is not None and time.monotonic() >= due[0]:
                _, rank, why, gone = due
                self._due = None
                comes = self._listens or (not gone and (self._planning or self._elsewhere > 0))
                if self._in_a_call and not comes:
                    self.end(rank, why)
                elif self._in_a_call:
                    self._due = time.monotonic() + self._grace, rank, why, gone
            if not waiting.get_map() and self._due is None:
                waiting.close()
                return

    def _read(self, rank: int) -> bool:
        try:
            kind, whose, why = self._peers[rank].recv()
        except (EOFError, OSError):
            self._heard(rank, GONE, gone=True)
            return False
        if self.rank == 0 and kind in ("failed", "heard"):  # the others have no connection with it
            self._send(kind, whose, why)
        if kind == "failed":
            self._heard(whose, why)
        elif kind == "heard":  # this may be read in the next call
            self._due = None
        elif kind == "interrupted":
            self.interrupted = True
        else:  # another one has ended the group
            self.end(whose, why)
        return True

    def _heard(self, rank: int, why: str, gone: bool = False) -> None:
        if self._in_a_call and self._due is None and self.failure is None:
            self._due = time.monotonic() + (0.0 if gone else self._grace), rank, why, gone

    def end(self, rank: int, why: str) -> None:
        """The devices' group, as hosts have found that devices wait in it for ever."""
        if self.failure is not None:
            return
        self.failure = rank, why
        self._send("ended", rank, why)  # one that has ended it already does not answer
        # It returns once graphs that hold the group's sums are dropped, and the host drops them when it comes back.
        threading.Thread(target=self._release, name="hf_batchllm-release", daemon=True).start()


def connected(
    rank: int, size: int, exchange: Callable[[Any], list[Any]], on_one_machine: bool
) -> dict[int, Connection]:
    """The first rank has a connection to each other one. The system ends it with the process, whatever else happens."""
    if rank:
        addresses, port, known = exchange(None)[0]
        towards = _connection(addresses, port)
        towards.sendall(known + rank.to_bytes(4, "big"))
        return {0: _ready(towards)}
    peers: dict[int, Connection] = {}
    with socket.create_server(("127.0.0.1" if on_one_machine else "", 0), backlog=size) as listener:
        known = secrets.token_bytes(16)  # to the ranks alone, as the port may be open to others
        addresses = ["127.0.0.1"] if on_one_machine else _own_addresses()
        exchange((addresses, listener.getsockname()[1], known))
        listener.settimeout(60)
        while len(peers) < size - 1:
            peer, _address = listener.accept()
            peer.settimeout(10)
            said = b""
            with contextlib.suppress(OSError):  # whoever else has found the port, and says nothing
                said = peer.recv(20, socket.MSG_WAITALL)
            if said[:16] == known and len(said) == 20:
                peers[int.from_bytes(said[16:], "big")] = _ready(peer)
            else:
                peer.close()
    return peers


def _ready(peer: socket.socket) -> Connection:
    peer.settimeout(None)
    # Otherwise a small message that follows another waits for the first one's acknowledgement, up to 40 ms.
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(peer.detach())


def this_machine() -> str:
    """Names of machines may be equal, in containers above all; what Linux draws when it starts is not."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text() + socket.gethostname()
    return socket.gethostname()


def _own_addresses() -> list[str]:
    """Under which other machines may reach this one."""
    found, outside = [], os.environ.get("MASTER_ADDR", "192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((outside, 9))  # which sends nothing
        found.append(towards.getsockname()[0])
    return [*found, socket.gethostname()]


def _connection(addresses: list[str], port: int) -> socket.socket:
    failed: OSError | None = None
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=60)
        except OSError as error:
            failed = error
    raise RanksError(
        f"the ranks that run this model together cannot reach each other: another one at {' or '.join(addresses)}, "
        f"port {port}: {failed}"
    )


def _close_in_child() -> None:
    """A child that keeps them open would hide the end of its parent."""
    for watch in _open:
        for connection in (*watch._peers.values(), *watch.connections.values()):
            connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
