"""One row of the table of options: the columns of ``option_table``, and the values that they take. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any


class Fate(Enum):
    HONOURED = "honoured"  # with its meaning in ``generate``
    NO_EFFECT = "no effect"  # accepted; results do not depend on it
    REFUSED = "refused"


class Where(Enum):
    """Where an option is applied, which tells the user what it costs."""

    DEVICE = "device"  # on the model's device; the next step does not wait
    STEP = "each step"  # by transformers' own code or the caller's; the device waits for it after each step
    LATE = "late"  # by the host, which sees the tokens while later steps run


class OptionKind(Enum):
    FIELD = "field"  # of GenerationConfig, and so a keyword argument of ``generate``, too
    ARGUMENT = "argument"  # of ``generate`` alone
    ADDED = "added"  # an argument that ``model.generate`` does not have


class PromptForm(Enum):
    """The form of prompts that an option goes with."""

    ANY = "any"
    LISTS = "lists"
    TENSORS = "tensors"


class Takes(Enum):
    """The kind of a value, where the value alone tells whether it is right. ``option_values`` checks them."""

    ANYTHING = "anything"  # or a kind that transformers checks itself, with a clear error
    WHOLE = "a whole number"
    NUMBER = "a number"
    PENALTY = "a float above 0, such as 1.2"
    FLAG = "True or False"
    TOKEN = "a token id"
    TOKENS = "a token id, or a list of them"
    IDS = "a list of token ids"
    TEXTS = "a string, or a list of strings"


@dataclass(frozen=True)
class OptionRow:
    fate: Fate
    where: Where | None = None
    takes: Takes = Takes.ANYTHING
    kind: OptionKind = OptionKind.FIELD
    goes_with: PromptForm = PromptForm.ANY
    instead: str = ""  # the error's words where the option does not go with the form of the prompts
    neutral: Any = None  # a value that asks for nothing, besides None, False and empty ones
    sampling_only: bool = False  # greedy decoding ignores it
    least: float | None = None
    most: float | None = None
    remedy: str = ""  # follows the words for a number out of the range
    strict: bool = False  # the range holds in every call; else in files alone, and transformers decides in a call
    limit: float | None = None  # more is refused in every call
    each: str = ""  # how the page names the lists that may hold one for each prompt, where the option takes them
    in_config: bool = False  # of ours, and yet a GenerationConfig may hold it
    in_lines: bool = True  # a line of a file may set it, unless it is an argument of ``generate`` alone
    displaces: tuple[str, ...] = ()  # options that a whole file was given, in the lines that set this one
    not_for_files: str = ""  # why files refuse it
    in_requests: bool = False  # requests of OpenAI's batches may set it by this name
    called: tuple[str, ...] = ()  # by other libraries; these names are refused with this one as the remedy
    # The table fills these in.
    name: str = ""
    doc: str = ""  # for users; of a refused option it follows the name in the error: why, and what to do
    chapter: str = ""  # of docs/generate.md

    def asks(self, value: Any) -> bool:
        """Whether the value asks for anything."""
        if value is None or value is False or (isinstance(value, list | tuple | dict) and not value):
            return False
        if self.takes is Takes.FLAG and isinstance(value, int) and not value:
            return False
        return self.neutral is None or not isinstance(value, Real) or value != self.neutral


def honoured(where: Where | None = None, takes: Takes = Takes.ANYTHING, **more: Any) -> OptionRow:
    return OptionRow(Fate.HONOURED, where, takes, **more)


def argument(where: Where | None = None, **more: Any) -> OptionRow:
    return honoured(where, kind=OptionKind.ARGUMENT, **more)


def added(where: Where | None = None, takes: Takes = Takes.ANYTHING, **more: Any) -> OptionRow:
    return honoured(where, takes, kind=OptionKind.ADDED, **more)


def no_effect(takes: Takes = Takes.ANYTHING, **more: Any) -> OptionRow:
    return OptionRow(Fate.NO_EFFECT, None, takes, **more)


def refused(doc: str, **more: Any) -> OptionRow:
    return OptionRow(Fate.REFUSED, doc=doc, **more)


@dataclass(frozen=True)
class Alias:
    """Another library's name for an option, understood everywhere."""

    name: str  # of the option
