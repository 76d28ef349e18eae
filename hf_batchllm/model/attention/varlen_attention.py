"""The backend over torch's own attention for sequences of any length: for GPUs on which Triton's kernels cannot run.

A step takes one call for each level of shared prefixes, mostly one, and one call for what each span reads alone; their
results are merged by their log-sums. Keys are gathered before each call. That is some 25 launches for a layer, where
plain PyTorch takes hundreds. Layers that torch's attention cannot do run in plain PyTorch.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from ...kernel_check.comparing import NEAR
from ...kernels.cards import OLDEST
from ...kernels.lists.ranges import GATE, Readers, Units, make_ranges
from ...kernels.lists.work_lists import Ranges
from ...kernels.reference.attention_parts_torch import apply_sinks, attend, merge_part
from ...notices import Notices
from ...patches.attention_interface import AttentionCall
from ..batch import AttentionBatch
from ..transfers import to_device
from .attention_backend import AttentionBackend
from .kv_storage import KVStorage
from .torch_attention import CascadePlan, Scratch, write_in_torch

_MODULE = "torch.nn.attention.varlen"
_WIDEST_HEAD = 256
_GATHERED_BYTES = 256 << 20  # of K and V for a call; a level that reads more takes several calls
_NEVER = 1e18  # a gate that no prefix passes


def why_not(device: torch.device) -> str | None:
    """Why torch's attention cannot be used on a device; None if it can. It is tried once, on a few tokens."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "it is for NVIDIA's GPUs"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return "it needs compute capability 8.0"
    if not _is_there():
        return f"this torch has no {_MODULE}"
    return _tried(device)


def failure(device: torch.device) -> str | None:
    """Why it failed, where it could be tried and was not as it should be."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < OLDEST:
        return None
    return _tried(device) if _is_there() else None


def _is_there() -> bool:
    return importlib.util.find_spec("torch.nn.attention") is not None and importlib.util.find_spec(_MODULE) is not None


@dataclass(frozen=True)
class _Call:
    """Sequences of rows, each against keys of its own: one call."""

    rows: torch.Tensor | slice  # of q, in the order of the sequences
    slots: torch.Tensor  # [keys]
    row_ends: torch.Tensor  # [sequences + 1] int32
    key_ends: torch.Tensor  # [sequences + 1] int32
    most_rows: int
    most_keys: int
    causal: bool


class VarlenPlan:
    """A step's calls, made once for all layers with the same window."""

    def __init__(self, batch: AttentionBatch, device: torch.device, scratch: Scratch) -> None:
        self.batch = batch
        self.device = device
        self.scratch = scratch
        self._calls: dict[tuple[int | None, int], list[_Call]] = {}
        self._in_torch: CascadePlan | None = None

    @property
    def in_torch(self) -> CascadePlan:
        if self._in_torch is None:
            self._in_torch = CascadePlan(self.batch, self.device, self.scratch)
        return self._in_torch

    def calls(self, window: int | None, token_bytes: int) -> list[_Call]:
        """Those of the spans' own keys first: they cover every row once."""
        if (window, token_bytes) not in self._calls:
            self._calls[window, token_bytes] = self._made(window, token_bytes)
        return self._calls[window, token_bytes]

    def _made(self, window: int | None, token_bytes: int) -> list[_Call]:
        batch, table = self.batch, self.batch.units
        units = Units(np.array(table.base), np.array(table.start), table.page_begin, table.page)
        rows = batch.span_end - batch.span_begin
        ends = batch.span_position + rows
        readers = Readers(batch.span_unit, batch.span_begin, rows, ends)
        # With a window each span reads all of it by itself: what it shares is a small part, and masks differ by row.
        gate = GATE if window is None else _NEVER
        ranges = make_ranges(units, readers, page_size=batch.page_size, gate=gate, gate_merged=gate)
        shared = len(ranges.row_begin) - len(rows)  # ranges of shared prefixes come first
        seen_from = np.zeros(len(rows), np.int64) if window is None else np.maximum(ends - rows + 1 - window, 0)
        low = np.concatenate([np.zeros(shared, np.int64), seen_from])
        high = np.concatenate([np.full(shared, np.iinfo(np.int64).max), ends])
        slots, keys = _slots(ranges, low, high, batch.page_size)
        begins = np.cumsum(keys) - keys
        made = []
        for level in np.unique(ranges.level)[::-1]:
            mine = np.flatnonzero(ranges.level == level)
            for part in _cut(mine, keys, max(1, _GATHERED_BYTES // token_bytes)):
                made.append(self._call(ranges, part, slots, begins, keys, causal=bool(part[0] >= shared)))
        return made

    def _call(
        self, ranges: Ranges, part: np.ndarray, slots: np.ndarray, begins: np.ndarray, keys: np.ndarray, *, causal: bool
    ) -> _Call:
        begin, end = ranges.row_begin[part], ranges.row_end[part]
        rows, keys_here = end - begin, keys[part]
        at = _runs(begin, rows)
        chosen = slots[_runs(begins[part], keys_here)]
        is_run = len(at) == at[-1] - at[0] + 1
        return _Call(
            rows=slice(int(at[0]), int(at[-1]) + 1) if is_run else to_device(at, self.device),
            slots=to_device(chosen, self.device),
            row_ends=to_device(np.append(0, np.cumsum(rows)).astype(np.int32), self.device),
            key_ends=to_device(np.append(0, np.cumsum(keys_here)).astype(np.int32), self.device),
            most_rows=int(rows.max()),
            most_keys=int(keys_here.max()),
            causal=causal,
        )


def _runs(begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The numbers of each run [begin, begin + count), one run after the other."""
    numbers: np.ndarray = np.arange(int(count.sum())) + np.repeat(begin - (np.cumsum(count) - count), count)
    return numbers


def _slots(ranges: Ranges, low: np.ndarray, high: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The slots of all tokens that each range reads at the positions [low, high), and how many there are."""
    pages = np.diff(ranges.page_begin)
    of_range = np.repeat(np.arange(len(pages)), pages)
    skipped = np.clip(low[of_range] - ranges.first, 0, ranges.tokens)
    upto = np.clip(high[of_range] - ranges.first, skipped, ranges.tokens)
    count = upto - skipped
    slots = _runs(ranges.page * page_size + skipped, count)
    return slots, np.bincount(of_range, count, len(pages)).astype(np.int64)


def _cut(ranges: np.ndarray, keys: np.ndarray, most: int) -> list[np.ndarray]:
    """Ranges in their order, in parts of no more than ``most`` keys, or of one range."""
    parts = np.cumsum(keys[ranges]) // most
    return np.split(ranges, np.flatnonzero(np.diff(parts)) + 1)


class VarlenAttention:
    """Runs a step's calls over the paged cache, layer by layer."""

    takes_masks = False

    def __init__(self, plan: VarlenPlan, backend: VarlenBackend) -> None:
        self.plan = plan
        self.backend = backend
        self.calls = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls += 1
        k_cache, v_cache = self.backend.storage.read_by(call)
        # All new K and V are written before anything is read: a suffix may attend to a prefix computed beside it.
        q = write_in_torch(call, k_cache, v_cache, self.plan.batch.slots)
        reason = refusal(q, v_cache.shape[-1], call.softcap)
        if self.plan.batch.sees_to(call.window) is not None:
            reason = f"{_MODULE} knows no images whose tokens see each other both ways"
        if reason is not None:
            name = type(call.layer).__name__
            self.backend.notices(
                f"varlen: {reason}", f"attention of {name} runs in plain PyTorch, which is slow: {reason}"
            )
            run = self.plan.in_torch.run
            same: dict[str, Any] = {"scale": call.scale, "window": call.window, "softcap": call.softcap}
            return run(q, k_cache, v_cache, sinks=call.sinks, **same)
        return self._run(q, k_cache, v_cache, call)

    def _run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        gather, token_bytes = self.plan.scratch.gather, 2 * k_cache[0].nbytes
        for each in self.plan.calls(call.window, token_bytes):
            k, v = gather("k", k_cache, each.slots), gather("v", v_cache, each.slots)
            window = None if not each.causal else (-1 if call.window is None else call.window - 1)
            part, part_lse = varlen(
                q[each.rows], k, v, each.row_ends, each.key_ends, each.most_rows, each.most_keys, call.scale, window
            )
            if each.causal:
                out[each.rows], lse[each.rows] = part.to(out.dtype), part_lse
            elif isinstance(each.rows, slice):
                merge_part(out[each.rows], lse[each.rows], part, part_lse)
            else:
                some, some_lse = out[each.rows], lse[each.rows]
                merge_part(some, some_lse, part, part_lse)
                out[each.rows], lse[each.rows] = some, some_lse
        if call.sinks is not None:
            apply_sinks(out, lse, call.sinks)
        return out.to(q.dtype)


class VarlenBackend(AttentionBackend):
    def __init__(self, storage: KVStorage, device: torch.device, notices: Notices) -> None:
        self.storage = storage
        self.device = device
        self.notices = notices
        self._scratch = Scratch()

    def prepare(self, batch: AttentionBatch) -> VarlenAttention:
        return VarlenAttention(VarlenPlan(batch, self.device, self._scratch), self)

    def release(self) -> None:
        self._scratch.release()


def refusal(q: torch.Tensor, v_dim: int, softcap: float | None) -> str | None:
    """Why torch's attention cannot do a layer."""
    dim = q.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{_MODULE} takes bfloat16 and float16, and this layer runs in {str(q.dtype).removeprefix('torch.')}"
    if dim != v_dim:
        return f"{_MODULE} takes heads of one size, and these have {dim} and {v_dim} dimensions"
    if dim > _WIDEST_HEAD or dim % 8:
        return f"{_MODULE} takes heads of at most {_WIDEST_HEAD} dimensions, a multiple of 8, and these have {dim}"
    return f"{_MODULE} knows no soft cap" if softcap is not None else None


def varlen(
    q: torch.Tensor,  # [rows, heads, dim]
    k: torch.Tensor,  # [keys, kv_heads, dim]
    v: torch.Tensor,  # [keys, kv_heads, dim]
    row_ends: torch.Tensor,
    key_ends: torch.Tensor,
    most_rows: int,
    most_keys: int,
    scale: float,
    window: int | None,  # tokens before its own that a row sees, -1: all; None: every row sees all keys of its sequence
) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, heads, dim], [rows, heads] float32
    attention, request = _torchs_own()
    grouped = q.shape[1] != k.shape[1] and _asks_for_groups(attention)
    given: dict[str, Any] = {"enable_gqa": True} if grouped else {}
    out, lse = attention(
        q.contiguous(), k, v, row_ends, key_ends, most_rows, most_keys, scale=scale, return_aux=request(lse=True),
        window_size=(-1, -1) if window is None else (window, 0), **given,
    )  # fmt: skip
    return out, lse if _rows_first(q.device) else lse.transpose(0, 1)


def _torchs_own() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    return varlen_attn, AuxRequest


@cache
def _asks_for_groups(attention: Callable[..., Any]) -> bool:
    """Whether heads that share keys are asked for. Torch 2.11 has no word for it: its kernels just take them."""
    return "enable_gqa" in inspect.signature(attention).parameters


@cache
def _rows_first(device: torch.device) -> bool:
    """Whether log-sums come as [rows, heads]: torch's page says so, and its kernels give [heads, rows]."""
    heads, rows = 2, 5
    x = torch.zeros(rows, heads, 64, dtype=torch.float16, device=device)
    ends = torch.tensor([0, rows], dtype=torch.int32, device=device)
    attention, request = _torchs_own()
    return bool(attention(x, x, x, ends, ends, rows, rows, return_aux=request(lse=True))[1].shape == (rows, heads))


@cache
def _tried(device: torch.device) -> str | None:
    """Hold it against plain PyTorch on a few tokens: chunks of prompts, and rows of decoding."""
    failed = f"{_MODULE} failed its check on this card"
    for dtype, dim, rows in itertools.product((torch.float16, torch.bfloat16), (64, 128, 256), ([3, 6], [1, 1])):
        try:
            error = _error(device, dtype, dim, rows)
        except Exception as raised:
            return f"{failed}: {type(raised).__name__}: {' '.join(str(raised).split())[:150]}"
        if not error < NEAR[dtype]:
            return f"{failed}: it is off by {error:.1e}"
    return None


def _error(device: torch.device, dtype: torch.dtype, dim: int, count: list[int]) -> float:
    """The largest part by which results are off, in sequences of ``count`` rows."""
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

    row_ends, key_ends, scale = [0, count[0], sum(count)], [0, 17, 40], dim**-0.5
    q, k, v = random(sum(count), 4, dim), random(40, 2, dim), random(40, 2, dim)
    row_at, key_at = (torch.tensor(each, dtype=torch.int32, device=device) for each in (row_ends, key_ends))
    errors = []
    for window in (None, -1, 4):
        out, lse = varlen(q, k, v, row_at, key_at, max(count), 23, scale, window)
        for at in range(2):
            rows, keys = slice(*row_ends[at : at + 2]), slice(*key_ends[at : at + 2])
            mask = _mask(rows.stop - rows.start, keys.stop - keys.start, window).to(device)
            want, want_lse = attend(q[rows].double(), k[keys].double(), v[keys].double(), scale, mask=mask)
            for ours, theirs in ((out[rows], want), (lse[rows], want_lse)):
                errors.append(float((ours.double() - theirs).norm() / theirs.norm()))
    return max(errors) if all(each == each for each in errors) else float("nan")


def _mask(rows: int, keys: int, window: int | None) -> torch.Tensor:  # [rows, keys]
    """Rows are the last tokens of a sequence: the last row sees all keys, but for the window."""
    position = torch.arange(keys - rows, keys, device="cpu")[:, None]
    key = torch.arange(keys, device="cpu")[None, :]
    if window is None:
        return torch.ones(rows, keys, dtype=torch.bool, device="cpu")
    seen = key <= position
    return seen if window < 0 else seen & (key >= position - window)
