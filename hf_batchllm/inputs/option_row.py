"""One row of the table of options: the columns of ``option_table``, and the values that they take."""

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
    """The kind of a value, where the value alone tells whether it is right."""

    ANYTHING = "anything"  # or a kind that transformers checks itself, with a clear error
    WHOLE = "a whole number"
    NUMBER = "a number"
    FLAG = "True or False"
    TOKEN = "a token id"
    TOKENS = "a token id, or a list of them"
    IDS = "a list of token ids"


class Subject(Enum):
    """The chapters of docs/generate.md, in their order."""

    PROMPTS = "Prompts and settings"
    CHATS = "Chats and long prompts"
    ENDS = "Lengths and ends"
    CHOICE = "Greedy or sampled"
    BEAMS = "Beam search"
    GRAMMARS = "Answers of a given form"
    SCORES = "What changes the scores"
    RESULTS = "What comes back"
    MODES = "Other ways to generate"
    SPECULATION = "Speculation"
    RUNNING = "How transformers would run"


@dataclass(frozen=True)
class OptionRow:
    name: str
    fate: Fate
    doc: str = ""  # for users; of a refused option it follows the name in the error: why, and what to do
    where: Where | None = None
    kind: OptionKind = OptionKind.FIELD
    goes_with: PromptForm = PromptForm.ANY
    instead: str = ""  # the error's words where the option does not go with the form of the prompts
    takes: Takes = Takes.ANYTHING
    neutral: Any = None  # a value that asks for nothing, besides None, False and empty ones
    sampling_only: bool = False  # greedy decoding ignores it
    subject: Subject = Subject.PROMPTS

    def asks(self, value: Any) -> bool:
        """Whether the value asks for anything."""
        if value is None or value is False or (isinstance(value, list | tuple | dict) and not value):
            return False
        return self.neutral is None or not isinstance(value, Real) or value != self.neutral


def honoured(name: str, where: Where | None, doc: str = "", **more: Any) -> OptionRow:
    return OptionRow(name, Fate.HONOURED, doc, where, **more)


def argument(name: str, where: Where | None, doc: str, **more: Any) -> OptionRow:
    return OptionRow(name, Fate.HONOURED, doc, where, OptionKind.ARGUMENT, **more)


def added(name: str, where: Where | None, doc: str, **more: Any) -> OptionRow:
    return OptionRow(name, Fate.HONOURED, doc, where, OptionKind.ADDED, **more)


def no_effect(name: str, doc: str, **more: Any) -> OptionRow:
    return OptionRow(name, Fate.NO_EFFECT, doc, **more)


def refused(name: str, doc: str, **more: Any) -> OptionRow:
    return OptionRow(name, Fate.REFUSED, doc, **more)


def chapter(subject: Subject, *rows: OptionRow) -> dict[str, OptionRow]:
    return {row.name: OptionRow(**{**vars(row), "subject": subject}) for row in rows}
