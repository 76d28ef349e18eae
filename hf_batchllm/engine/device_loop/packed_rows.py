"""What a burst has to know of its rows, in one piece of memory: one copy brings all of it to the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_ALIGN = 16  # numbers: kernels read in pieces of 64 bytes


class PackedRows:
    """Fields of a number for each row, or of several, at fixed addresses.

    longs, ints: the numbers of each field, of 64 and of 32 bits; several for each row if there are more than one.
    """

    def __init__(self, rows: int, longs: Mapping[str, int], ints: Mapping[str, int], device: torch.device) -> None:
        self.rows = rows
        # Each field's first number, its numbers, and whether they have 64 bits.
        self._at: dict[str, tuple[int, int, bool]] = {}
        end = 0
        for fields, words in ((longs, 2), (ints, 1)):
            for name, width in fields.items():
                self._at[name] = end, rows * width, words == 2
                end += -(-rows * width * words // _ALIGN) * _ALIGN
        self._packed = torch.zeros(end, dtype=torch.int32, device=device)

    def field(self, name: str) -> torch.Tensor:  # [rows] or [rows, numbers]
        begin, numbers, is_long = self._at[name]
        part = self._packed[begin : begin + numbers * (1 + is_long)]
        part = part.view(torch.long) if is_long else part
        return part if numbers == self.rows else part.view(self.rows, -1)

    def on_host(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Numbers to be filled in, and the fields in them."""
        packed = np.empty(len(self._packed), dtype=np.int32)
        fields = {}
        for name, (begin, numbers, is_long) in self._at.items():
            part = packed[begin : begin + numbers * (1 + is_long)]
            part = part.view(np.int64) if is_long else part
            fields[name] = part if numbers == self.rows else part.reshape(self.rows, -1)
        return packed, fields

    def send(self, packed: np.ndarray) -> None:
        numbers = torch.from_numpy(packed)
        on_gpu = self._packed.is_cuda
        self._packed.copy_(numbers.pin_memory() if on_gpu else numbers, non_blocking=on_gpu)
