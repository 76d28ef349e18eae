"""A quick look at a model: whether anything of it has been touched at all, right or wrong.

Between two tokens there is no time to compare a model of hundreds of modules piece by piece (``owners_state``). Mostly
nobody has touched it, and then all that it consists of is still the same objects in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from ..patches.sharded_modules import local

_CONTAINERS = (dict, list, set, OrderedDict)


class Glance:
    """Of the modules of a model. It holds all that it looks at, so it should not outlive a call."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._kinds = list(map(type, self._modules))
        held = [module.__dict__ for module in self._modules]
        inner = list(_containers(chain.from_iterable(map(dict.values, held))))
        self._containers = [*held, *inner]
        self._lengths = list(map(len, self._containers))
        # What is empty stays so where the lengths are the same.
        self._dicts = [each for each in self._containers if each and isinstance(each, dict)]
        self._others = [each for each in inner if each and not isinstance(each, dict)]
        self._keys = list(chain.from_iterable(self._dicts))
        self._objects = list(self._objects_now())
        # A tensor stays the same object when its owner puts other memory under it.
        tensors = chain.from_iterable((*each["_parameters"].values(), *each["_buffers"].values()) for each in held)
        self._tensors = [each for each in tensors if each is not None]
        self._places = self._places_now()

    def untouched(self) -> bool:
        """Whether nothing was touched. If not, what was done may be of no account."""
        return (
            list(map(type, self._modules)) == self._kinds
            and list(map(len, self._containers)) == self._lengths
            and self._same_keys()
            and all(map(is_, self._objects_now(), self._objects))
            and self._places_now() == self._places
        )

    def _same_keys(self) -> bool:
        try:
            return list(chain.from_iterable(self._dicts)) == self._keys  # mostly the same strings: faster than `is_`
        except Exception:  # other keys, which cannot be compared
            return False

    def _objects_now(self) -> Iterator[object]:
        """Values and items, in their order."""
        values = chain.from_iterable(map(dict.values, self._dicts))
        return chain(values, chain.from_iterable(self._others))

    def _places_now(self) -> list[object]:
        return [_place(each) for each in self._tensors]


def _place(tensor: torch.Tensor) -> object:
    try:
        return local(tensor).data_ptr(), tensor.shape, tensor.stride()
    except RuntimeError:  # a tensor made of others has no memory of its own
        return None


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    """Those among the values, and those in them, whose contents may change while they stay the same objects."""
    for value in values:
        if type(value) in _CONTAINERS:
            yield value
            if value and not isinstance(value, set):  # what is in a set cannot change
                yield from _containers(value.values() if isinstance(value, dict) else value)
