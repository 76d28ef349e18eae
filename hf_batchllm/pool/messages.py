"""What a pool and its workers tell each other: Python objects, one after the other.

What is the user's, or comes of it, is in a ``Parcel``: a message can be read even where its parcel cannot be opened.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import pickle
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any

from ..errors import BatchLLMError, ConfigError
from ..inputs.garbage_collection import garbage_collection_paused
from ..planning.pieces import TokenCosts
from ..results.run_report import RunReport


@dataclass(frozen=True)
class Parcel:
    data: bytes
    what: str  # it is, for errors

    @classmethod
    def of(cls, content: Any, what: str) -> Parcel:
        try:
            with garbage_collection_paused():
                return cls(_packed(content), what)
        except Exception as error:
            why = f"{what} cannot be sent to another process ({in_words(error)[:300]}){_hint()}"
            raise ConfigError(why) from error

    def open(self) -> Any:
        try:
            with garbage_collection_paused():  # a list of prompts holds many objects
                return pickle.loads(self.data)
        except Exception as error:
            why = f"{self.what} cannot be read in another process ({in_words(error)[:300]}){_hint()}"
            raise ConfigError(why) from error


def in_words(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _packed(content: Any) -> bytes:
    if importlib.util.find_spec("cloudpickle") is None:
        into = io.BytesIO()
        _ByName(into, pickle.HIGHEST_PROTOCOL).dump(content)
        return into.getvalue()
    import cloudpickle  # type: ignore[import-untyped]

    # Functions and classes of a notebook or a script go by what they are, not by their name.
    return bytes(cloudpickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL))


class _ByName(pickle.Pickler):
    """Says at once what another process would not find."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in a script or a notebook")
        return NotImplemented


def _hint() -> str:
    if importlib.util.find_spec("cloudpickle") is not None or "cloudpickle" in sys.modules:
        return ""
    return ". With the package cloudpickle (`pip install cloudpickle`) what a script or a notebook defines can be sent"


# -- to a worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """The first message. In it: what gives the generator."""

    load: Parcel


@dataclass(frozen=True)
class Ask:
    """Call ``function(generator, *given)``, and say what it gives. In it: the function, and what it is given."""

    call: int  # its number, from which the answer is known
    content: Parcel


@dataclass(frozen=True)
class Run:
    """Run a part of a call. In it: a ``Part``. ``piece_of``: the piece of each of its requests, by their numbers."""

    call: int
    part: Parcel
    piece_of: dict[int, int]
    began: float  # when the call did, as time.time() has it


@dataclass(frozen=True)
class GiveUp:
    """Another worker runs these pieces of the latest part: run none of them that has not begun."""

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
    fingerprint: dict[str, str]  # of the model and its tokenizer
    costs: TokenCosts


@dataclass(frozen=True)
class Answered:
    call: int
    value: Parcel


class Blame(Enum):
    """What an error comes of."""

    USERS = "the call"  # it would come in every process
    MEMORY = "memory"  # other processes may have more
    DEVICE = "the device"  # the process is of no further use, or has no model


@dataclass(frozen=True)
class Failed:
    """An error in what was asked last, which has ended."""

    call: int | None  # None: no model could be loaded
    error: Parcel | None  # None: it cannot be sent
    text: str
    blame: Blame

    @classmethod
    def of(cls, error: BaseException, call: int | None, blame: Blame) -> Failed:
        parcel, text = None, in_words(error)
        if not isinstance(error, BatchLLMError):  # its frames are here alone
            with contextlib.suppress(Exception):
                error.add_note("In a process of the pool:\n" + "".join(traceback.format_exception(error)).rstrip())
        with contextlib.suppress(ConfigError):
            parcel = Parcel.of(error, "an error")
        return cls(call, parcel, text, blame)

    def opened(self) -> BaseException:
        """With its text alone where it cannot be read here."""
        error = None
        with contextlib.suppress(ConfigError):
            error = self.error and self.error.open()
        return error if isinstance(error, BaseException) else RuntimeError(self.text)


@dataclass(frozen=True)
class Progress:
    """What has come of the part that runs, since the last message of it.

    problems: of prompts, or places, that do not fit into the worker's memory.
    """

    call: int
    results: list[Any]
    problems: dict[Any, str]
    read: int  # tokens of prompts in this call, so far
    written: int  # and of answers


@dataclass(frozen=True)
class Begun:
    """This piece has begun: nobody takes it over any more."""

    call: int
    piece: int


@dataclass(frozen=True)
class Done:
    """A part has been run, or was broken off; nothing more comes of it."""

    call: int
    report: RunReport | None  # without its plan
    seconds: float  # that it took


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
