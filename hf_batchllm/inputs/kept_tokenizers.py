"""Tokenizers that were loaded from beside a model, kept for its next generator: loading takes seconds.

Nobody but generators holds a kept tokenizer. A user may change one, so the generator that shows its tokenizer has it
alone from then on.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from transformers import AutoTokenizer

_Place = tuple[Any, ...]


@dataclass
class _Kept:
    tokenizer: Any
    place: _Place
    holders: WeakSet[Any] = field(default_factory=WeakSet)


_kept: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


def load_tokenizer(model: nn.Module, name: str, holder: object, *, local_files_only: bool = False) -> Any:
    """The tokenizer saved under a name, as a ``holder`` has loaded it for this model before."""
    place = _place(name)  # changed files are loaded
    kept = _kept.get(model)
    if kept is None or kept.place != place:
        only = {"local_files_only": True} if local_files_only else {}
        kept = _kept[model] = _Kept(AutoTokenizer.from_pretrained(name, **only), place)
    kept.holders.add(holder)
    return kept.tokenizer


def own_tokenizer(model: nn.Module, tokenizer: Any, holder: object) -> Any:
    """For the hands of a user: a tokenizer that no other holder has, or gets."""
    kept = _kept.get(model)
    if kept is None or kept.tokenizer is not tokenizer:
        return tokenizer
    kept.holders.discard(holder)
    if kept.holders:
        return copy.deepcopy(tokenizer)
    del _kept[model]
    return tokenizer


def _place(name: str) -> _Place:
    """A folder with its files as they are now; a name on the hub stands for itself."""
    if not os.path.isdir(name):
        return (name,)
    files = []
    for folder, _, names in os.walk(name):
        for each in names:
            path = os.path.join(folder, each)
            try:
                found = os.stat(path)
            except OSError:  # it is being replaced, or a link leads nowhere
                continue
            files.append((path, found.st_mtime_ns, found.st_size))
    return (os.path.realpath(name), *sorted(files))
