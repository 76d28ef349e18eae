"""The user's own processors and criteria: one list that all sequences share, or a factory of a list for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import LogitsProcessor, StoppingCriteria

from ..errors import BatchLLMError, OptionValueError
from ..wording import a_kind

_RAISED_IN = "raised in your code, in "

Factory = Callable[[int, list[int]], Sequence[Any]]  # a prompt's place in the list, its token ids -> a list


@dataclass(frozen=True)
class CallableOption:
    """An option that takes such lists, and what errors call the things in them."""

    name: str
    base: type  # transformers' class of such things
    singular: str
    plural: str
    takes_more: bool  # whether one may take arguments beside ``input_ids`` and ``scores``


PROCESSORS = CallableOption("logits_processor", LogitsProcessor, "processor", "processors", takes_more=False)
CRITERIA = CallableOption("stopping_criteria", StoppingCriteria, "criterion", "criteria", takes_more=True)


def shared_list(given: Any) -> list[Any]:
    """The list that all sequences share; empty where there is none, or a factory."""
    return list(given) if isinstance(given, list | tuple) else []


def factory_of(given: Any) -> Factory | None:
    return None if given is None or isinstance(given, list | tuple) else given


def check_list_or_factory(option: CallableOption, given: Any) -> None:
    """``given`` is None, a list or a factory of lists; OptionValueError for anything else."""
    if isinstance(given, list | tuple):
        _check_each(option, given, "holds")
    elif isinstance(given, type):
        why = f"is the class {given.__name__}: make an object of it and put it into a list, {option.name}="
        raise OptionValueError(option.name, f"{why}[{given.__name__}(...)]")
    elif isinstance(given, option.base) or "scores" in _parameters(given)[:2]:
        why = f"is a single {option.singular} ({callable_name(given)}): put it into a list"
        raise OptionValueError(option.name, why)
    elif given is not None and not callable(given):
        why = f"must be a list of {option.plural}, or a function that gives a list for each sequence"
        raise OptionValueError(option.name, f"{why}, not {a_kind(given)}")


def call_factory(option: CallableOption, factory: Factory, index: int, prompt_token_ids: list[int]) -> list[Any]:
    """The factory's list for one sequence, checked."""
    try:
        made = factory(index, prompt_token_ids)
    except Exception as error:
        say_where(error, f"the factory of `{option.name}` ({callable_name(factory)})", index)
        raise
    if not isinstance(made, list | tuple):
        why = (
            f"is called as {callable_name(factory)}(index, prompt_token_ids) and must give a list of {option.plural}, "
            f"not {a_kind(made)}. If it is a {option.singular} itself, put it into a list"
        )
        raise OptionValueError(option.name, why)
    _check_each(option, made, f"({callable_name(factory)}) gave a list that holds")
    return list(made)


def say_where(error: Exception, what: str, index: int | None = None) -> None:
    """Note on an error out of a function of the user's which one raised it, and at which prompt, if it was at one."""
    if isinstance(error, BatchLLMError):
        return  # it says so itself
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):  # the same object may have come out of an earlier call
        notes[:] = [note for note in notes if not str(note).startswith(_RAISED_IN)]
    with suppress(Exception):  # its class may do anything
        error.add_note(f"{_RAISED_IN}{what}{'' if index is None else f', at prompt {index:,}'}")


def callable_name(function: Any) -> str:
    """A function's name, or that of an object's class."""
    function = getattr(function, "func", function)  # of a functools.partial
    return getattr(function, "__name__", None) or type(function).__name__


def _check_each(option: CallableOption, callables: Sequence[Any], holds: str) -> None:
    for place, each in enumerate(callables):
        if isinstance(each, type):
            why = f"{holds} the class {each.__name__} at place {place}: make an object of it"
            raise OptionValueError(option.name, why)
        if not callable(each):
            why = f"{holds} {a_kind(each)} at place {place}, which is not a {option.singular}"
            raise OptionValueError(option.name, f"{why}: it must take (input_ids, scores)")
        parameters = _parameters(each.__call__)
        if not option.takes_more and len(parameters) > 2:
            why = f"{holds} {callable_name(each)}, which takes {', '.join(parameters)}"
            raise OptionValueError(option.name, f"{why}: a {option.singular} is called with input_ids and scores alone")


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions of extension modules have no signature
        return []
