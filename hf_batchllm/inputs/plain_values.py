"""Options as what has the same repr in each process: what ranks compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .options import Options


def plain(value: Any) -> Any:
    """As what has the same repr in each process. Objects of the user's, such as processors, count by their classes."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return sorted((repr(plain(key)), plain(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(plain(each)) for each in value)
    if isinstance(value, torch.Tensor):
        return plain(value.detach().cpu().tolist())
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, plain(vars(value))]
    return type(value).__name__


def plain_options(each_prompt: Sequence[Options]) -> Any:
    """The options of all prompts. What has no effect on results, such as a streamer, may be on one rank alone."""
    ways = list(dict.fromkeys(each_prompt))  # each for many prompts
    number = {id(each): place for place, each in enumerate(ways)}
    unlike = {"tokenizer": None, "streamer": None}
    settings = [[each.config.to_dict(), {**vars(each.arguments), **unlike}] for each in ways]
    return plain([[number[id(each)] for each in each_prompt], settings])
