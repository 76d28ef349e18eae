"""The backend for ``invariant=True`` on a CPU: each row attends by itself, in parts that end at fixed positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from ...kernels.reference.fixed_attention_torch import KEYS, Merged, attend_parts
from ...patches.attention_interface import AttentionCall
from ...patches.fixed_forwards import FixedForwards
from ...patches.fixed_products import FixedThreads
from ..batch import AttentionBatch, ModelBatch
from ..transfers import to_device
from .attention_backend import AttentionBackend, Forward
from .fixed_passes import ROWS, cuts, in_fixed_passes
from .kv_storage import KVStorage
from .torch_attention import Scratch, write_in_torch

_FEWEST_ALIKE = 3  # rows, for their keys to be read at once
_GATHERED_BYTES = 4 << 20  # of K and V at a time: they should still be in a CPU's caches when they are read


@dataclass(frozen=True)
class _Parts:
    """Parts of several rows, computed at once."""

    rows: torch.Tensor  # [pairs]  in the pass; no row twice
    keys: torch.Tensor  # [pairs, KEYS] slots, or [1, KEYS]; beyond what rows see, any that are written
    seen: torch.Tensor  # [pairs, KEYS] bool
    stand_in: torch.Tensor  # [pairs, 1] or [1, 1]  the slot of the sequence's first token

    @property
    def row_by_row(self) -> _Parts:
        """Keys for each row by itself: none that only others see."""
        return replace(self, keys=torch.where(self.seen, self.keys, self.stand_in))


class FixedPlan:
    """A step's parts, made once for all layers with the same window."""

    def __init__(self, batch: AttentionBatch, device: torch.device, scratch: Scratch) -> None:
        self.batch = batch
        self.device = device
        self.scratch = scratch
        self._slots = [self._of_span(place) for place in range(len(batch.span_unit))]
        self._span_of = np.repeat(np.arange(len(batch.span_unit)), batch.span_end - batch.span_begin)  # [tokens]
        self._parts: dict[tuple[int, int | None, int], list[_Parts]] = {}

    def _of_span(self, place: int) -> np.ndarray:  # [parts, KEYS]
        """The slots of all tokens that a span's last row sees. What is beyond them repeats the first."""
        batch, units = self.batch, self.batch.units
        end = int(batch.span_position[place] + batch.span_end[place] - batch.span_begin[place])
        unit, pieces = int(batch.span_unit[place]), []
        while unit >= 0:
            start = units.start[unit]
            if end > start:
                pieces.append(units.slots(unit, start, end, batch.page_size))
            unit, end = units.base[unit], start
        slots = np.concatenate(pieces[::-1])
        padded = np.full(-(-len(slots) // KEYS) * KEYS, slots[0])
        padded[: len(slots)] = slots
        return padded.reshape(-1, KEYS)

    def parts(self, begin: int, end: int, window: int | None, token_bytes: int) -> list[_Parts]:
        """The parts of the rows [begin, end), counted from ``begin``; those of earlier positions first."""
        key = begin, window, token_bytes
        if key not in self._parts:
            self._parts[key] = self._made(begin, end, window, max(1, _GATHERED_BYTES // (KEYS * token_bytes)))
        return self._parts[key]

    def _made(self, begin: int, end: int, window: int | None, most: int) -> list[_Parts]:
        positions = self.batch.positions[begin:end]
        sees_from = np.zeros_like(positions) if window is None else np.maximum(positions + 1 - window, 0)
        first, last = sees_from // KEYS, positions // KEYS
        made = []

        def add(rows: np.ndarray, keys: np.ndarray, seen: np.ndarray, stand_in: np.ndarray) -> None:
            # A token that comes later may have NaN in its slot, and 0 x NaN is NaN: the first one stands in for it.
            keys = np.where(seen.any(axis=0) if len(keys) < len(rows) else seen, keys, stand_in)
            made.append(_Parts(*(to_device(each, self.device) for each in (rows, keys, seen, stand_in))))

        for part in range(int(first.min()), int(last.max()) + 1):
            of_part = np.flatnonzero((first <= part) & (part <= last))
            at = part * KEYS + np.arange(KEYS)
            seen = (at >= sees_from[of_part, None]) & (at <= positions[of_part, None])
            slots = [self._slots[self._span_of[begin + row]] for row in of_part]
            alike: dict[bytes, list[int]] = {}  # rows of a prompt, and of a shared prefix, read the same slots
            for place, each in enumerate(slots):
                alike.setdefault(each[part].tobytes(), []).append(place)
            alone = [place for places in alike.values() if len(places) < _FEWEST_ALIKE for place in places]
            for places in alike.values():
                if len(places) >= _FEWEST_ALIKE:
                    each = slots[places[0]]
                    add(of_part[places], each[part][None], seen[places], each[:1, :1])
            for some in (alone[cut : cut + most] for cut in range(0, len(alone), most)):
                of_some = [slots[place] for place in some]
                keys = np.stack([each[part] for each in of_some])
                add(of_part[some], keys, seen[some], np.stack([each[0, :1] for each in of_some]))
        return made


class FixedAttention:
    """Runs the rows [begin, end) of a step, layer by layer. A pass may have more rows, which attend to nothing."""

    takes_masks = False

    def __init__(
        self, plan: FixedPlan, storage: KVStorage, begin: int, end: int, size: int, threads: FixedThreads
    ) -> None:
        self.plan = plan
        self.storage = storage
        self.threads = threads
        self.begin, self.end, self.size = begin, end, size
        self.copies = None if plan.batch.copies is None else plan.batch.copies.of_rows(begin, end)
        self.calls = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls += 1
        return self.threads.in_several(self._attended, call)

    def _attended(self, call: AttentionCall) -> torch.Tensor:
        rows, batch = self.end - self.begin, self.plan.batch
        given = len(call.q)
        call = replace(call, q=call.q[:rows], k=call.k[:rows], v=call.v[:rows])
        k_cache, v_cache = self.storage.read_by(call)
        q = write_in_torch(call, k_cache, v_cache, batch.slots[self.begin : self.end])
        if self.copies is not None and call.source is None:
            self.copies.run(k_cache)
            self.copies.run(v_cache)
        exact = torch.promote_types(q.dtype, torch.float32)
        merged = Merged(rows, q.shape[1], v_cache.shape[-1], exact, q.device)
        token_bytes = (k_cache[0].numel() + v_cache[0].numel()) * k_cache.element_size()
        gather = self.plan.scratch.gather
        for each in self.plan.parts(self.begin, self.end, call.window, token_bytes):
            v = gather("v", v_cache, each.keys)
            if len(v) < len(each.rows) and not v.sum(dtype=exact).isfinite():
                each = each.row_by_row  # 0 x NaN is NaN: a row must not meet what only others see
                v = gather("v", v_cache, each.keys)
            merged.add(each.rows, *_attend(q[each.rows], gather("k", k_cache, each.keys), v, each.seen, call))
        out = q.new_zeros(given, q.shape[1], v_cache.shape[-1])
        out[:rows] = merged.result(call.sinks).to(q.dtype)
        return out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if len(q) > 1:
        return attend_parts(q, k, v, seen, call.scale, call.softcap)
    # A single product may be cut among threads in another way than one of several: it is computed twice.
    q, seen = (each.expand(2, *each.shape[1:]) for each in (q, seen))
    made, total, peak = attend_parts(q, k, v, seen, call.scale, call.softcap)
    return made[:1], total[:1], peak[:1]


class FixedBackend(AttentionBackend):
    has_passes = True

    def __init__(self, storage: KVStorage, device: torch.device) -> None:
        self.storage = storage
        self.device = device
        self.threads = FixedThreads()
        self._scratch = Scratch()

    def prepare(self, batch: AttentionBatch) -> FixedAttention:
        rows = len(batch.positions)
        return FixedAttention(self._plan(batch), self.storage, 0, rows, rows, self.threads)

    def fixed_forwards(self, model: nn.Module) -> FixedForwards:
        return FixedForwards(model, ROWS, self.threads, self.wide_products)

    def in_passes(self, forward: Forward, batch: ModelBatch) -> torch.Tensor:
        wanted = np.unique(batch.tokens.logits_rows.numpy())
        return in_fixed_passes(forward, self.passes(batch.attention, wanted), self.threads, batch)

    def passes(self, batch: AttentionBatch, wanted: np.ndarray) -> list[FixedAttention]:
        """Their K and V are there when later ones read them."""
        plan = self._plan(batch)
        return [
            FixedAttention(plan, self.storage, *cut, self.threads)
            for cut in cuts(len(batch.positions), wanted, self.wide_products is not None)
        ]

    def _plan(self, batch: AttentionBatch) -> FixedPlan:
        return FixedPlan(batch, self.device, self._scratch)

    def release(self) -> None:
        self.threads.restore()
        self._scratch.release()
