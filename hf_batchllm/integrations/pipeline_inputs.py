"""The inputs of a pipeline, in the forms that transformers' own code takes; or why one is bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from torch.utils.data import Dataset, IterableDataset
from transformers.pipelines.pt_utils import KeyDataset
from transformers.utils.chat_template_utils import Chat, is_valid_message

from ..errors import PromptsTypeError
from ..inputs.chats import chat_problem, is_bare_chat, is_chat
from ..inputs.not_prompts import describe_mapping, why_not_a_list
from ..inputs.prompts import read_all, refused_by_tokenizer
from ..wording import a_kind, first_line, is_array, is_number

_A_PROMPT_IS = "a prompt is a string or a chat here"
_TOKEN_IDS = f"{_A_PROMPT_IS} (BatchGenerator(model).generate takes token ids, too)"


@dataclass(frozen=True)
class BadInput:
    """Takes the place of an input that cannot be run."""

    why: str


def as_inputs(given: Any, as_input: Callable[[Any], Any] | None = None) -> Any:
    """The inputs as transformers' pipelines take them: a string, a Chat, a list of both, a generator or a Dataset.

    Iterators become generators, other iterables become lists. ``as_input``: makes an input of each.
    """
    as_input = as_input or as_text_input
    if isinstance(given, str | Chat):
        return given
    if isinstance(given, KeyDataset) and (not len(given) or is_chat(given[0])):  # transformers makes a list of these
        return [as_input(given[place]) for place in range(len(given))]
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


def as_text_input(given: Any, images: bool = False) -> str | Chat | BadInput:
    """``images``: whether chats may show some."""
    if isinstance(given, str | Chat | BadInput):
        return given
    if is_chat(given):
        why = chat_problem(given, images=images)
        if why is not None:
            return BadInput(why)
        try:
            return Chat(cast(Any, list(given)))
        except ValueError as error:
            return BadInput(f"is a chat that transformers' pipelines do not take: {first_line(error)}")
    if isinstance(given, Mapping):
        return BadInput(f"is {describe_mapping(given, _A_PROMPT_IS)}")
    if isinstance(given, float) and given != given:
        return BadInput(f"is NaN, as missing values are; {_A_PROMPT_IS}")
    if is_array(given) or (isinstance(given, list | tuple) and given and all(map(is_number, given))):
        return BadInput(f"is {a_kind(given)}; {_TOKEN_IDS}")
    return BadInput(f"is {a_kind(given)}; {_A_PROMPT_IS}")


def why_not_encoded(given: str | Chat, tokenizer: Any, error: Exception) -> str:
    return refused_by_tokenizer(given if isinstance(given, str) else given.messages, tokenizer, error)


def read_inputs(inputs: Any) -> list[Any]:
    """All inputs as a list, read as transformers' DataLoader would read them."""
    if isinstance(inputs, list):
        return inputs
    is_sized = isinstance(inputs, Sized) and not isinstance(inputs, IterableDataset)
    if is_sized:
        return [inputs[place] for place in range(len(inputs))]
    return read_all(inputs)
