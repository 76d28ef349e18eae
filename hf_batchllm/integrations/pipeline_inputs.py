"""What people pass to a text-generation pipeline -> what transformers' own code takes, and why it cannot be run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch.utils.data import Dataset
from transformers.pipelines.pt_utils import KeyDataset
from transformers.utils.chat_template_utils import Chat, is_valid_message

from ..errors import PromptsTypeError
from ..inputs.chats import chat_problem, is_bare_chat, is_chat
from ..inputs.prompts import describe_mapping, read_all, refused_by_tokenizer, why_not_a_list
from ..wording import a_kind, first_line, is_array, is_number

_A_PROMPT_IS = "a prompt is a string or a chat here"
_TOKEN_IDS = f"{_A_PROMPT_IS} (BatchGenerator(model).generate takes token ids, too)"


@dataclass(frozen=True)
class Refused:
    """Stands where an input was that cannot be run."""

    why: str


def as_inputs(given: Any) -> Any:
    """As transformers' pipelines take it: a string, a Chat, a list of them, a generator or a Dataset.

    Iterators become generators, all else that can be walked through becomes a list.
    """
    if isinstance(given, str | Chat):
        return given
    if isinstance(given, KeyDataset) and (not len(given) or is_chat(given[0])):  # which transformers makes a list of
        return [as_input(each) for each in given]
    if isinstance(given, Dataset):
        return given
    if is_array(given) and getattr(given.dtype, "kind", "") not in tuple("UTO"):
        raise PromptsTypeError(f"the inputs are {a_kind(given)} of {given.dtype}; {_TOKEN_IDS}")
    why = why_not_a_list(given, _A_PROMPT_IS)
    if why is not None:
        raise PromptsTypeError(f"prompts is {why}")
    if isinstance(given, Iterator):
        first = next(given, None)
        if first is None:
            return []
        rest = chain([first], given)
        if is_valid_message(first):
            return as_input(list(rest))
        return (as_input(each) for each in rest)
    listed = read_all(given)
    if is_bare_chat(listed):
        return as_input(listed)
    if listed and all(is_number(each) for each in listed):
        raise PromptsTypeError(f"the inputs are a list of numbers; {_TOKEN_IDS}")
    return [as_input(each) for each in listed]


def as_input(given: Any) -> str | Chat | Refused:
    if isinstance(given, str | Chat | Refused):
        return given
    if is_chat(given):
        why = chat_problem(given)
        if why is not None:
            return Refused(why)
        try:
            return Chat(list(given))
        except ValueError as error:
            return Refused(f"is a chat that transformers' pipelines do not take: {first_line(error)}")
    if isinstance(given, Mapping):
        return Refused(f"is {describe_mapping(given, _A_PROMPT_IS)}")
    if isinstance(given, float) and given != given:
        return Refused(f"is NaN, as missing values are; {_A_PROMPT_IS}")
    if is_array(given) or (isinstance(given, list | tuple) and given and all(map(is_number, given))):
        return Refused(f"is {a_kind(given)}; {_TOKEN_IDS}")
    return Refused(f"is {a_kind(given)}; {_A_PROMPT_IS}")


def why_not_encoded(given: str | Chat, tokenizer: Any, error: Exception) -> str:
    return refused_by_tokenizer(given if isinstance(given, str) else given.messages, tokenizer, error)
