"""The methods of things that touch a device which followers call as well: the leader tells them first.

A thing that leads is of a class made here, over its own: what the table names sends a frame first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..config import BatchConfig
from ..errors import RanksError
from ..model.batch import ModelBatch
from ..model.inspection.architecture import Architecture
from ..notices import Notices


class Numbered(NamedTuple):
    """Stands for a thing in a frame."""

    number: int


class Own(NamedTuple):
    """Stands for what each process has of its own, as ModelInUse names it."""

    name: str


class Shared(NamedTuple):
    """Stands for tokens of the leader's device, which all devices get."""

    number: int


class Way(NamedTuple):
    """How all call a method.

    of_all: makes one of what all of them say; None: nobody asks. sends: what followers are given of the arguments.
    """

    of_all: Callable[[list[Any]], Any] | None = None
    sends: Callable[..., Sequence[Any]] = lambda *given: given
    makes: str = ""  # a thing, which leads as the table says
    ends: bool = False  # done in any case, also where a follower has failed


def _first(each: list[Any]) -> Any:
    return each[0]


def _any(each: list[Any]) -> Any:
    return next((said for said in each if said is not None), None)


def _same(each: list[list[str]]) -> list[str]:
    if any(others != each[0] for others in each):
        raise RanksError(
            f"the {len(each)} ranks that run this model together have different kernels that can be used: "
            'leave more memory free, or pass `backend="torch"` on all of them'
        )
    return each[0]


def _sendable(batch: ModelBatch, *others: Any) -> Sequence[Any]:
    """Without requests, which followers know nothing of, and without what the batch has noted of itself."""
    drafts = batch.draft_rows
    if drafts is not None and drafts.room is not None:
        drafts = replace(drafts, room=replace(drafts.room, place={}))
    return replace(batch, asked=[], attention=replace(batch.attention), draft_rows=drafts), *others


def _of_graphs(
    config: Any, runner: Any, seats: Any, pick: Any, advance: Any, times: Any, *others: Any
) -> Sequence[Any]:
    """Whether rows of a follower go on from what the leader has picked."""
    return config, runner, seats, pick is not None, times


# fmt: off
LED: dict[str, dict[str, Way]] = {
    "devices": {"memory": Way(_first, makes="memory"), "storage": Way(_first, makes="storage"),
                "computed_with": Way(_first, makes="computed_with"), "seats": Way(_first, makes="seats"),
                "graphs": Way(_first, _of_graphs, makes="graphs")},
    "use": {"check": Way(_same), "fuse": Way(_first), "drop_runner": Way(ends=True),
            "run_over": Way(sends=lambda storage, *_: [storage], makes="runner")},
    "runner": {"launch": Way(sends=_sendable), "try_step": Way(_first, _sendable)},
    "memory": {"free": Way(min), "taken_since_mark": Way(max), "trim": Way(), "start": Way(), "mark": Way()},
    "storage": {"reserve": Way(_first), "grow": Way(_first), "keep_only": Way(_first), "release": Way(ends=True)},
    "computed_with": {"holds_for": Way(all)},
    "seats": {"set": Way(), "store": Way(sends=lambda where, picked: [where, Shared(len(picked))])},
    "graphs": {"run_rows": Way(sends=_sendable), "run_again": Way(), "holds": Way(all), "hold_anew": Way(_any),
               "is_tight": Way(any), "make_ready": Way(_any), "capture": Way(_any), "drop": Way(),
               "close": Way(sends=lambda _: [], ends=True)},
}
# fmt: on
_OWN: dict[type, str] = {
    nn.Module: "model",
    Architecture: "architecture",
    torch.device: "device",
    BatchConfig: "config",
    Notices: "notices",
}


class Leads(Protocol):
    def do(self, thing: Any, name: str, way: Way, own: Callable[..., Any], given: Sequence[Any]) -> Any: ...


def lead(thing: Any, kind: str, leader: Leads, number: int) -> None:
    """From here on all do what is done to ``thing``, which may be frozen."""
    object.__setattr__(thing, "_leader", leader)
    object.__setattr__(thing, "_number", number)
    own: Any = type(thing)
    object.__setattr__(thing, "__class__", _led(own, kind))


def sent(given: Any) -> Any:
    """What stands for it in a frame."""
    if hasattr(given, "_number"):
        return Numbered(given._number)
    return next((Own(name) for kind, name in _OWN.items() if isinstance(given, kind)), given)


@cache
def _led(of: Any, kind: str) -> Any:
    def led(name: str, way: Way) -> Callable[..., Any]:
        return lambda self, *given: self._leader.do(self, name, way, partial(getattr(of, name), self), given)

    return type(f"Led{of.__name__}", (of,), {name: led(name, way) for name, way in LED[kind].items()})
