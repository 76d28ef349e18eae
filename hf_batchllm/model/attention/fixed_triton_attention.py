"""The backend for ``invariant=True`` over kernels: decode rows and prompts alike attend in parts that end at fixed
positions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import UnsupportedModelError
from ...kernel_check.attention_cases import Shape, tried_in_parts
from ...kernels.lists.fixed_lists import FIXED_TILES, build_fixed
from ...kernels.lists.ranges import Readers
from ...kernels.lists.work_lists import WorkLists
from ...notices import Notices
from ...patches.attention_interface import AttentionCall
from ...patches.fixed_forwards import Conv1DAsLinear
from ..batch import AttentionBatch
from ..unsplit_products import unsplit
from .kv_storage import KVStorage
from .triton_attention import AttentionKernels, KernelAttention, StepWork, TritonBackend, WorkSource, on_this_card

_ANY_LENGTH = 1 << 40


@dataclass(frozen=True)
class FixedKernels:
    """In Triton, or as references in PyTorch."""

    attend: Callable[..., None]
    merge: Callable[..., None]
    boxes: Callable[[torch.Tensor], Any]  # gives K or V in the form in which boxes are read


def triton_fixed_kernels() -> FixedKernels:
    from ...kernels.triton import fixed_attention_triton, pages_triton

    return FixedKernels(fixed_attention_triton.attend_fixed, fixed_attention_triton.merge_fixed, pages_triton.by_page)


class FixedTritonBackend(TritonBackend):
    short_chunk = _ANY_LENGTH
    fewest_rows = 2  # the products of a single one are computed with more, and each would copy it
    tiles = FIXED_TILES
    sums = (2,)

    def __init__(
        self,
        fixed: FixedKernels,
        kernels: AttentionKernels,
        storage: KVStorage,
        device: torch.device,
        notices: Notices,
        *others: Any,
        **named: Any,
    ) -> None:
        super().__init__(kernels, storage, device, notices, *others, **named)
        self.fixed = fixed

    def fixed_forwards(self, model: nn.Module) -> Conv1DAsLinear:
        return Conv1DAsLinear(model)

    def products(self) -> AbstractContextManager[object]:
        return unsplit() if self.device.type == "cuda" else nullcontext()

    def failure(self, device: torch.device, shape: Shape) -> str | None:
        return _tried(device, shape)

    def work_of(self, batch: AttentionBatch) -> FixedStepWork:
        return FixedStepWork(batch, self.device, self.multiprocessors, self.gates, self.work_seen)

    def over(self, work: WorkSource) -> FixedKernelAttention:
        return FixedKernelAttention(work, self)


@cache
def _tried(device: torch.device, shape: Shape) -> str | None:
    return on_this_card(tried_in_parts(device, shape))


class FixedStepWork(StepWork):
    short_chunk = _ANY_LENGTH  # chunks of prompts are rows like others

    def on_host(self, window: int | None, heads: int, kv_heads: int, sinks: bool) -> WorkLists:
        key = window, heads, kv_heads, sinks
        if key not in self._on_host:
            self._on_host[key] = self._built(key, self._readers(slice(self._short)), self._lengths)
        return self._on_host[key]

    def _built(self, key: tuple[Any, ...], readers: Readers, lengths: np.ndarray) -> WorkLists:
        window, heads, kv_heads, sinks = key
        return build_fixed(
            self._units,
            readers,
            lengths,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            page_size=self.batch.page_size,
            multiprocessors=self.multiprocessors,
            window=window,
            gates=self.gates,
            direct=not sinks,
        )

    def _note(self, key: tuple[Any, ...], work: WorkLists) -> None:
        """Where there are prompts, the work of the decode rows that come of them: graphs are made ready for these."""
        readers = self._readers(slice(self._short))
        if (readers.rows > 1).any():
            rows = np.arange(len(readers.rows))
            work = self._built(key, replace(readers, row=rows, rows=np.ones_like(rows)), readers.end)
        super()._note(key, work)


class FixedKernelAttention(KernelAttention):
    backend: FixedTritonBackend

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls += 1
        backend, storage = self.backend, self.backend.storage
        k_cache, v_cache = storage.read_by(call)
        refusal = backend.refusal(call)
        if refusal is not None:
            raise UnsupportedModelError(
                f"`invariant=True` needs kernels, and those cannot run {type(call.layer).__name__}: {refusal}"
            )
        q = self._written(call, k_cache, v_cache) if call.source is None else call.q.contiguous()
        if self.work.copies is not None and call.source is None:
            self.work.copies.run(k_cache)
            self.work.copies.run(v_cache)
        boxes = storage.paged(call.source or call.layer, backend.fixed.boxes)
        shape = storage.num_pages, storage.page_size
        k, v = (pages.view(*shape, *pages.shape[1:]) for pages in (k_cache, v_cache))
        out = q.new_empty(*q.shape[:2], v_cache.shape[2])
        work = self.work.lists(call.window, q.shape[1], k.shape[2], call.sinks is not None)
        parts = self._memory(work.parts, out)
        for tile in reversed(FIXED_TILES):  # the long items first
            if tile in work.items:
                backend.fixed.attend(
                    tile, q, k, v, boxes, out, *parts, work, self.work.lengths, call.scale,
                    window=call.window, softcap=call.softcap,
                )  # fmt: skip
        if work.merges:
            backend.fixed.merge(out, *parts, work, sinks=call.sinks)
        return out
