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
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from .attention_interface import attention_forward

MASK_PROBE_NAME = "hf_batchllm_masks"


@dataclass(frozen=True)
class NotedMask:
    function: Callable[..., torch.Tensor]
    marker: torch.Tensor  # the model passes it on as the mask; kept alive so that no other tensor gets its id
    given: torch.Tensor | None = None  # [1, tokens]  which tokens are seen at all, by a mask that the model was given

    def sees(self, query: int, key: int) -> bool:
        zero, at, other = (torch.tensor(number, device="cpu") for number in (0, query, key))
        with _TablesGoOn():
            return bool(self.function(zero, zero, at, other))


class _TablesGoOn(TorchFunctionMode):
    """Reads a table of a pass's tokens (which are part of an image, for one) beyond its end, as if it went on.

    The pass ran over equal tokens. So a table whose entries are all equal says the same of every later token; of any
    other table nothing is known beyond its end.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            table, places = args
            if len(places) <= table.ndim and all(isinstance(place, torch.Tensor) for place in places):
                inside = [place.clamp(max=size - 1) for place, size in zip(places, table.shape, strict=False)]
                if bool((table == table.flatten()[0]).all()):
                    args = table, tuple(inside)
        return function(*args, **(kwargs or {}))


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
    _noted.get()[id(marker)] = NotedMask(mask_function, marker, kwargs.get("attention_mask"))
    return marker


AttentionInterface.register(MASK_PROBE_NAME, attention_forward)
AttentionMaskInterface.register(MASK_PROBE_NAME, _note_mask)
