"""Cases of the attention kernels: decode rows and prompts over pages that some of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..kernels import decode_torch, prefill_torch
from ..kernels.ranges import Readers, Units, make_chunks, make_ranges
from ..kernels.work_lists import build_prefill, build_work
from .comparing import Where, near

_PREFIX = 150  # tokens that most rows share
_SHARING, _ALONE = 20, 3  # rows


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    page_size: int
    dtype: torch.dtype
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        dims = str(self.qk_dim) if self.qk_dim == self.v_dim else f"{self.qk_dim} and {self.v_dim}"
        return f"{self.heads} heads and {self.kv_heads} KV heads of {dims}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def decode(where: Where, shape: Shape) -> None:
    """Both tiles: long ones for the shared prefix, short ones for each row's own tokens."""
    from ..kernels import decode_triton

    own = 1 + np.arange(_SHARING + _ALONE) * 37 % 90
    lengths = own + np.repeat([_PREFIX, 0], [_SHARING, _ALONE])
    units = _units(shape, own)
    rows = len(own)
    readers = Readers(np.arange(1, rows + 1), np.arange(rows), np.ones(rows, np.int64), lengths)
    ranges = make_ranges(units, readers, page_size=shape.page_size, window=shape.window, gate=0, gate_merged=0)
    work = build_work(
        ranges, lengths, kv_heads=shape.kv_heads, group=shape.group, page_size=shape.page_size, multiprocessors=8,
        window=shape.window, direct=not shape.sinks,
    ).to(where.device)  # fmt: skip
    q, k, v, sinks = _tensors(where, shape, units, rows, own)
    seen = torch.from_numpy(lengths.astype(np.int32)).to(where.device)
    results = []
    for module in (decode_triton, decode_torch):
        out = q.new_full((rows, shape.heads, shape.v_dim), torch.nan)
        shape_of_parts = work.parts, shape.heads, shape.v_dim + 1
        parts = torch.full(shape_of_parts, torch.nan, dtype=torch.float32, device=where.device)
        part_out, part_lse = parts[..., :-1].contiguous(), parts[..., -1].contiguous()
        for tile in work.items:
            module.attend_items(
                tile, q, k, v, out, part_out, part_lse, work, seen, 0.2, window=shape.window, softcap=shape.softcap
            )
        if work.merges or shape.sinks:
            module.merge_parts(out, part_out, part_lse, work, sinks=sinks)
        results.append(out)
    near(results[0], results[1])


def prompts(where: Where, shape: Shape) -> None:
    """Two chunks on a prefix and one without, through each tile that the card has."""
    from ..kernels import prefill_triton

    own = np.array([70, 21, 90])
    units = _units(shape, own, sharing=2)
    begins = np.cumsum(own) - own
    readers = Readers(np.arange(1, 4), begins, own, own + np.array([_PREFIX, _PREFIX, 0]))
    chunks = make_chunks(units, readers, page_size=shape.page_size)
    q, k, v, sinks = _tensors(where, shape, units, int(own.sum()), own)
    options = prefill_triton.launch_options(shape.group, shape.qk_dim, shape.v_dim, shape.dtype.itemsize)
    given: dict[str, Any] = {"window": shape.window, "softcap": shape.softcap, "sinks": sinks}
    for tile in {options["tile"], options.get("wide", options["tile"])}:
        work = build_prefill(
            chunks, group=shape.group, page_size=shape.page_size, tile=tile, window=shape.window
        ).to(where.device)  # fmt: skip
        results = []
        for module in (prefill_triton, prefill_torch):
            out = q.new_full((len(q), shape.heads, shape.v_dim), torch.nan)
            module.attend_chunks(q, k, v, out, work, 0.2, options=options, **given)
            results.append(out)
        near(results[0], results[1])


def tried(device: torch.device, shape: Shape) -> str | None:
    """Run both cases of a shape in this process; gives what went wrong, in a line. Not while a graph is captured."""
    where = Where(device)
    for name, case in (("decode", decode), ("prompts", prompts)):
        try:
            case(where, shape)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"{name}, {shape}: " + " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None


def _units(shape: Shape, own: np.ndarray, sharing: int = _SHARING) -> Units:
    """A prefix, then a unit for each run of own tokens; the first ones stand on the prefix."""
    on_prefix = np.arange(len(own)) < sharing
    tokens = np.append(_PREFIX, own)
    pages = -(-tokens // shape.page_size)
    return Units(
        base=np.append(-1, np.where(on_prefix, 0, -1)),
        start=np.append(0, np.where(on_prefix, _PREFIX, 0)),
        page_begin=np.append(0, np.cumsum(pages)),
        page=np.random.default_rng(0).permutation(int(pages.sum())),
    )


def _tensors(
    where: Where, shape: Shape, units: Units, rows: int, own: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q, K, V and sinks. Places of pages that hold no token are NaN: none of it may come into a result."""
    generator = where.generator()
    pages = len(units.page)
    written = np.zeros((pages, shape.page_size), dtype=bool)
    for unit, tokens in enumerate(np.append(_PREFIX, own)):
        mine = units.page[units.page_begin[unit] : units.page_begin[unit + 1]]
        written[mine] = (np.arange(len(mine) * shape.page_size) < tokens).reshape(len(mine), -1)
    empty = torch.from_numpy(~written).to(where.device)
    q = where.random(generator, rows, shape.heads, shape.qk_dim, dtype=shape.dtype)
    k, v = (
        where.random(generator, pages, shape.page_size, shape.kv_heads, dim, dtype=shape.dtype)
        for dim in (shape.qk_dim, shape.v_dim)
    )
    k[empty], v[empty] = torch.nan, torch.nan
    return q, k, v, where.random(generator, shape.heads, dtype=shape.dtype) if shape.sinks else None


def cases(where: Where) -> dict[str, Callable[[], None]]:
    half = where.half
    shapes = {
        f"{str(half).removeprefix('torch.')}, head 128": Shape(8, 2, 128, 128, 64, half),
        "head 64, pages of 16": Shape(8, 2, 64, 64, 16, half),
        "head 256": Shape(4, 2, 256, 256, 32, half),
        "float16, window, soft cap": Shape(7, 1, 128, 128, 32, torch.float16, window=60, softcap=20.0),
        "heads of 96 and 80, sinks": Shape(6, 3, 96, 80, 128, half, sinks=True),
        "float32": Shape(4, 1, 128, 128, 16, torch.float32),
    }
    made: dict[str, Callable[[], None]] = {}
    for name, shape in shapes.items():
        made[f"decode, {name}"] = partial(decode, where, shape)
        made[f"prompts, {name}"] = partial(prompts, where, shape)
    return made
