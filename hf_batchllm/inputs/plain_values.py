"""Options as what has the same repr in each process: what ranks compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import LogitsProcessor, StoppingCriteria

from .options import Options

# Processors and criteria may count what they have seen, which is not the same in each process.
_as_first_seen: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def plain(value: Any, held: str | None = None) -> Any:
    """Makes a value one whose repr is the same in each process. Objects count by their classes.

    held: processors and criteria count by their attributes, too, if the name of their module begins so.
    """

    def of(each: Any) -> Any:
        return plain(each, held)

    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return sorted((repr(of(key)), of(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return [of(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(of(each)) for each in value)
    if isinstance(value, torch.Tensor):
        return plain(value.detach().cpu().tolist())
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, of(vars(value))]
    if (
        held is not None
        and isinstance(value, LogitsProcessor | StoppingCriteria)
        and type(value).__module__.startswith(held)
        and type(value).__hash__ is not None
    ):
        if value not in _as_first_seen:
            _as_first_seen[value] = type(value).__name__  # it may hold itself
            attributes = {name: each for name, each in vars(value).items() if name != "initial_timestamp"}
            _as_first_seen[value] = [type(value).__name__, of(attributes)]
        return _as_first_seen[value]
    return type(value).__name__


def plain_options(each_prompt: Sequence[Options], held: str | None = None) -> Any:
    """The options of all prompts. What has no effect on results, such as a streamer, may be on one rank alone."""
    ways = list(dict.fromkeys(each_prompt))  # each for many prompts
    number = {id(each): place for place, each in enumerate(ways)}
    unlike = {"tokenizer": None, "streamer": None}
    settings = [[each.config.to_dict(), {**vars(each.arguments), **unlike}] for each in ways]
    return plain([[number[id(each)] for each in each_prompt], settings], held)
