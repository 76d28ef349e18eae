"""The backend over the attention kernels: a step's work lists, made once for all layers that attend alike.

Decode rows and prompt chunks of a few tokens go through the cascade: a prefix that several of them read is read once.
Longer chunks have enough rows of their own, and go through the prefill kernel, as do chunks with images whose tokens
see each other both ways. A layer of a shape that the kernels cannot do runs in plain PyTorch, with a warning.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from ...kernel_check.attention_cases import Shape, tried
from ...kernels.lists.ranges import GATE, GATE_MERGED, Readers, Units, make_chunks, make_ranges
from ...kernels.lists.work_lists import TILES, PrefillWork, WorkLists, build_prefill, build_work
from ...notices import Notices
from ...patches.attention_interface import AttentionCall, Rotation
from ..batch import AttentionBatch, Copies
from ..transfers import to_device
from .attention_backend import AttentionBackend
from .kv_storage import KVStorage
from .torch_attention import CascadePlan, Scratch, write_in_torch

SHORT_CHUNK = 16  # tokens; chunks of no more than these run together with the decode rows
_MULTIPROCESSORS_OF_A_CPU = 8  # it has none: work lists are cut as if it had these


@dataclass(frozen=True)
class AttentionKernels:
    """The kernels, in Triton or as their references in PyTorch."""

    write: Callable[..., None]
    attend_items: Callable[..., None]
    merge_parts: Callable[..., None]
    attend_chunks: Callable[..., None]
    by_page: Callable[[torch.Tensor], Any]  # gives K or V in the form that the kernels read
    launch_options: Callable[[int, int, int, int], dict[str, int]]  # of ``attend_chunks``
    unsupported: Callable[..., str | None]  # gives the reason why a layer's shape cannot be done


def triton_kernels(interpreted: bool = False) -> AttentionKernels:
    from ...kernels.triton import decode_triton, layer_ops_triton, pages_triton, prefill_triton

    def unsupported(*shape: Any) -> str | None:
        if interpreted and shape[-1] == torch.bfloat16:
            return "Triton's interpreter (TRITON_INTERPRET is set) does not multiply bfloat16"
        return pages_triton.unsupported(*shape)

    return AttentionKernels(
        write=layer_ops_triton.rope_and_write,
        attend_items=decode_triton.attend_items,
        merge_parts=decode_triton.merge_parts,
        attend_chunks=prefill_triton.attend_chunks,
        by_page=pages_triton.by_page,
        launch_options=prefill_triton.launch_options,
        unsupported=unsupported,
    )


@dataclass
class WorkSeen:
    """Which kernels layers of one kind have needed so far."""

    tiles: set[int] = field(default_factory=set)  # of ``attend_items``
    merges: bool = False  # whether partial results were merged

    def note(self, tiles: Iterable[int], merges: bool) -> WorkSeen:
        self.tiles.update(tiles)
        self.merges |= merges
        return self


class TritonBackend(AttentionBackend):
    short_chunk = SHORT_CHUNK
    tiles: tuple[int, ...] = TILES
    sums: tuple[int, ...] = ()  # the shape of what a head of a part has beside its values

    def __init__(
        self,
        kernels: AttentionKernels,
        storage: KVStorage,
        device: torch.device,
        notices: Notices,
        gates: tuple[float, float] = (GATE, GATE_MERGED),
        tries_shapes: bool = False,
    ) -> None:
        """``tries_shapes``: on this card a kernel is held against its reference when a layer's shape first comes up."""
        self.kernels = kernels
        self.tries_shapes = tries_shapes
        self.gates = gates
        self.storage = storage
        self.device = device
        self.notices = notices
        self.multiprocessors = _MULTIPROCESSORS_OF_A_CPU
        if device.type == "cuda":
            self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self.scratch = Scratch()
        self.work_seen: dict[tuple[Any, ...], WorkSeen] = {}  # in decode rows, by the key of ``lists``
        self._parts: torch.Tensor | None = None  # memory for the most parts that were asked for
        self._part_shapes: set[tuple[int, int, torch.device]] = set()
        self._refusals: dict[tuple[Any, ...], str | None] = {}

    def prepare(self, batch: AttentionBatch) -> KernelAttention:
        return self.over(self.work_of(batch))

    def over(self, work: WorkSource) -> KernelAttention:
        return KernelAttention(work, self)

    def release(self) -> None:
        self.scratch.release()
        self._parts = None

    def work_of(self, batch: AttentionBatch) -> StepWork:
        return StepWork(batch, self.device, self.multiprocessors, self.gates, self.work_seen)

    @property
    def does_all(self) -> bool:
        """Whether the kernels could do every layer so far."""
        return not any(self._refusals.values())

    def parts(
        self, parts: int, heads: int, dim: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [parts, heads, dim], [parts, heads, *sums]
        """Memory for partial results until they are merged. All layers, steps and graphs use it in turn."""
        self._part_shapes.add((heads, dim, device))
        numbers = parts * heads * (dim + math.prod(self.sums))
        if self._parts is None or len(self._parts) < numbers:
            with torch.inference_mode(False):  # later steps may run outside it
                self._parts = torch.empty(numbers, dtype=torch.float32, device=device)
        out = self._parts[: parts * heads * dim].view(parts, heads, dim)
        return out, self._parts[parts * heads * dim : numbers].view(parts, heads, *self.sums)

    def reserve(self, parts: int) -> None:
        """Make room for so many parts of each shape that has come up."""
        for heads, dim, device in self._part_shapes:
            self.parts(parts, heads, dim, device)

    def failure(self, device: torch.device, shape: Shape) -> str | None:
        """What goes wrong where the kernels are tried in a layer's shape."""
        return _tried(device, shape)

    def refusal(self, call: AttentionCall) -> str | None:
        """Why the kernels cannot do this layer."""
        heads, kv_heads, qk_dim, v_dim = call.q.shape[1], *call.k.shape[1:], call.v.shape[2]
        shape = heads, kv_heads, qk_dim, v_dim, self.storage.page_size, call.q.dtype
        options = call.window, call.softcap, call.sinks is not None
        if (shape, options) not in self._refusals:
            reason = self.kernels.unsupported(*shape)
            if reason is None and self.tries_shapes:
                if call.q.is_cuda and torch.cuda.is_current_stream_capturing():
                    return None  # a graph that is being captured has run its layers before
                reason = self.failure(call.q.device, Shape(*shape, *options))
            self._refusals[shape, options] = reason
        return self._refusals[shape, options]


@cache
def _tried(device: torch.device, shape: Shape) -> str | None:
    return on_this_card(tried(device, shape))


def on_this_card(failed: str | None) -> str | None:
    return None if failed is None else f"a kernel failed its check on this card: {failed}"


class WorkSource(ABC):
    """Gives each kind of layer its work lists: a step's own (``StepWork``), or those that a graph reads."""

    rows: int  # decode rows and tokens of short chunks; they come first
    slots: torch.Tensor  # [tokens]
    has_chunks = False  # whether longer chunks follow
    copies: Copies | None = None  # K and V to be copied

    @property
    @abstractmethod
    def lengths(self) -> torch.Tensor:  # [rows] int32
        """How many tokens each row reads."""

    @abstractmethod
    def lists(self, window: int | None, heads: int, kv_heads: int, sinks: bool) -> WorkLists:
        """The lists of decode rows and short chunks."""

    def chunk_lists(self, window: int | None, group: int, tile: int, wide: int | None, kv_heads: int) -> PrefillWork:
        """The lists of longer chunks. ``wide``: a larger tile, used where it pays; None if the kernels have none."""
        raise NotImplementedError("there are no longer chunks here")

    def torch_plan(self, scratch: Scratch) -> CascadePlan:
        """The plan for layers that the kernels cannot do."""
        raise NotImplementedError("the kernels can do all layers here")


class StepWork(WorkSource):
    """The work lists of one step, made when a layer with other heads, or another window, first needs them."""

    short_chunk = SHORT_CHUNK

    def __init__(
        self,
        batch: AttentionBatch,
        device: torch.device,
        multiprocessors: int,
        gates: tuple[float, float],
        work_seen: dict[tuple[Any, ...], WorkSeen],
    ) -> None:
        self._work_seen = work_seen
        self.batch = batch
        self.slots = batch.slots
        self.copies = batch.copies
        self.gates = gates
        self.device = device
        self.multiprocessors = multiprocessors
        self._unit, self._begin = batch.span_unit, batch.span_begin
        self._end, self._position = batch.span_end, batch.span_position
        of_prompts = self._begin >= batch.rows  # rows of a draft are decode rows, however many
        long = ((self._end - self._begin > self.short_chunk) & of_prompts) | batch.has_two_way
        self._short = int(long.argmax()) if long.any() else len(long)  # spans before the first long chunk
        self.rows = int(self._end[self._short - 1]) if self._short else 0  # tokens of these spans
        self.has_chunks = self._short < len(long)
        self._on_host: dict[tuple[Any, ...], WorkLists] = {}
        self._lists: dict[tuple[Any, ...], WorkLists] = {}
        self._chunk_lists: dict[tuple[Any, ...], PrefillWork] = {}
        self._torch_plan: CascadePlan | None = None

    def lists(self, *key: Any) -> WorkLists:
        if key not in self._lists:
            work = self.on_host(*key)
            self._note(key, work)
            self._lists[key] = work.to(self.device, non_blocking=True)
        return self._lists[key]

    def _note(self, key: tuple[Any, ...], work: WorkLists) -> None:
        self._work_seen.setdefault(key, WorkSeen()).note(work.items, work.merges)

    def on_host(self, window: int | None, heads: int, kv_heads: int, sinks: bool) -> WorkLists:
        """``lists``, before they are sent to the device."""
        key = window, heads, kv_heads, sinks
        if key not in self._on_host:
            page_size = self.batch.page_size
            readers, (gate, gate_merged) = self._readers(slice(self._short)), self.gates
            ranges = make_ranges(
                self._units, readers, page_size=page_size, window=window, gate=gate, gate_merged=gate_merged
            )
            self._on_host[key] = build_work(
                ranges,
                self._lengths,
                kv_heads=kv_heads,
                group=heads // kv_heads,
                page_size=page_size,
                multiprocessors=self.multiprocessors,
                window=window,
                ahead=0 if self.batch.growth is None else int(self.batch.growth.max(initial=0)),
                direct=not sinks,
            )
        return self._on_host[key]

    def torch_plan(self, scratch: Scratch) -> CascadePlan:
        if self._torch_plan is None:
            self._torch_plan = CascadePlan(self.batch, self.device, scratch)
        return self._torch_plan

    def chunk_lists(self, window: int | None, group: int, tile: int, wide: int | None, kv_heads: int) -> PrefillWork:
        key = window, group, tile, wide, kv_heads
        if key not in self._chunk_lists:
            page_size = self.batch.page_size
            chunks = make_chunks(self._units, self._readers(slice(self._short, None)), page_size=page_size)
            chunks = replace(chunks, sees_to=self.batch.sees_to(window))
            work = build_prefill(
                chunks, group=group, page_size=page_size, tile=tile, window=window, wide=wide, kv_heads=kv_heads
            )
            self._chunk_lists[key] = work.to(self.device, non_blocking=True)
        return self._chunk_lists[key]

    @cached_property
    def lengths(self) -> torch.Tensor:  # [rows] int32
        return to_device(self._lengths.astype(np.int32), self.device)

    @cached_property
    def _lengths(self) -> np.ndarray:  # [rows]
        return self.batch.positions[: self.rows] + 1

    def _readers(self, spans: slice) -> Readers:
        begin, rows = self._begin[spans], (self._end - self._begin)[spans]
        ends = self._position[spans] + rows
        if self.batch.growth is not None:
            ends = ends + self.batch.growth
        return Readers(self._unit[spans], begin, rows, ends)

    @cached_property
    def _units(self) -> Units:
        table = self.batch.units
        return Units(np.array(table.base), np.array(table.start), table.page_begin, table.page)


class KernelAttention:
    """Runs the kernels over the paged cache, layer by layer."""

    takes_masks = False

    def __init__(self, work: WorkSource, backend: TritonBackend) -> None:
        self.work = work
        self.backend = backend
        self.calls = 0
        self._parts: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls += 1
        kernels, storage = self.backend.kernels, self.backend.storage
        k_cache, v_cache = storage.read_by(call)
        refusal = self.backend.refusal(call)
        if refusal is not None:
            return self._in_torch(call, refusal, k_cache, v_cache)
        # All new K and V are written before anything is read: a suffix may attend to a prefix computed beside it.
        q = self._written(call, k_cache, v_cache) if call.source is None else call.q.contiguous()
        k_pages, v_pages = storage.paged(call.source or call.layer, kernels.by_page)
        out = q.new_empty(*q.shape[:2], v_cache.shape[2])
        same = {"window": call.window, "softcap": call.softcap}
        if self.work.rows:
            self._attend_rows(call, q[: self.work.rows], k_pages, v_pages, out[: self.work.rows], same)
        if self.work.has_chunks:
            group = q.shape[1] // k_cache.shape[1]
            options = kernels.launch_options(group, q.shape[2], v_cache.shape[2], q.element_size())
            tiles = options["tile"], options.get("wide")
            work = self.work.chunk_lists(call.window, group, *tiles, k_pages.shape[2])
            kernels.attend_chunks(q, k_pages, v_pages, out, work, call.scale, sinks=call.sinks, options=options, **same)
        return out

    def _written(self, call: AttentionCall, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Put the call's K and V into the cache. Gives q, contiguous, rotated if that was still to be done."""
        given = [x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v)]
        q = call.q if call.q.is_contiguous() else torch.empty_like(call.q, memory_format=torch.contiguous_format)
        turn = call.rotation or Rotation(None, None)
        write = self.backend.kernels.write
        write(*given, turn.cos, turn.sin, k_cache, v_cache, self.work.slots, q_out=q, **turn.options())
        return q

    def _attend_rows(
        self,
        call: AttentionCall,
        q: torch.Tensor,
        k_pages: Any,
        v_pages: Any,
        out: torch.Tensor,
        same: dict[str, Any],
    ) -> None:
        kernels = self.backend.kernels
        work = self.work.lists(call.window, q.shape[1], k_pages.shape[2], call.sinks is not None)
        parts = self._memory(work.parts, out)
        for tile in reversed(TILES):  # the long items first
            if tile in work.items:
                kernels.attend_items(
                    tile, q, k_pages, v_pages, out, *parts, work, self.work.lengths, call.scale, **same
                )
        if work.merges:
            kernels.merge_parts(out, *parts, work, sinks=call.sinks)

    def _memory(self, parts: int, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For partial results of what ``out`` is to have."""
        _, heads, dim = out.shape
        shape = parts, heads, dim
        if shape not in self._parts:
            self._parts[shape] = self.backend.parts(parts, heads, dim, out.device)
        return self._parts[shape]

    def _in_torch(
        self, call: AttentionCall, refusal: str, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        self.backend.notices(
            f"kernels: {refusal}",
            f"attention of {type(call.layer).__name__} runs in plain PyTorch, which is correct and slow: {refusal}",
        )
        q = write_in_torch(call, k_cache, v_cache, self.work.slots)
        return self.work.torch_plan(self.backend.scratch).run(
            q,
            k_cache,
            v_cache,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
