"""The torch backend: a step's attention cut into parts, each run once for all rows that share its keys.

Three kinds of parts cover every (row, key) pair once: a *prefix* read by several units (or by a whole chunk) in one
product; the keys that each *decode row* reads alone, padded into a few batches; a *chunk* against itself, causal.
The plan is made once for each step and each sliding window, not for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.reference.attention_parts_torch import apply_sinks, attend, attend_each, merge_part, write_kv
from ...kernels.reference.layer_ops_torch import rope_and_write
from ...patches.attention_interface import AttentionCall
from ..batch import AttentionBatch, Span
from ..transfers import to_device
from .attention_backend import AttentionBackend
from .kv_storage import KVStorage

_LEAST_FILLED = 0.6  # a row joins a batch of decode rows if it fills at least this share of the longest one
# Bytes of K and V, about, that a batch of decode rows gathers before it attends to them. On a CPU they should still be
# in its caches when they are read; elsewhere each batch costs launches, and memory is the only bound.
_GATHERED_BYTES = {"cpu": 4 << 20}
_GATHERED_BYTES_ELSEWHERE = 64 << 20


@dataclass(frozen=True)
class SharedPart:
    """Rows ``[begin, end)`` that read the same earlier keys, all of them."""

    begin: int
    end: int
    keys: torch.Tensor | slice  # [keys] slots
    mask: torch.Tensor | None  # [rows, keys]  for a sliding window


@dataclass(frozen=True)
class RowsPart:
    """Decode rows, each of which reads keys of its own."""

    rows: torch.Tensor  # [rows]
    keys: torch.Tensor  # [rows, keys] slots; beyond a row's own, any that are valid
    mask: torch.Tensor | None  # [rows, keys]


@dataclass(frozen=True)
class ChunkPart:
    """A chunk of a prompt, which reads its own keys."""

    begin: int
    end: int
    keys: torch.Tensor | slice
    mask: torch.Tensor | None  # [rows, keys]  for a sliding window shorter than the chunk, and without ``causal``
    causal: bool  # whether a row sees only what is before it, and itself


class Scratch:
    """Memory for gathered keys and values, used again and again: allocating it costs more than the copy."""

    def __init__(self) -> None:
        self._flat: dict[str, torch.Tensor] = {}

    def gather(self, name: str, cache: torch.Tensor, keys: torch.Tensor | slice) -> torch.Tensor:
        """``cache[keys]``; a copy is valid until the next one of the same name."""
        if isinstance(keys, slice):
            return cache[keys]
        size = keys.numel() * cache[0].numel()
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != cache.dtype:
            with torch.inference_mode(False):  # later steps may run outside it
                flat = self._flat[name] = torch.empty(size, dtype=cache.dtype, device=cache.device)
        copied = flat[:size].view(keys.numel(), *cache.shape[1:])
        torch.index_select(cache, 0, keys.flatten(), out=copied)
        return copied.view(*keys.shape, *cache.shape[1:])

    def release(self) -> None:
        self._flat.clear()


class CascadePlan:
    def __init__(self, batch: AttentionBatch, device: torch.device, scratch: Scratch | None = None) -> None:
        self.batch = batch.row_by_row()
        self.device = device
        self._scratch = scratch or Scratch()
        self._parts: dict[int | None, tuple[list[RowsPart], list[ChunkPart], list[SharedPart]]] = {}
        self._shared, self._alone = self._divide()

    def run(
        self,
        q: torch.Tensor,  # [tokens, heads, qk_dim]
        k_cache: torch.Tensor,  # [slots, kv_heads, qk_dim]
        v_cache: torch.Tensor,  # [slots, kv_heads, v_dim]
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,  # [heads]
    ) -> torch.Tensor:  # [tokens, heads, v_dim]
        token_bytes = (k_cache[0].numel() + v_cache[0].numel()) * k_cache.element_size()
        rows_parts, chunk_parts, shared_parts = self.parts(window, token_bytes)
        gather = self._scratch.gather
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(*q.shape[:2], v_cache.shape[-1], dtype=exact, device=q.device)
        lse = torch.empty(*q.shape[:2], dtype=exact, device=q.device)
        # The first two kinds cover every row exactly once, and a row always reads its own key: each LSE is finite then.
        for rows in rows_parts:
            k, v = gather("k", k_cache, rows.keys), gather("v", v_cache, rows.keys)
            part, part_lse = attend_each(q[rows.rows], k, v, scale, mask=rows.mask, softcap=softcap)
            out[rows.rows], lse[rows.rows] = part.to(exact), part_lse.to(exact)
        for chunk in chunk_parts:
            k, v = gather("k", k_cache, chunk.keys), gather("v", v_cache, chunk.keys)
            own = slice(chunk.begin, chunk.end)
            out[own], lse[own] = attend(q[own], k, v, scale, causal=chunk.causal, mask=chunk.mask, softcap=softcap)
        for shared in shared_parts:
            k, v = gather("k", k_cache, shared.keys), gather("v", v_cache, shared.keys)
            span = slice(shared.begin, shared.end)
            merge_part(out[span], lse[span], *attend(q[span], k, v, scale, mask=shared.mask, softcap=softcap))
        if sinks is not None:
            apply_sinks(out, lse, sinks)
        return out.to(q.dtype)

    # -- the plan ----------------------------------------------------------------------------------------------

    def parts(self, window: int | None, token_bytes: int) -> tuple[list[RowsPart], list[ChunkPart], list[SharedPart]]:
        """All parts for layers with this window. ``token_bytes``: of K and V of a token, in one layer."""
        if window not in self._parts:
            self._parts[window] = self._parts_for(window, token_bytes)
        return self._parts[window]

    def _divide(self) -> tuple[dict[tuple[int, int], list[tuple[int, int, int]]], list[list[tuple[int, int, int]]]]:
        """Which rows read which keys together.

        Returns, for each range of tokens ``(begin, end)``, the pieces ``(unit, first position, end position)`` that
        all of its rows read; and for each decode row the pieces that it reads alone, in order of position.
        """
        batch = self.batch
        shared: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        alone: list[list[tuple[int, int, int]]] = [[] for _ in range(batch.rows)]
        open_since: dict[tuple[int, int], int] = {}  # (unit, read up to) -> first span of those that read it in a row

        def close(piece: tuple[int, int], first: int, last: int) -> None:
            unit, upto = piece
            if upto == batch.units.start[unit]:
                return  # nothing of this unit is read: what is read lies in the prefixes below
            read = (unit, batch.units.start[unit], upto)
            if first + 1 == last and first < batch.rows:
                alone[first].append(read)  # a single row: no need for a part of its own
                return
            # Decode rows and chunks go into different parts: a range never holds both.
            for one, other in ((first, min(last, batch.rows)), (max(first, batch.rows), last)):
                if one < other:
                    begin, end = batch.spans[one].begin, batch.spans[other - 1].end
                    shared.setdefault((begin, end), []).append(read)

        for index, span in enumerate(batch.spans):
            prefixes = self._prefixes_of(span)
            for piece in [piece for piece in open_since if piece not in prefixes]:
                close(piece, open_since.pop(piece), index)
            for piece in prefixes:
                open_since.setdefault(piece, index)
        for piece, first in open_since.items():
            close(piece, first, len(batch.spans))
        for row in range(batch.rows):
            span = batch.spans[row]
            alone[row].append((span.unit, batch.units.start[span.unit], span.position + 1))
            alone[row].sort(key=lambda piece: piece[1])
        for span in batch.spans[batch.rows :]:
            if span.position > batch.units.start[span.unit]:  # earlier chunks of the same unit
                earlier = (span.unit, batch.units.start[span.unit], span.position)
                shared.setdefault((span.begin, span.end), []).append(earlier)
        for pieces in shared.values():
            pieces.sort(key=lambda piece: piece[1])
        return shared, alone

    def _prefixes_of(self, span: Span) -> dict[tuple[int, int], None]:
        """The units below a span's own, each with the position up to which it is read; outermost last."""
        units = self.batch.units
        prefixes: dict[tuple[int, int], None] = {}
        unit = span.unit
        while (base := units.base[unit]) >= 0:
            prefixes[base, units.start[unit]] = None
            unit = base
        return prefixes

    def _parts_for(
        self, window: int | None, token_bytes: int
    ) -> tuple[list[RowsPart], list[ChunkPart], list[SharedPart]]:
        batch = self.batch
        chunks = []
        sees_to = batch.sees_to(window)
        for place, span in enumerate(batch.spans[batch.rows :], batch.rows):
            size = span.end - span.begin
            slots = batch.units.slots(span.unit, span.position, span.position + size, batch.page_size)
            mask = None
            if window is not None and size > window:
                mask = torch.ones(size, size, dtype=torch.bool, device=self.device).triu(1 - window)
            causal = sees_to is None or not batch.has_two_way[place]
            if sees_to is not None and not causal:
                seen = np.arange(size) < (sees_to[span.begin : span.end] - span.position)[:, None]
                seen_too = to_device(seen, self.device)
                mask = seen_too if mask is None else mask & seen_too
            chunks.append(ChunkPart(span.begin, span.end, self._keys(slots), mask, causal))
        shared = [
            part
            for (begin, end), pieces in self._shared.items()
            if (part := self._shared_part(begin, end, pieces, window)) is not None
        ]
        return self._rows_parts(window, token_bytes), chunks, shared

    def _shared_part(
        self, begin: int, end: int, pieces: list[tuple[int, int, int]], window: int | None
    ) -> SharedPart | None:
        batch = self.batch
        first, last = pieces[0][1], pieces[-1][2]
        assert last - first == sum(upto - start for _, start, upto in pieces), "a hole between the pieces of a part"
        mask = None
        if window is not None:
            # A row at position p sees the keys from p - window + 1 on.
            sees_from = batch.positions[begin:end] - window + 1
            first = max(first, int(sees_from.min()))
            if first >= last:
                return None
            if int(sees_from.max()) > first:
                mask = to_device(np.arange(first, last)[None] >= sees_from[:, None], self.device)
        slots = [
            batch.units.slots(unit, max(start, first), upto, batch.page_size)
            for unit, start, upto in pieces
            if upto > first
        ]
        return SharedPart(begin, end, self._keys(np.concatenate(slots)), mask)

    def _rows_parts(self, window: int | None, token_bytes: int) -> list[RowsPart]:
        batch = self.batch
        most_keys = _GATHERED_BYTES.get(self.device.type, _GATHERED_BYTES_ELSEWHERE) // token_bytes
        pieces = [(row, *piece) for row, pieces in enumerate(self._alone) for piece in pieces]
        owner, unit, first, upto = np.array(pieces, dtype=np.int64).reshape(-1, 4).T  # [pieces] each
        if window is not None:
            first = np.maximum(first, batch.positions[owner] + 1 - window)  # the batch begins with the decode rows
        sizes = np.maximum(upto - first, 0)
        positions = np.arange(int(sizes.sum())) + np.repeat(first - np.cumsum(sizes) + sizes, sizes)
        slots = batch.units.slots_of_each(np.repeat(unit, sizes), positions, batch.page_size)  # row after row
        lengths = np.zeros(len(self._alone), dtype=np.int64)
        np.add.at(lengths, owner, sizes)
        begins = np.cumsum(lengths) - lengths
        order = np.argsort(-lengths, kind="stable")
        parts, begin = [], 0
        while begin < len(order):
            longest = lengths[order[begin]]
            alike = int(np.count_nonzero(lengths[order[begin:]] >= _LEAST_FILLED * longest))
            end = begin + min(alike, max(1, most_keys // int(longest)))
            rows = order[begin:end]
            inside = np.arange(longest)[None] < lengths[rows][:, None]  # [rows, keys]
            # Beyond its own keys a row repeats its first one, which has been written: a stale page may hold NaN.
            padded = slots[begins[rows][:, None] + np.where(inside, np.arange(longest), 0)]
            mask = None if inside.all() else to_device(inside, self.device)
            parts.append(RowsPart(to_device(rows, self.device), to_device(padded, self.device), mask))
            begin = end
        return parts

    def _keys(self, slots: np.ndarray) -> torch.Tensor | slice:
        """A slice where the slots are neighbours, as then nothing is copied; an index otherwise."""
        first, last = int(slots[0]), int(slots[-1])
        if last - first + 1 == len(slots) and bool((np.diff(slots) == 1).all()):
            return slice(first, last + 1)
        return to_device(slots, self.device)


class TorchBackend(AttentionBackend):
    def __init__(self, storage: KVStorage, device: torch.device) -> None:
        self.storage = storage
        self.device = device
        self._scratch = Scratch()

    def prepare(self, batch: AttentionBatch) -> CascadeAttention:
        return CascadeAttention(CascadePlan(batch, self.device, self._scratch), self.storage)

    def release(self) -> None:
        self._scratch.release()


def write_in_torch(
    call: AttentionCall, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Put the call's K and V into the cache. Gives q, rotated if that was still to be done."""
    if call.source is not None:
        return call.q
    if call.rotation is None:
        write_kv(call.k, call.v, k_cache, v_cache, slots)
        return call.q
    q = torch.empty_like(call.q)
    turn = call.rotation
    rope_and_write(call.q, call.k, call.v, turn.cos, turn.sin, k_cache, v_cache, slots, q_out=q, **turn.options())
    return q


class CascadeAttention:
    """Runs a step's plan over the paged cache, layer by layer."""

    takes_masks = False

    def __init__(self, plan: CascadePlan, storage: KVStorage) -> None:
        self.plan = plan
        self.storage = storage
        self.calls = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls += 1
        k_cache, v_cache = self.storage.read_by(call)
        # All new K and V are written before anything is read: a suffix may attend to a prefix computed beside it.
        q = write_in_torch(call, k_cache, v_cache, self.plan.batch.slots)
        return self.plan.run(
            q,
            k_cache,
            v_cache,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
