"""The LM head on a CPU, multiplied the other way round: the same numbers in two thirds of the time.

A head is a very wide matrix for a few rows. BLAS is at its best when the long side comes first, so a block of the
vocabulary times the rows, transposed into its place, beats the rows times the vocabulary; and the logits go into memory
that was touched before, where new memory for every step costs as much again as reading the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_BLOCK = 2048  # rows of the weight at a time: what comes out is still in the cache when it is transposed
_FEW, _MANY = 12, 512  # rows for which it pays
_WIDE = 16384  # a vocabulary for which it pays


class HeadSwap:
    """``restore`` may be called again and again: an interrupt may come in the midst of it."""

    def __init__(self, head: nn.Module | None) -> None:
        self._head = head
        self._own_references = 0
        self._logits: torch.Tensor | None = None
        self._applied = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While the block runs, the head multiplies our way, if it is plain enough. Its hooks run as ever."""
        if self._is_plain():
            self._applied = True
            self._head.__dict__["forward"] = self._forward
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        if self._applied:
            self._head.__dict__.pop("forward", None)
            self._applied = False

    def _is_plain(self) -> bool:
        head = self._head
        return (
            type(head) is nn.Linear  # nothing wrapped, parametrized or adapted
            and "forward" not in head.__dict__
            and head.bias is None
            and head.weight.device.type == "cpu"
            and head.weight.dtype == torch.float32
            and head.out_features >= _WIDE
        )

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [1, rows, width] -> [1, rows, vocabulary]
        weight = self._head.weight
        rows, vocabulary = hidden.shape[-2], weight.shape[0]
        if hidden.ndim != 3 or hidden.shape[0] != 1 or not _FEW <= rows <= _MANY or hidden.dtype != weight.dtype:
            return nn.functional.linear(hidden, weight)
        if self._logits is None or self._logits.shape[0] < rows or _references(self._logits) > self._own_references:
            # Also where somebody (a hook, a wrapper) has kept what an earlier step gave: never write to that again.
            with torch.inference_mode(False):
                self._logits = torch.empty(rows, vocabulary, dtype=weight.dtype)
            self._own_references = _references(self._logits)
        logits = self._logits[:rows]
        across = hidden[0].t().contiguous()  # [width, rows]
        for begin in range(0, vocabulary, _BLOCK):
            block = weight[begin : begin + _BLOCK]
            logits[:, begin : begin + _BLOCK].copy_(torch.mm(block, across).t())
        return logits[None]


def _references(tensor: torch.Tensor) -> int:
    """How many tensors there are over the same memory, views and the like."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
