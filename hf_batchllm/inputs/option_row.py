"""What is said of an option of ``model.generate``: the columns of ``option_table``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any


class Fate(Enum):
    HONOURED = "honoured"  # with the meaning that it has to ``generate``
    NO_EFFECT = "no effect"  # on results; accepted
    REFUSED = "refused"


class Where(Enum):
    """Where an option is seen to; for the reader, what it costs."""

    DEVICE = "device"  # where the model is; the next step does not wait
    STEP = "each step"  # by transformers' own code or the caller's, for which the device waits after each step
    LATE = "late"  # by the host, from tokens that it gets while later steps run


class OptionKind(Enum):
    FIELD = "field"  # of GenerationConfig, and so a keyword argument of ``generate``, too
    ARGUMENT = "argument"  # of ``generate`` alone
    OURS = "ours"  # an argument that ``model.generate`` does not have


class With(Enum):
    """What the prompts must come as."""

    BOTH = "both"
    LISTS = "lists"
    TENSORS = "tensors"


class Takes(Enum):
    """The kind of a value, where it can be checked without looking at anything else."""

    ANYTHING = "anything"  # or transformers checks it itself, in words that a user understands
    WHOLE = "a whole number"
    NUMBER = "a number"
    FLAG = "True or False"
    TOKEN = "a token id"
    TOKENS = "a token id, or a list of them"
    IDS = "a list of token ids"


class Subject(Enum):
    """The chapters of the documentation, in their order."""

    PROMPTS = "Prompts and settings"
    ENDS = "Lengths and ends"
    CHOICE = "Greedy or sampled"
    BEAMS = "Beam search"
    SCORES = "What changes the scores"
    RESULTS = "What comes back"
    MODES = "Other ways to generate"
    SPECULATION = "Speculation"
    RUNNING = "How transformers would run"


@dataclass(frozen=True)
class OptionRow:
    name: str
    fate: Fate
    doc: str = ""  # in the user's words; for what is refused it follows the name in the error: why, and what to do
    where: Where | None = None
    kind: OptionKind = OptionKind.FIELD
    goes_with: With = With.BOTH
    instead: str = ""  # what the error says where it does not go with the prompts
    takes: Takes = Takes.ANYTHING
    nothing: Any = None  # a value that asks for nothing, beside None, False and what is empty
    sampling: bool = False  # greedy decoding does not look at it
    subject: Subject = Subject.PROMPTS

    def asks(self, value: Any) -> bool:
        """Whether the value asks for anything."""
        if value is None or value is False or (isinstance(value, list | tuple | dict) and not value):
            return False
        return self.nothing is None or not isinstance(value, Real) or value != self.nothing
