"""Which tokens a model's attention masks show, read off without building a mask.

transformers describes a mask by a function of (batch, head, query, key), and each attention implementation builds what
it needs from that. The implementation registered here builds nothing: it keeps the function and answers with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from .attention_interface import attention_forward

MASK_PROBE_NAME = "hf_batchllm_masks"


@dataclass(frozen=True)
class NotedMask:
    function: Callable[..., torch.Tensor]
    marker: torch.Tensor  # the model passes it on as the mask; kept alive so that no other tensor gets its id

    def sees(self, query: int, key: int) -> bool:
        zero, at, other = (torch.tensor(number, device="cpu") for number in (0, query, key))
        return bool(self.function(zero, zero, at, other))


# For each thread: several may probe their models at a time.
_noted: ContextVar[dict[int, NotedMask]] = ContextVar("hf_batchllm_masks")


@contextmanager
def attention_masks_noted() -> Iterator[dict[int, NotedMask]]:
    """Collects the masks that the model asks for while the block runs, by the id of the tensor that layers receive."""
    masks: dict[int, NotedMask] = {}
    token = _noted.set(masks)
    try:
        yield masks
    finally:
        _noted.reset(token)


def _note_mask(
    *args: Any, mask_function: Callable[..., torch.Tensor], q_length: int, kv_length: int, **kwargs: Any
) -> torch.Tensor:
    marker = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=kwargs.get("device"))
    _noted.get()[id(marker)] = NotedMask(mask_function, marker)
    return marker


AttentionInterface.register(MASK_PROBE_NAME, attention_forward)
AttentionMaskInterface.register(MASK_PROBE_NAME, _note_mask)
