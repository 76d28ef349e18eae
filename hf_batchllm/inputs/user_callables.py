"""Processors and criteria of the user's own: one list for all sequences, or a factory of lists, one for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LogitsProcessor
from transformers.generation import StoppingCriteria

from ..errors import OptionValueError
from ..wording import a_kind

Factory = Callable[[int, list[int]], Sequence[Any]]  # a prompt's place in the list, its token ids -> a list


@dataclass(frozen=True)
class Role:
    """What one of them is called, and as what it is passed in."""

    option: str
    kind: type
    one: str
    several: str
    takes_more: bool  # than ``input_ids`` and ``scores``


PROCESSORS = Role("logits_processor", LogitsProcessor, "processor", "processors", takes_more=False)
CRITERIA = Role("stopping_criteria", StoppingCriteria, "criterion", "criteria", takes_more=True)


def listed(given: Any) -> list[Any]:
    """What is in a list; nothing, where there is none or a factory."""
    return list(given) if isinstance(given, list | tuple) else []


def factory_of(given: Any) -> Factory | None:
    return None if given is None or isinstance(given, list | tuple) else given


def check_listed(role: Role, given: Any) -> None:
    """``given`` is None, a list or a factory of lists; OptionValueError for anything else."""
    if isinstance(given, list | tuple):
        _check_each(role, given, "holds")
    elif isinstance(given, type):
        why = f"is the class {given.__name__}: make an object of it and put it into a list, {role.option}="
        raise OptionValueError(role.option, f"{why}[{given.__name__}(...)]")
    elif isinstance(given, role.kind) or "scores" in _parameters(given)[:2]:
        raise OptionValueError(role.option, f"is a single {role.one} ({name_of(given)}): put it into a list")
    elif given is not None and not callable(given):
        why = f"must be a list of {role.several}, or a function that gives a list for each sequence"
        raise OptionValueError(role.option, f"{why}, not {a_kind(given)}")


def made_by(role: Role, factory: Factory, index: int, prompt_token_ids: list[int]) -> list[Any]:
    """What a factory makes for one sequence."""
    made = factory(index, prompt_token_ids)
    if not isinstance(made, list | tuple):
        why = (
            f"is called as {name_of(factory)}(index, prompt_token_ids) and must give a list of {role.several}, not "
            f"{a_kind(made)}. If it is a {role.one} itself, put it into a list"
        )
        raise OptionValueError(role.option, why)
    _check_each(role, made, f"({name_of(factory)}) gave a list that holds")
    return list(made)


def name_of(function: Any) -> str:
    """A function's name, or that of an object's class."""
    function = getattr(function, "func", function)  # of a functools.partial
    return getattr(function, "__name__", None) or type(function).__name__


def _check_each(role: Role, some: Sequence[Any], holds: str) -> None:
    for place, each in enumerate(some):
        if isinstance(each, type):
            raise OptionValueError(
                role.option, f"{holds} the class {each.__name__} in place {place}: make an object of it"
            )
        if not callable(each):
            why = f"{holds} {a_kind(each)} in place {place}, which is no {role.one}: it must take (input_ids, scores)"
            raise OptionValueError(role.option, why)
        if not role.takes_more and len(needed := _parameters(each.__call__)) > 2:  # type: ignore[operator]
            why = f"{holds} {name_of(each)}, which wants {', '.join(needed)}: it gets input_ids and scores alone"
            raise OptionValueError(role.option, why)


def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of some extension modules
        return []
