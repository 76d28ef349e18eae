"""The LM head on a CPU, multiplied the other way round: the same numbers in two thirds of the time.

A head is a very wide matrix for a few rows. BLAS is fastest when the long side comes first: a block of the vocabulary
times the rows, transposed into its place, beats the rows times the vocabulary. The logits go into memory that earlier
steps have touched: new memory for every step costs as much again as reading the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from .swap import Place, Swap

_BLOCK = 2048  # rows of the weight at a time: the product is still in the cache when it is transposed
_FEWEST_ROWS, _MOST_ROWS = 12, 512  # for which it pays
_SMALLEST_VOCABULARY = 16384  # for which it pays


class HeadSwap(Swap):
    """The head multiplies our way, if it is plain enough. Its hooks run as ever."""

    def __init__(self, head: nn.Module | None) -> None:
        super().__init__()
        self._head = head
        self._own_references = 0
        self._logits: torch.Tensor | None = None

    def places(self) -> Iterator[Place]:
        head = self._plain_head()
        if head is not None:
            yield head.__dict__, "forward", self._forward

    def _plain_head(self) -> nn.Linear | None:
        """The head, if it is large, in float32 on a CPU, and neither wrapped nor parametrized nor adapted."""
        head = self._head
        if type(head) is not nn.Linear or "forward" in head.__dict__ or head.bias is not None:
            return None
        weight = head.weight
        fits = weight.device.type == "cpu" and weight.dtype == torch.float32
        return head if fits and head.out_features >= _SMALLEST_VOCABULARY else None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [1, rows, width] -> [1, rows, vocabulary]
        weight = cast(nn.Linear, self._head).weight
        rows, vocabulary = hidden.shape[-2], weight.shape[0]
        fits = hidden.ndim == 3 and hidden.shape[0] == 1 and hidden.dtype == weight.dtype
        if not fits or not _FEWEST_ROWS <= rows <= _MOST_ROWS:
            return nn.functional.linear(hidden, weight)
        if self._logits is None or self._logits.shape[0] < rows or _references(self._logits) > self._own_references:
            # The last condition: a hook or a wrapper has kept an earlier step's logits, which must not be overwritten.
            with torch.inference_mode(False):
                self._logits = torch.empty(rows, vocabulary, dtype=weight.dtype, device=weight.device)
            self._own_references = _references(self._logits)
        logits = self._logits[:rows]
        across = hidden[0].t().contiguous()  # [width, rows]
        for begin in range(0, vocabulary, _BLOCK):
            block = weight[begin : begin + _BLOCK]
            logits[:, begin : begin + _BLOCK].copy_(torch.mm(block, across).t())
        return logits[None]


def _references(tensor: torch.Tensor) -> int:
    """How many tensors share the memory: the tensor, its views and the like."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
