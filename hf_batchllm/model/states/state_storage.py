"""StateStorage: the states of layers that carry one from token to token, in slots of one sequence each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...errors import CacheMemoryError, UnsupportedModelError
from ..device_memory import is_out_of_memory
from ..transfers import to_device

COPIED_AT_ONCE = 64 << 20  # bytes, which a copy takes beside the states


class StateShape(NamedTuple):
    """What a sequence keeps for one call of a state function, which the model makes in each pass."""

    function: str  # the kind of call, in words
    shape: tuple[int, ...]  # of one sequence
    exact: bool  # float32, whatever the model computes in

    def bytes(self, dtype: torch.dtype) -> int:
        return math.prod(self.shape) * (torch.float32 if self.exact else dtype).itemsize


class StateStorage:
    """One tensor [slots, ...] for each call of a pass, in their order. They are made when a pass first comes there."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._states: list[torch.Tensor] = []
        self._reserved: list[torch.Tensor] = []  # for calls that have not come yet

    def reserve(self, shapes: Iterable[StateShape], dtype: torch.dtype, device: torch.device) -> None:
        """Take the memory of all calls now."""
        for each in shapes:
            self._reserved.append(self._new(each.shape, torch.float32 if each.exact else dtype, device))

    def of(self, call: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The states of the pass's call of this number, [slots, *shape]."""
        if call == len(self._states):
            reserved = self._reserved.pop(0) if self._reserved else None
            if reserved is None or (reserved.shape[1:], reserved.dtype) != (shape, dtype):
                reserved = None  # its memory goes first
                reserved = self._allocated(shape, dtype, device)
            self._states.append(reserved)
        states = self._states[call]
        if (states.shape[1:], states.dtype) != (shape, dtype):
            raise UnsupportedModelError(
                f"a layer carries a state of {dtype} and shape {[*shape]}, and one of {states.dtype} and shape "
                f"{[*states.shape[1:]]} in the step before; that is not supported"
            )
        return states

    def _allocated(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        try:
            return self._new(shape, dtype, device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise CacheMemoryError(
                f"the memory for the states of {self.num_slots:,} sequences is not there: set a smaller `kv_memory`, "
                f"or free what else is on {device}"
            ) from error

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # Made in inference mode, it could not be written to by a later step outside it.
        with torch.inference_mode(False):
            return torch.empty((self.num_slots, *shape), dtype=dtype, device=device)

    @torch.no_grad()
    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the states of all calls, as if all (source, target) slots were copied at the same time."""
        if not pairs or not self._states:
            return
        numbers = np.array(list(zip(*pairs, strict=True)), dtype=np.int64)
        in_turn = bool(np.isin(*numbers).any())  # a slot is both: nothing may be written before all is read
        source, target = to_device(numbers, self._states[0].device)
        for states in self._states:
            at_once = len(pairs) if in_turn else max(1, COPIED_AT_ONCE // max(1, states[0].nbytes))
            for few, others in zip(source.split(at_once), target.split(at_once), strict=True):
                states[others] = states[few]

    def grow(self, num_slots: int) -> None:
        """Make room for more; the present ones keep what they hold."""
        self._reserved.clear()  # of another size
        for call, states in enumerate(self._states):
            grown = states.new_empty(num_slots, *states.shape[1:])
            grown[: len(states)] = states
            self._states[call] = grown
        self.num_slots = num_slots

    def keep_only(self, slots: list[int]) -> None:
        """Free all others. These become the first ones, in this order."""
        self._reserved.clear()
        self._states = [states[slots] for states in self._states]
        self.num_slots = len(slots)

    def release(self) -> None:
        """Free the memory now."""
        self._reserved.clear()
        self._states.clear()

    @property
    def bytes(self) -> int:
        return sum(states.nbytes for states in (*self._states, *self._reserved))
