"""Which layers attend to the K and V of an earlier layer (Gemma 3n and Gemma 4 have such layers).

The model hands such a layer the very tensors that it handed the earlier layer. Nothing of its config must be known.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import nn

_Ref = weakref.ReferenceType[torch.Tensor]


class _Given(NamedTuple):
    layer: nn.Module
    key: _Ref  # weak: most layers' K and V are to be freed before the pass ends
    value: _Ref
    contents: object  # changes when the tensors are written to


class GivenKV:
    """The K and V that the layers of one pass have been given so far."""

    def __init__(self) -> None:
        self._given: dict[int, _Given] = {}  # by the id of K

    def source(self, layer: nn.Module, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> nn.Module | None:
        """The layer that was given the same tensors before, to attend in the same ``dtype``; None if none was."""
        contents = dtype, _writes(key), _writes(value)
        known = self._given.get(id(key))
        if known is not None and known.key() is key and known.value() is value and known.contents == contents:
            return known.layer
        self._given[id(key)] = _Given(layer, weakref.ref(key), weakref.ref(value), contents)
        return None


def _writes(tensor: torch.Tensor) -> int | None:
    """How often the tensor was written to in place; None where PyTorch does not count."""
    return None if tensor.is_inference() else tensor._version
