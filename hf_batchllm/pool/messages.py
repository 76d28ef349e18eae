"""What a pool and its workers tell each other: whole Python objects, one after the other."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from ..planning.pieces import TokenCosts
from ..results.run_report import RunReport

# -- to a worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """The first message. ``load`` gives the generator."""

    load: Callable[[], Any]


@dataclass(frozen=True)
class Ask:
    """Call ``function(generator, *given)``, and say what it gives."""

    question: int
    function: Callable[..., Any]
    given: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Run:
    """Run a part of a call. ``part`` has a method ``results``; ``pieces``: numbers of units, of each piece."""

    call: int
    part: Any
    pieces: dict[int, list[int]]
    began: float  # when the call did, as time.time() has it


@dataclass(frozen=True)
class GiveUp:
    """Another worker has run out of work: give it those of these pieces that have not begun."""

    call: int
    pieces: Sequence[int]


@dataclass(frozen=True)
class Stop:
    """Break a call off."""

    call: int


@dataclass(frozen=True)
class End:
    """Close the generator, and end."""


# -- from a worker -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The generator is there."""

    name: str  # of the model
    fingerprint: str  # of its weights
    costs: TokenCosts
    seconds: float  # that loading took


@dataclass(frozen=True)
class Answered:
    question: int
    value: Any


@dataclass(frozen=True)
class Failed:
    """An error in what was asked last. ``fatal``: the worker is of no further use."""

    error: BaseException
    fatal: bool
    call: int | None = None  # in which it happened
    question: int | None = None


@dataclass(frozen=True)
class Results:
    call: int
    results: list[Any]


@dataclass(frozen=True)
class GivenUp:
    """The answer to ``GiveUp``: these pieces will not be run here."""

    call: int
    pieces: list[int]


@dataclass(frozen=True)
class Progress:
    """What has been run of a call so far."""

    call: int
    read: int  # tokens of prompts
    written: int  # tokens of answers


@dataclass(frozen=True)
class Done:
    """A part has been run, or was broken off."""

    call: int
    report: RunReport | None  # without its plan
    seconds: float  # that it took
    read: int  # tokens, as in Progress
    written: int
    problems: dict[int, str] = field(default_factory=dict)  # units that do not fit into memory, and why


@dataclass(frozen=True)
class Warned:
    text: str


@dataclass(frozen=True)
class Pulse:
    """The process is there. ``silent``: seconds since anything moved in it."""

    silent: float


@dataclass(frozen=True)
class Died:
    """Not a message of the worker: nothing more will come of it."""

    why: str


def packed(message: Any) -> bytes:
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        pickler: Any = pickle
    else:
        pickler = cloudpickle  # functions and classes of a notebook or a script go by what they are, not by their name
    return bytes(pickler.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def packed_for_worker(message: Any, what: str) -> bytes:
    """``what``: what of the user's is in it, for the error if it cannot be sent."""
    try:
        return packed(message)
    except Exception as error:
        hint = ""
        try:
            import cloudpickle  # noqa: F401
        except ImportError:
            hint = ". With the package cloudpickle (`pip install cloudpickle`) functions of a notebook can be sent, too"
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"{what} cannot be sent to another process ({why}){hint}") from error
