"""The keyword arguments of ``generate``, by name and type: for editors, type checkers, notebooks and ``help``.

``option_table`` says what becomes of each. Nothing here changes a call: an option that is left out is not passed on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence  # noqa: F401 -- get_type_hints looks for the names of types here
from typing import Any, TypeVar

import torch  # noqa: F401 -- likewise

from . import option_chapters as chapters

Function = TypeVar("Function", bound=Callable[..., Any])
_SHOWN = (  # people type these most
    *("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "num_return_sequences", "stop_strings"),
    *("num_beams", "repetition_penalty", "eos_token_id", "adapter", "logprobs"),
)


class GenerateOptions(
    chapters.Prompts,
    chapters.Chats,
    chapters.Ends,
    chapters.Choice,
    chapters.Beams,
    chapters.Grammars,
    chapters.Scores,
    chapters.Results,
    chapters.Modes,
    chapters.Speculation,
    chapters.Running,
    total=False,
):
    """Every option that ``generate`` takes, beside the arguments that its signature names."""


class LeftOut:
    """The default of an argument for which None has a meaning of its own."""

    def __repr__(self) -> str:
        return "<left out>"

    def __reduce__(self) -> str:
        return "LEFT_OUT"  # there is one, in another process too


LEFT_OUT: Any = LeftOut()


def shows_options(function: Function) -> Function:
    """Names the options that people type most in the signature that notebooks and ``help`` show, before ``**rest``."""
    written = inspect.signature(function)
    given = list(written.parameters.values())
    places = [at for at, each in enumerate(given) if each.kind is inspect.Parameter.KEYWORD_ONLY]
    first = places[0] if places else len(given) - 1
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=LEFT_OUT, annotation=_written(name))
        for name in _SHOWN
        if name not in written.parameters
    ]
    function.__signature__ = written.replace(parameters=[*given[:first], *named, *given[first:]])  # type: ignore[attr-defined]
    return function


def _written(name: str) -> str:
    """The type of an option as it is written above."""
    of = GenerateOptions.__annotations__[name].__origin__
    return getattr(of, "__forward_arg__", None) or str(of).replace("collections.abc.", "")
