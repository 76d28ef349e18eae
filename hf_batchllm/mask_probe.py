"""What a model means by its attention masks, read off without building one.

transformers describes a mask by a function of (batch, head, query, key) and lets each attention implementation
build what it needs from that. The one registered here builds nothing: it keeps the function, to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from .attention import attention_forward

MASK_PROBE_NAME = "hf_batchllm_masks"


@dataclass(frozen=True)
class NotedMask:
    function: Callable[..., torch.Tensor]
    marker: torch.Tensor  # stands for the mask on its way through the model; held, so that its id stays its own

    def sees(self, query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(self.function(zero, zero, torch.tensor(query), torch.tensor(key)))


_noted: dict[int, NotedMask] | None = None


@contextmanager
def attention_masks_noted() -> Iterator[dict[int, NotedMask]]:
    """Masks asked for while the block runs, by the id of the tensor that a layer receives for each."""
    global _noted
    before, _noted = _noted, {}
    try:
        yield _noted
    finally:
        _noted = before


def _note_mask(
    *args: Any, mask_function: Callable[..., torch.Tensor], q_length: int, kv_length: int, **kwargs: Any
) -> torch.Tensor:
    assert _noted is not None, "masks are only asked for while they are noted"
    marker = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=kwargs.get("device"))
    _noted[id(marker)] = NotedMask(mask_function, marker)
    return marker


AttentionInterface.register(MASK_PROBE_NAME, attention_forward)
AttentionMaskInterface.register(MASK_PROBE_NAME, _note_mask)
