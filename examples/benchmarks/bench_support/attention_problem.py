"""An attention problem in the forms that other libraries take: what the benches hand to the rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

TOGETHER = 1 << 30  # bytes of gathered K and V that a graph goes over: more than the L2 cache holds
Step = Callable[[], torch.Tensor]  # [rows, heads, dim]


class Unfit(Exception):
    """What a rival cannot do, or need not."""


@dataclass
class Problem:
    q: torch.Tensor  # [rows, heads, dim]
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # each [pages, PAGE, kv_heads, dim]
    want: torch.Tensor  # [rows, heads, dim]  of the first cache
    slots: list[np.ndarray]  # of each reader: what its last row sees
    rows: np.ndarray  # [readers]  query rows, at the last of these positions
    prefixes: np.ndarray | None = None  # [groups]  tokens that a group's readers all see
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
        """K and V at these slots [..., kv_heads, dim], of as many caches as it takes to go past L2.

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

        count = max(1, min(len(self.caches), -(-TOGETHER // size)))
        return [(one(k), one(v)) for k, v in self.caches[:count]]


Make = Callable[[Problem], list[Step]]  # one step for each cache


def plain_prompts(problem: Problem) -> np.ndarray:
    """[prompts, tokens]  where the batch is prompts of one length and nothing else."""
    if (problem.rows != problem.rows[0]).any() or (problem.lengths != problem.rows).any():
        raise Unfit("for prompts of one length, without prefixes")
    return np.stack(problem.slots)
