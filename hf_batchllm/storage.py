"""KVStorage: the tensors behind the page table, one pair for each attention layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class KVStorage:
    """Pages of all layers, seen as one row of slots: page ``p`` holds the slots from ``p * page_size`` on."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._layers: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        self._paged: dict[nn.Module, tuple[Any, Any]] = {}

    def of(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The K and V of one layer, [slots, kv_heads, dim]; made when the layer first runs, as its k and v are."""
        if layer not in self._layers:
            slots = self.num_pages * self.page_size
            # It outlives a step, and the next one may run outside an inference mode that this one runs in.
            with torch.inference_mode(False):
                self._layers[layer] = (
                    torch.empty(slots, *k.shape[1:], dtype=k.dtype, device=k.device),
                    torch.empty(slots, *v.shape[1:], dtype=v.dtype, device=v.device),
                )
        return self._layers[layer]

    def paged(self, layer: nn.Module, made_by: Callable[[torch.Tensor], Any]) -> tuple[Any, Any]:
        """What ``made_by`` makes of K and V seen as [pages, page_size, kv_heads, dim]; made once, gone with them."""
        if layer not in self._paged:
            k, v = (pair.view(self.num_pages, self.page_size, *pair.shape[1:]) for pair in self._layers[layer])
            self._paged[layer] = made_by(k), made_by(v)
        return self._paged[layer]

    def grow(self, num_pages: int) -> None:
        """Room for more pages; what the present ones hold stays."""
        self._paged.clear()
        for layer, pair in self._layers.items():
            bigger = []
            for tensor in pair:
                grown = tensor.new_empty(num_pages * self.page_size, *tensor.shape[1:])
                grown[: len(tensor)] = tensor
                bigger.append(grown)
            self._layers[layer] = (bigger[0], bigger[1])
        self.num_pages = num_pages

    def keep_only(self, pages: list[int]) -> None:
        """Let all other pages go; these come first, in this order."""
        self._paged.clear()
        for layer, pair in self._layers.items():
            k, v = (
                tensor.view(self.num_pages, self.page_size, *tensor.shape[1:])[pages].flatten(0, 1) for tensor in pair
            )
            self._layers[layer] = (k, v)
        self.num_pages = len(pages)

    def release(self) -> None:
        """Let the memory go now: the traceback of an error that is kept somewhere would hold on to this object."""
        self._paged.clear()
        self._layers.clear()

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What torch's own attention would be given here; None outside autocast."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None
