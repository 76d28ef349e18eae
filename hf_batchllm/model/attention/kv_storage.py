"""KVStorage: the tensors behind the page table, one pair for each attention layer with K and V of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...errors import CacheMemoryError, UnsupportedModelError
from ...inputs.base_model import base_model
from ...patches.attention_interface import AttentionCall, autocast_dtype
from ...patches.autocast_around import dtype_within
from ..device_memory import is_out_of_memory
from ..states.state_storage import StateShape, StateStorage

KVPair = tuple[torch.Tensor, torch.Tensor]  # K and V, each [slots, kv_heads, dim]
TensorSpec = tuple[tuple[int, ...], torch.dtype, torch.device]


class AttentionShape(NamedTuple):
    """The sizes of one attention layer."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    source: int | None = None  # the place of an earlier layer whose K and V this one reads; None: it has its own

    @property
    def kv_values(self) -> int:
        """How many values a token has, in K and V together."""
        return self.kv_heads * (self.qk_dim + self.v_dim)


class KVStorage:
    """Pages of all layers, seen as one row of slots: page ``p`` holds the slots from ``p * page_size`` on.

    ``states``: of layers that carry a state from token to token, in slots of another kind: one for each sequence.
    """

    def __init__(self, num_pages: int, page_size: int, num_slots: int = 0) -> None:
        self.num_pages = num_pages
        self.states = StateStorage(num_slots)
        self.page_size = page_size
        self._layers: dict[nn.Module, KVPair] = {}
        self._readers: set[nn.Module] = set()  # layers that read the pair of another
        self._reserved: list[KVPair] = []  # for layers that have not run yet
        self._paged: dict[nn.Module, tuple[Any, Any]] = {}  # K and V as a kernel reads them

    def reserve(
        self,
        shapes: Iterable[AttentionShape],
        dtype: torch.dtype,
        device: torch.device,
        states: Iterable[StateShape] = (),
    ) -> None:
        """Take the memory of all layers now. Each layer gets a pair of its shape when it first runs."""
        self.states.reserve(states, dtype, device)
        for shape in shapes:
            if shape.source is not None:
                continue
            k, v = ((self.slots, shape.kv_heads, dim) for dim in (shape.qk_dim, shape.v_dim))
            self._reserved.append((_new(k, dtype, device), _new(v, dtype, device)))

    @property
    def slots(self) -> int:
        return self.num_pages * self.page_size

    def read_by(self, call: AttentionCall) -> KVPair:
        """The K and V that a layer attends to: its own, or those of its source."""
        if call.source is not None:
            self._readers.add(call.layer)
            return self._layers[call.source]
        if call.layer in self._readers:
            raise UnsupportedModelError(
                f"{type(call.layer).__name__} shared the K and V of an earlier layer in one step and has some of its "
                "own in a later one; that is not supported: leave the model as it is between the results of a call"
            )
        return self.of(call.layer, call.k, call.v)

    def of(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> KVPair:
        """The K and V of one layer, [slots, kv_heads, dim].

        Where none of their shape and type are reserved, they are made when the layer first runs: a layer may compute
        in another type than the model has, which shows only then.
        """
        if layer not in self._layers:
            wanted = [((self.slots, *x.shape[1:]), x.dtype, x.device) for x in (k, v)]
            fitting = (at for at, pair in enumerate(self._reserved) if _specs(pair) == wanted)
            if (place := next(fitting, None)) is not None:
                self._layers[layer] = self._reserved.pop(place)
            else:
                del self._reserved[:1]  # the pair that was reserved for it makes room
                self._layers[layer] = self._allocated(wanted)
        return self._layers[layer]

    def _allocated(self, specs: list[TensorSpec]) -> KVPair:
        try:
            return _new(*specs[0]), _new(*specs[1])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise CacheMemoryError(
                f"the memory for the KV cache of {self.slots:,} tokens is not there, after "
                f"{len(self._layers):,} layers: set a smaller `kv_memory`, or free what else is on {specs[0][2]}"
            ) from error

    def pairs(self) -> list[KVPair]:
        """The pairs of all layers that have run so far."""
        return list(self._layers.values())

    def paged(self, layer: nn.Module, made_by: Callable[[torch.Tensor], Any]) -> tuple[Any, Any]:
        """What ``made_by`` makes of K and V as [pages, page_size, kv_heads, dim]. Kept until their memory moves."""
        if layer not in self._paged:
            k, v = (pair.view(self.num_pages, self.page_size, *pair.shape[1:]) for pair in self._layers[layer])
            self._paged[layer] = made_by(k), made_by(v)
        return self._paged[layer]

    def grow(self, num_pages: int, num_slots: int = 0) -> None:
        """Make room for more pages and slots; the present ones keep what they hold."""
        if num_slots > self.states.num_slots:
            self.states.grow(num_slots)
        self._paged.clear()
        self._reserved.clear()  # of another size
        for layer, pair in self._layers.items():
            bigger = []
            for tensor in pair:
                grown = tensor.new_empty(num_pages * self.page_size, *tensor.shape[1:])
                grown[: len(tensor)] = tensor
                bigger.append(grown)
            self._layers[layer] = (bigger[0], bigger[1])
        self.num_pages = num_pages

    def keep_only(self, pages: list[int], slots: Sequence[int] = ()) -> None:
        """Free all other pages, and all other slots of states. These become the first ones, in this order."""
        self.states.keep_only(list(slots))
        self._paged.clear()
        self._reserved.clear()
        for layer, pair in self._layers.items():
            k, v = (
                tensor.view(self.num_pages, self.page_size, *tensor.shape[1:])[pages].flatten(0, 1) for tensor in pair
            )
            self._layers[layer] = (k, v)
        self.num_pages = len(pages)

    def release(self) -> None:
        """Free the memory now: the traceback of an error that is kept somewhere would keep this object alive."""
        self._paged.clear()
        self._reserved.clear()
        self._layers.clear()
        self._readers.clear()
        self.states.release()

    @property
    def bytes(self) -> int:
        pairs = (*self._layers.values(), *self._reserved)
        return self.states.bytes + sum(tensor.nbytes for pair in pairs for tensor in pair)


def _new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Made in inference mode, it could not be written to by a later step outside it.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def _specs(pair: KVPair) -> list[TensorSpec]:
    return [(tuple(x.shape), x.dtype, x.device) for x in pair]


def kv_dtype(model: nn.Module, device: torch.device) -> torch.dtype:
    """The type in which most layers compute keys and values. ``model``: as it is called, adapters and all."""
    model_dtype: torch.dtype = base_model(model).dtype
    if model_dtype == torch.float64:  # which autocast leaves alone
        return model_dtype
    return dtype_within(model, device) or autocast_dtype(device) or model_dtype
