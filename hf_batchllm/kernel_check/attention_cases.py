"""Cases of the attention kernels: decode rows and prompts over pages that some of them share, and the writing of pages.

For float32 the twins compute in float64: products of float32 may be rounded more than a kernel's, which depends on
settings of torch and of the environment (TF32).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..kernels import decode_torch, layer_ops_torch, prefill_torch
from ..kernels.ranges import Readers, Units, make_chunks, make_ranges
from ..kernels.work_lists import build_prefill, build_work
from .comparing import Where, near
from .errors_in_a_check import in_a_line, is_others_work

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


def decode(where: Where, shape: Shape, chunk: int = 1, brief: bool = False) -> None:
    """Both tiles: long ones for the shared prefix, short ones for each row's own tokens.

    ``chunk``: every third reader is a short chunk of a prompt, of so many rows. ``brief``: the launch for many items of
    a page each.
    """
    from ..kernels import decode_triton

    own = 3 + np.arange(_SHARING + _ALONE) * 37 % 90
    ends = own + np.repeat([_PREFIX, 0], [_SHARING, _ALONE])
    units = units_of(shape, own)
    count = np.where(np.arange(len(own)) % 3 == 2, chunk, 1)
    begin, rows = np.cumsum(count) - count, int(count.sum())
    nth = np.arange(rows) - np.repeat(begin, count)
    lengths = np.repeat(ends - count + 1, count) + nth
    readers = Readers(np.arange(1, len(own) + 1), begin, count, ends)
    ranges = make_ranges(units, readers, page_size=shape.page_size, window=shape.window, gate=0, gate_merged=0)
    work = build_work(
        ranges, lengths, kv_heads=shape.kv_heads, group=shape.group, page_size=shape.page_size, multiprocessors=8,
        window=shape.window, direct=not shape.sinks,
    )  # fmt: skip
    work.brief = brief
    work = work.to(where.device)
    given = tensors_of(where, shape, units, rows, own)
    seen = torch.from_numpy(lengths.astype(np.int32)).to(where.device)
    results = []
    for module, (q, k, v, sinks) in ((decode_triton, given), (decode_torch, in_wide(given))):
        out = q.new_full((rows, shape.heads, shape.v_dim), torch.nan)
        exact = torch.promote_types(q.dtype, torch.float32)
        parts = torch.full((work.parts, shape.heads, shape.v_dim + 1), torch.nan, dtype=exact, device=where.device)
        part_out, part_lse = parts[..., :-1].contiguous(), parts[..., -1].contiguous()
        for tile in work.items:
            module.attend_items(
                tile, q, k, v, out, part_out, part_lse, work, seen, 0.2, window=shape.window, softcap=shape.softcap
            )
        if work.merges or shape.sinks:
            module.merge_parts(out, part_out, part_lse, work, sinks=sinks)
        results.append(out.to(shape.dtype))
    near(results[0], results[1])


def prompts(where: Where, shape: Shape, two_way: bool = False) -> None:
    """Two chunks on a prefix and one without, through each tile that the card has.

    ``two_way``: the first twenty rows of each see all of these, as an image's do in some models.
    """
    from ..kernels import prefill_triton

    own = np.array([70, 21, 90])
    units = units_of(shape, own, sharing=2)
    begins = np.cumsum(own) - own
    readers = Readers(np.arange(1, 4), begins, own, own + np.array([_PREFIX, _PREFIX, 0]))
    chunks = make_chunks(units, readers, page_size=shape.page_size)
    if two_way:
        at = np.concatenate([np.arange(first, first + rows) for first, rows in zip(chunks.position, own, strict=True)])
        chunks = replace(chunks, sees_to=np.maximum(at + 1, np.repeat(chunks.position + 20, own)))
    given = tensors_of(where, shape, units, int(own.sum()), own)
    options = prefill_triton.launch_options(shape.group, shape.qk_dim, shape.v_dim, shape.dtype.itemsize)
    same: dict[str, Any] = {"window": shape.window, "softcap": shape.softcap, "options": options}
    for tile in {options["tile"], options["tile"] if two_way else options.get("wide", options["tile"])}:
        work = build_prefill(
            chunks, group=shape.group, page_size=shape.page_size, tile=tile, window=shape.window
        ).to(where.device)  # fmt: skip
        results = []
        for module, (q, k, v, sinks) in ((prefill_triton, given), (prefill_torch, in_wide(given))):
            out = q.new_full((len(q), shape.heads, shape.v_dim), torch.nan)
            module.attend_chunks(q, k, v, out, work, 0.2, sinks=sinks, **same)
            results.append(out.to(shape.dtype))
        near(results[0], results[1])


def writing(where: Where, shape: Shape, turn: str = "llama", part: float = 1.0, more: bool = False) -> None:
    """K and V go to their slots, q and k turned on their way and as they are.

    ``turn``, ``part``: how, and which part of a head. ``more``: with norms of all three, and a factor of q.
    """
    from ..kernels import layer_ops_triton

    generator, tokens, slots_there = where.generator(), 19, 38
    q, k, v = (
        where.random(generator, tokens, heads, dim, dtype=shape.dtype)
        for heads, dim in (
            (shape.heads, shape.qk_dim), (shape.kv_heads, shape.qk_dim), (shape.kv_heads, shape.v_dim)
        )
    )  # fmt: skip
    rotary = int(shape.qk_dim * part) // 2 * 2
    angle = torch.rand(tokens, rotary // 2, generator=generator, dtype=torch.float32, device="cpu") * 6
    angle = angle if turn == "gpt_oss" else torch.cat([angle, angle], dim=1)
    if turn == "cohere":
        angle = angle[:, : rotary // 2].repeat_interleave(2, dim=1)
    tables = [each.to(where.device, shape.dtype) for each in (angle.cos(), angle.sin())]
    slots = torch.randperm(slots_there, generator=generator, device="cpu")[:tokens].to(where.device)
    norms: dict[str, Any] = {}
    if more:
        weights = [where.random(generator, shape.qk_dim, dtype=shape.dtype) for _ in range(2)]
        factor = where.random(generator, tokens, dtype=shape.dtype)
        norms = {"q_weight": weights[0], "k_weight": weights[1], "v_norm": True, "q_factor": factor}
    for cos, sin in ([*tables], [None, None]):
        results: list[list[torch.Tensor]] = []
        for module in (layer_ops_triton, layer_ops_torch):
            caches = [
                torch.zeros(slots_there, shape.kv_heads, dim, dtype=shape.dtype, device=where.device)
                for dim in (shape.qk_dim, shape.v_dim)
            ]
            made = torch.empty_like(q)
            module.rope_and_write(q, k, v, cos, sin, *caches, slots, q_out=made, turn=turn, **norms)
            results.append([made, *caches])
        for ours, twins in zip(*results, strict=True):
            near(ours, twins)


def _kinds(where: Where, shape: Shape) -> dict[str, Callable[[], None]]:
    """All that a layer's attention may run."""
    return {
        "KV cache": partial(writing, where, shape),
        "decode": partial(decode, where, shape),
        "short chunks": partial(decode, where, shape, chunk=3),
        "prompts": partial(prompts, where, shape),
    }


def tried(device: torch.device, shape: Shape) -> str | None:
    """Run the cases of a shape in this process; gives what went wrong, in a line. Not while a graph is captured."""
    where = Where(device)
    return failure({**_kinds(where, shape), "many short items": partial(decode, where, shape, brief=True)}, shape)


def failure(cases_of_shape: dict[str, Callable[[], None]], shape: Shape) -> str | None:
    """What went wrong in the first case that failed, in a line."""
    for name, case in cases_of_shape.items():
        try:
            case()
        except Exception as error:
            if is_others_work(error):
                raise
            return f"{name}, {shape}: {in_a_line(error)[:200]}"
    return None


def units_of(shape: Shape, own: np.ndarray, sharing: int = _SHARING, prefix: int = _PREFIX) -> Units:
    """A prefix, then a unit for each run of own tokens; the first ones stand on the prefix."""
    on_prefix = np.arange(len(own)) < sharing
    tokens = np.append(prefix, own)
    pages = -(-tokens // shape.page_size)
    return Units(
        base=np.append(-1, np.where(on_prefix, 0, -1)),
        start=np.append(0, np.where(on_prefix, prefix, 0)),
        page_begin=np.append(0, np.cumsum(pages)),
        page=np.random.default_rng(0).permutation(int(pages.sum())),
    )


_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def in_wide(given: _Tensors) -> _Tensors:
    """What the twins compute with."""
    q, k, v, sinks = given
    if q.dtype != torch.float32:
        return given
    return q.double(), k.double(), v.double(), None if sinks is None else sinks.double()


def tensors_of(where: Where, shape: Shape, units: Units, rows: int, own: np.ndarray, prefix: int = _PREFIX) -> _Tensors:
    """q, K, V and sinks. Places of pages that hold no token are NaN: none of it may come into a result."""
    generator = where.generator()
    pages = len(units.page)
    written = np.zeros((pages, shape.page_size), dtype=bool)
    for unit, tokens in enumerate(np.append(prefix, own)):
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
        made |= {f"{kind}, {name}": case for kind, case in _kinds(where, shape).items()}
    # Launches of their own, where items are many.
    for name in list(shapes)[:3]:
        made[f"many short items, {name}"] = partial(decode, where, shapes[name], brief=True)
    plain = next(iter(shapes.values()))
    made["KV cache, norms of q, k and v"] = partial(writing, where, plain, more=True)
    made["prompts with images seen both ways"] = partial(prompts, where, shapes["head 256"], two_way=True)
    for turn in layer_ops_torch.TURNS:
        made[f"KV cache, half turned as in {turn}"] = partial(writing, where, plain, turn, part=0.5)
    return made
