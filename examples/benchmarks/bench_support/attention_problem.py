"""An attention problem in the forms that other libraries take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

GATHERED_BYTES = 1 << 30  # of K and V that a graph goes over: more than the L2 cache holds
Step = Callable[[], torch.Tensor]  # [rows, heads, dim]


class Unfit(Exception):
    """Raised for a problem that a rival is not made for."""


@dataclass
class Problem:
    q: torch.Tensor  # [rows, heads, dim]
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # each [pages, PAGE, kv_heads, dim]
    want: torch.Tensor  # [rows, heads, dim]  of the first cache
    slots: list[np.ndarray]  # for each reader, the slots that its last row sees
    rows: np.ndarray  # [readers]  query rows, at the last of these positions
    prefixes: np.ndarray | None = None  # [groups]  tokens that all readers of a group see
    degrees: np.ndarray | None = None  # [groups]  readers

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(each) for each in self.slots])

    @property
    def kv_heads(self) -> int:
        return self.caches[0][0].shape[2]

    @property
    def dim(self) -> int:
        return self.q.shape[2]

    def int32(self, values: Iterable[int] | np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(self.q.device)

    def gathered(self, index: np.ndarray, heads_first: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V at these slots [..., kv_heads, dim], from enough caches to exceed the L2 cache.

        With ``heads_first`` an index [readers, keys] gives [readers, kv_heads, keys, dim].
        """
        size = 2 * index.size * self.kv_heads * self.dim * self.q.element_size()
        places = torch.from_numpy(index).to(self.q.device)

        def one(cache: torch.Tensor) -> torch.Tensor:
            flat = cache.reshape(-1, self.kv_heads, self.dim)
            if not heads_first:
                return flat[places]
            made = flat.new_empty(len(index), self.kv_heads, index.shape[1], self.dim)
            for row, place in enumerate(places):
                made[row] = flat[place].transpose(0, 1)
            return made

        count = max(1, min(len(self.caches), -(-GATHERED_BYTES // size)))
        return [(one(k), one(v)) for k, v in self.caches[:count]]


Make = Callable[[Problem], list[Step]]  # one step for each cache


def plain_prompts(problem: Problem) -> np.ndarray:
    """Slots [prompts, tokens]; raises Unfit unless the batch is nothing but prompts of one length."""
    if (problem.rows != problem.rows[0]).any() or (problem.lengths != problem.rows).any():
        raise Unfit("for prompts of one length, without prefixes")
    return np.stack(problem.slots)
