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

from .work_lists import sent

Numbers = Sequence[int] | np.ndarray
CHUNK = 64  # tokens


@dataclass(frozen=True)
class Spans:
    """Spans run side by side: no slot is the target of one and the source or the target of another in the same step."""

    begin: torch.Tensor  # [spans + 1] int32  span i has the tokens [begin[i], begin[i + 1])
    source: torch.Tensor  # [spans] int32  -1: nothing came before
    target: torch.Tensor  # [spans] int32  -1: the state is not kept
    of_token: torch.Tensor  # [tokens] int32  the span of each token
    chunk: torch.Tensor  # [chunks + 1] int32  as begin, of spans cut into CHUNK tokens, for kernels that walk in chunks
    single: bool  # whether each span has one token at most, as in a step of decode rows

    def __len__(self) -> int:
        return len(self.source)

    def begun_with(self, states: torch.Tensor) -> torch.Tensor:  # [spans, ...]
        """The state that each span begins with, of ``states`` [slots, ...]: zeros where nothing came before."""
        if not len(states):
            return states.new_zeros(len(self), *states.shape[1:])
        known = (self.source >= 0).view(-1, *[1] * (states.ndim - 1))
        return torch.where(known, states[self.source.clamp(min=0).long()], 0)

    def leave_in(self, states: torch.Tensor, left: torch.Tensor) -> None:
        """Put ``left`` [spans, ...] into the spans' targets."""
        kept = self.target >= 0
        states[self.target[kept].long()] = left[kept].to(states.dtype)

    def divided(self, count: int) -> tuple[Spans, Spans]:
        """The first spans, so many, and the others."""
        at = int(self.begin[count])
        cut = int(torch.searchsorted(self.chunk, at))  # no chunk reaches into two spans
        first = self.begin[: count + 1], self.source[:count], self.target[:count], self.of_token[:at]
        others = self.begin[count:] - at, self.source[count:], self.target[count:], self.of_token[at:] - count
        mine, theirs = self.chunk[: cut + 1], self.chunk[cut:] - at
        return Spans(*first, mine, _single(first[0])), Spans(*others, theirs, _single(others[0]))

    @classmethod
    def of(cls, lengths: Numbers, source: Numbers, target: Numbers, device: torch.device | str = "cpu") -> Spans:
        tokens = np.asarray(lengths, np.int32)
        begin = np.concatenate([[0], np.cumsum(tokens)])
        single = bool((tokens <= 1).all())
        parts = [begin, source, target, np.repeat(np.arange(len(tokens)), tokens)]
        if not single:
            parts.append(_chunks(begin, tokens))
        # One copy to the device. Each part begins where a kernel can read 16 bytes at once, as any tensor does.
        places = np.cumsum([0, *(-(-len(part) // 4) * 4 for part in parts)])
        numbers = np.zeros(places[-1], np.int32)
        for place, part in zip(places, parts, strict=False):
            numbers[place : place + len(part)] = part
        packed = sent(torch.from_numpy(numbers), device)
        first, come_from, go_to, of_token, *chunk = (
            packed[place : place + len(part)] for place, part in zip(places, parts, strict=False)
        )
        return cls(first, come_from, go_to, of_token, chunk[0] if chunk else first, single)


def _chunks(begin: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Where the chunks of all spans begin, and where the last one ends."""
    counts = -(-tokens // CHUNK)
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.concatenate([np.repeat(begin[:-1], counts) + nth * CHUNK, begin[-1:]])


def _single(begin: torch.Tensor) -> bool:
    return bool((begin.diff() <= 1).all())
