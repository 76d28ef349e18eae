"""The torch backend: a step's attention cut into parts, each run once for all rows that share its keys.

Three kinds of parts cover every (row, key) pair once: a *prefix* read by several units (or by a whole chunk) in one
product; the keys that each *decode row* reads alone, padded into a few batches; a *chunk* against itself, causal.
The plan is made once for each step and each sliding window, not for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.attention_torch import apply_sinks, attend, attend_each, merge_part, write_kv
from ..kernels.layer_ops_torch import rope_and_write
from ..patches.attention_interface import AttentionCall
from .batch import AttentionBatch, Span
from .kv_storage import KVStorage

_PADDED = 0.6  # a row joins a batch of decode rows if it fills at least this share of it
# Bytes of K and V, about, that a batch of decode rows copies together before it attends to them. On a CPU they are to
# be in its caches still when they are read; elsewhere each batch costs launches, and memory is the only bound.
_GATHERED_BYTES = {"cpu": 4 << 20}
_GATHERED_BYTES_ELSEWHERE = 64 << 20


@dataclass(frozen=True)
class SharedPart:
    """Rows ``[begin, end)`` against the same earlier keys, none of them hidden by causality."""

    begin: int
    end: int
    keys: torch.Tensor | slice  # [keys] slots
    mask: torch.Tensor | None  # [rows, keys]  for a sliding window


@dataclass(frozen=True)
class RowsPart:
    """Decode rows, each against keys of its own."""

    rows: torch.Tensor  # [rows]
    keys: torch.Tensor  # [rows, keys] slots; anything valid beyond a row's own
    mask: torch.Tensor | None  # [rows, keys]


@dataclass(frozen=True)
class ChunkPart:
    """A chunk of a prompt against itself."""

    begin: int
    end: int
    keys: torch.Tensor | slice
    mask: torch.Tensor | None  # [rows, keys]  for a sliding window shorter than the chunk


class Scratch:
    """Where keys and values are copied to, one after the other: new memory for each costs more than the copy."""

    def __init__(self) -> None:
        self._flat: dict[str, torch.Tensor] = {}

    def gather(self, name: str, cache: torch.Tensor, keys: torch.Tensor | slice) -> torch.Tensor:
        """``cache[keys]``; a copy only lives until the next one of that name."""
        if isinstance(keys, slice):
            return cache[keys]
        size = keys.numel() * cache[0].numel()
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != cache.dtype:
            with torch.inference_mode(False):  # it may be used outside, too
                flat = self._flat[name] = torch.empty(size, dtype=cache.dtype, device=cache.device)
        copied = flat[:size].view(keys.numel(), *cache.shape[1:])
        torch.index_select(cache, 0, keys.flatten(), out=copied)
        return copied.view(*keys.shape, *cache.shape[1:])

    def release(self) -> None:
        self._flat.clear()


class CascadePlan:
    def __init__(self, batch: AttentionBatch, device: torch.device, scratch: Scratch | None = None) -> None:
        self.batch = batch
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
        if window not in self._parts:
            token_bytes = (k_cache[0].numel() + v_cache[0].numel()) * k_cache.element_size()
            self._parts[window] = self._parts_for(window, token_bytes)
        rows_parts, chunk_parts, shared_parts = self._parts[window]
        gather = self._scratch.gather
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(*q.shape[:2], v_cache.shape[-1], dtype=exact, device=q.device)
        lse = torch.empty(*q.shape[:2], dtype=exact, device=q.device)
        # These two kinds cover every row exactly once, and a row always sees itself: from here on each LSE is finite.
        for rows in rows_parts:
            k, v = gather("k", k_cache, rows.keys), gather("v", v_cache, rows.keys)
            part, part_lse = attend_each(q[rows.rows], k, v, scale, mask=rows.mask, softcap=softcap)
            out[rows.rows], lse[rows.rows] = part.to(exact), part_lse.to(exact)
        for chunk in chunk_parts:
            k, v = gather("k", k_cache, chunk.keys), gather("v", v_cache, chunk.keys)
            own = slice(chunk.begin, chunk.end)
            out[own], lse[own] = attend(q[own], k, v, scale, causal=True, mask=chunk.mask, softcap=softcap)
        for shared in shared_parts:
            k, v = gather("k", k_cache, shared.keys), gather("v", v_cache, shared.keys)
            span = slice(shared.begin, shared.end)
            merge_part(out[span], lse[span], *attend(q[span], k, v, scale, mask=shared.mask, softcap=softcap))
        if sinks is not None:
            apply_sinks(out, lse, sinks)
        return out.to(q.dtype)

    # -- the plan ----------------------------------------------------------------------------------------------

    def _divide(self) -> tuple[dict[tuple[int, int], list[tuple[int, int, int]]], list[list[tuple[int, int, int]]]]:
        """Who reads what together.

        Returns, for each range of tokens ``(begin, end)``, the pieces ``(unit, first position, end position)`` that
        all of its rows read; and for each decode row the pieces that it reads alone, in order of position.
        """
        batch = self.batch
        shared: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        alone: list[list[tuple[int, int, int]]] = [[] for _ in range(batch.rows)]
        open_since: dict[tuple[int, int], int] = {}  # (unit, read up to) -> the span since which all spans read it

        def close(piece: tuple[int, int], first: int, last: int) -> None:
            unit, upto = piece
            if upto == batch.units.start[unit]:
                return  # holds nothing: all of it is in the prefixes below
            read = (unit, batch.units.start[unit], upto)
            if first + 1 == last and first < batch.rows:
                alone[first].append(read)  # a single row: no need for a part of its own
                return
            # Decode rows and chunks are different work: a range never spans both.
            for one, other in ((first, min(last, batch.rows)), (max(first, batch.rows), last)):
                if one < other:
                    begin, end = batch.spans[one].begin, batch.spans[other - 1].end
                    shared.setdefault((begin, end), []).append(read)

        for index, span in enumerate(batch.spans):
            reads = self._reads(span)
            for piece in [piece for piece in open_since if piece not in reads]:
                close(piece, open_since.pop(piece), index)
            for piece in reads:
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

    def _reads(self, span: Span) -> dict[tuple[int, int], None]:
        """The units below a span's own, each with the position up to which it is read; outermost last."""
        units = self.batch.units
        reads: dict[tuple[int, int], None] = {}
        unit = span.unit
        while (base := units.base[unit]) >= 0:
            reads[base, units.start[unit]] = None
            unit = base
        return reads

    def _parts_for(
        self, window: int | None, token_bytes: int
    ) -> tuple[list[RowsPart], list[ChunkPart], list[SharedPart]]:
        batch = self.batch
        chunks = []
        for span in batch.spans[batch.rows :]:
            size = span.end - span.begin
            slots = batch.units.slots(span.unit, span.position, span.position + size, batch.page_size)
            mask = None
            if window is not None and size > window:
                mask = torch.ones(size, size, dtype=torch.bool, device=self.device).triu(1 - window)
            chunks.append(ChunkPart(span.begin, span.end, self._keys(slots), mask))
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
                mask = torch.from_numpy(np.arange(first, last)[None] >= sees_from[:, None]).to(self.device)
        slots = [
            batch.units.slots(unit, max(start, first), upto, batch.page_size)
            for unit, start, upto in pieces
            if upto > first
        ]
        return SharedPart(begin, end, self._keys(np.concatenate(slots)), mask)

    def _rows_parts(self, window: int | None, token_bytes: int) -> list[RowsPart]:
        batch = self.batch
        most_keys = _GATHERED_BYTES.get(self.device.type, _GATHERED_BYTES_ELSEWHERE) // token_bytes
        keys = []
        for row, pieces in enumerate(self._alone):
            first = pieces[0][1]
            if window is not None:
                first = max(first, batch.spans[row].position + 1 - window)
            slots = [
                batch.units.slots(unit, max(start, first), upto, batch.page_size)
                for unit, start, upto in pieces
                if upto > first
            ]
            keys.append(slots[0] if len(slots) == 1 else np.concatenate(slots))
        lengths = np.array([len(slots) for slots in keys], dtype=np.int64)
        order = np.argsort(-lengths, kind="stable")
        parts, begin = [], 0
        while begin < len(order):
            longest = lengths[order[begin]]
            alike = int(np.count_nonzero(lengths[order[begin:]] >= _PADDED * longest))
            end = begin + min(alike, max(1, most_keys // int(longest)))
            rows = order[begin:end]
            inside = np.arange(longest)[None] < lengths[rows][:, None]  # [rows, keys]
            padded = np.zeros(inside.shape, dtype=np.int64)
            padded[inside] = np.concatenate([keys[row] for row in rows])
            # Beyond its own keys a row repeats its first one: always written, so never a NaN from a stale page.
            padded = np.where(inside, padded, padded[:, :1])
            mask = None if inside.all() else torch.from_numpy(inside).to(self.device)
            parts.append(
                RowsPart(torch.from_numpy(rows).to(self.device), torch.from_numpy(padded).to(self.device), mask)
            )
            begin = end
        return parts

    def _keys(self, slots: np.ndarray) -> torch.Tensor | slice:
        """A slice where the slots are neighbours (then reading them copies nothing), an index otherwise."""
        first, last = int(slots[0]), int(slots[-1])
        if last - first + 1 == len(slots) and bool((np.diff(slots) == 1).all()):
            return slice(first, last + 1)
        return torch.from_numpy(slots).to(self.device)


class TorchBackend:
    short_chunk = 0

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
    """Put the call's K and V into the cache. Gives q as attention wants it."""
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
        k_cache, v_cache = self.storage.of(call.layer, call.k, call.v)
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
