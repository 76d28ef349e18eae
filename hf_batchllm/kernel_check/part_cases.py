"""Cases of attention in parts that end at fixed positions, and of products with few columns.

Both are right, and give a row the same bits in other surroundings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ..kernels import fixed_attention_torch
from ..kernels.fixed_lists import FIXED_TILES, PART, build_fixed
from ..kernels.ranges import Readers
from .attention_cases import Shape, failure, in_wide, tensors_of, units_of, writing
from .comparing import Where, Wrong, near

_PREFIX = PART + 128  # tokens that most rows share: they go on within its last part
_SHARING, _ALONE = 20, 3  # readers
# The same rows, read in other blocks.
_OTHER_WAYS: tuple[dict[str, Any], ...] = ({"gates": (1e18, 1e18)}, {"share": 1}, {"share": 10**6})


def in_parts(where: Where, shape: Shape) -> None:
    """Decode rows, and prompts of a few tokens and of many, most of them on a prefix."""
    from ..kernels import fixed_attention_triton, pages_triton

    own = 3 + np.arange(_SHARING + _ALONE) * 37 % 90
    ends = own + np.repeat([_PREFIX, 0], [_SHARING, _ALONE])
    units = units_of(shape, own, _SHARING, _PREFIX)
    count = np.where(np.arange(len(own)) % 4 == 1, 3, 1)
    count[own.argmax()] = 70
    begin, rows = np.cumsum(count) - count, int(count.sum())
    lengths = np.repeat(ends - count + 1, count) + np.arange(rows) - np.repeat(begin, count)
    readers = Readers(np.arange(1, len(own) + 1), begin, count, ends)
    given = tensors_of(where, shape, units, rows, own, _PREFIX)

    def attended(module: ModuleType, tensors: tuple[torch.Tensor | None, ...], **options: Any) -> torch.Tensor:
        q, k, v, sinks = tensors
        assert q is not None and k is not None and v is not None
        work = build_fixed(
            units, readers, lengths, kv_heads=shape.kv_heads, group=shape.group, page_size=shape.page_size,
            multiprocessors=8, window=shape.window, direct=not shape.sinks, **({"gates": (0, 0)} | options),
        ).to(where.device)  # fmt: skip
        seen = torch.from_numpy(lengths.astype(np.int32)).to(where.device)
        exact = torch.promote_types(q.dtype, torch.float32)
        out = q.new_full((rows, shape.heads, shape.v_dim), torch.nan)
        part_out, part_sums = (
            torch.full((work.parts, shape.heads, size), torch.nan, dtype=exact, device=where.device)
            for size in (shape.v_dim, 2)
        )
        boxes = tuple(pages_triton.by_page(pages) for pages in (k, v))
        for tile in reversed(FIXED_TILES):
            if tile in work.items:
                module.attend_fixed(
                    tile, q, k, v, boxes, out, part_out, part_sums, work, seen, 0.2,
                    window=shape.window, softcap=shape.softcap,
                )  # fmt: skip
        if work.merges:
            module.merge_fixed(out, part_out, part_sums, work, sinks=sinks)
        return out.to(shape.dtype)

    ours = attended(fixed_attention_triton, given)
    near(ours, attended(fixed_attention_torch, in_wide(given)))
    for way in _OTHER_WAYS:
        if not torch.equal(attended(fixed_attention_triton, given, **way), ours):
            raise Wrong("a row has other bits where its keys are read in other blocks")


def narrow(where: Where, dtype: torch.dtype, columns: int, depth: int) -> None:
    """Few columns, or an odd number: right, and the same bits among more rows and fewer."""
    from ..kernels import narrow_products_torch, narrow_products_triton

    generator = where.generator()
    sizes = (70, depth), (columns, depth), (columns,)
    x, weight, bias = (where.random(generator, *size, dtype=dtype) for size in sizes)
    every = narrow_products_triton.narrow_product(x, weight, bias=bias)
    near(every, narrow_products_torch.narrow_product(x, weight, bias=bias))
    near(narrow_products_triton.narrow_product(x, weight), narrow_products_torch.narrow_product(x, weight))
    for rows in (1, 2, 33):
        if not torch.equal(narrow_products_triton.narrow_product(x[:rows], weight, bias=bias), every[:rows]):
            raise Wrong(f"in a narrow product of {rows} rows these have other bits")


def tried_in_parts(device: torch.device, shape: Shape) -> str | None:
    """As ``attention_cases.tried``."""
    where = Where(device)
    return failure(
        {"KV cache": partial(writing, where, shape), "attention in parts": partial(in_parts, where, shape)}, shape
    )


def cases(where: Where) -> dict[str, Callable[[], None]]:
    half = where.half
    shapes = {
        f"{str(half).removeprefix('torch.')}, head 128": Shape(8, 2, 128, 128, 64, half),
        "head 64, pages of 16": Shape(8, 2, 64, 64, 16, half),
        "head 256, window": Shape(4, 2, 256, 256, 32, half, window=100),
        "float16, soft cap": Shape(7, 1, 128, 128, 64, torch.float16, softcap=20.0),
        "heads of 96 and 80, sinks": Shape(6, 3, 96, 80, 128, half, sinks=True),
    }
    made: dict[str, Callable[[], None]] = {
        f"attention in parts, {name}": partial(in_parts, where, shape) for name, shape in shapes.items()
    }
    made["a router's product"] = partial(narrow, where, half, 8, 256)
    made["a product of odd size"] = partial(narrow, where, torch.float32, 101, 75)
    return made
