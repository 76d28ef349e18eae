"""Spans: runs of tokens in a packed step, each of one sequence, whose layers carry a state from token to token.

A *slot* holds the state of one sequence in every such layer. A span begins with the state of its *source* slot and
leaves the state behind its last token in its *target* slot. So a sequence goes on where source and target are the same;
it begins on a shared prefix where the source is the prefix's slot; and a prefix keeps its state, at its very end, for
all that stand on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Spans:
    """Spans run side by side: no slot is the target of one and the source or the target of another in the same step."""

    begin: torch.Tensor  # [spans + 1] int32  span i has the tokens [begin[i], begin[i + 1])
    source: torch.Tensor  # [spans] int32  -1: nothing came before
    target: torch.Tensor  # [spans] int32  -1: the state is not kept
    of_token: torch.Tensor  # [tokens] int32  the span of each token
    single: bool  # whether each span has one token at most, as in a step of decode rows

    def __len__(self) -> int:
        return len(self.source)

    @classmethod
    def of(
        cls, lengths: Sequence[int], source: Sequence[int], target: Sequence[int], device: torch.device | str = "cpu"
    ) -> Spans:
        tokens = np.asarray(lengths, np.int32)
        begin = np.concatenate([[0], np.cumsum(tokens)])
        of_token = np.repeat(np.arange(len(tokens)), tokens)

        def sent(numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.asarray(numbers).astype(np.int32)).to(device)

        return cls(sent(begin), sent(source), sent(target), sent(of_token), single=bool((tokens <= 1).all()))
