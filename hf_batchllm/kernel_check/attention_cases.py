"""Cases of attention over pages that some rows share, in parts that end at fixed positions, too; and of writing pages.

For float32 the references compute in float64: products of float32 may be rounded more than a kernel's, which depends
on settings of torch and of the environment (TF32).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..kernels.lists.fixed_lists import FIXED_TILES, PART, build_fixed
from ..kernels.lists.ranges import Readers, Units, make_chunks, make_ranges
from ..kernels.lists.work_lists import WorkLists, build_prefill, build_work
from ..kernels.reference.layer_ops_torch import TURNS
from .comparing import Cases, Where, Wrong, both, held, near
from .outcomes import in_a_line, is_others_work

_PREFIX = 150  # tokens that most rows share
_PREFIX_IN_PARTS = PART + 128  # they go on within its last part
_SHARING, _ALONE = 20, 3  # readers
_OWN = 3 + np.arange(_SHARING + _ALONE) * 37 % 90  # tokens of each alone
_SCALE = 0.2
# The same rows, read in other blocks.
_OTHER_WAYS: tuple[dict[str, Any], ...] = ({"gates": (1e18, 1e18)}, {"share": 1}, {"share": 10**6})


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

    @property
    def bounds(self) -> dict[str, Any]:
        """What each attention kernel is told of them."""
        return {"window": self.window, "softcap": self.softcap}

    @property
    def cut(self) -> dict[str, Any]:
        """What work lists are cut by."""
        heads = {"kv_heads": self.kv_heads, "group": self.group, "page_size": self.page_size}
        return heads | {"multiprocessors": 8, "window": self.window, "direct": not self.sinks}


class Reading:
    """Readers of pages: each has a unit of its own, and the first ones stand on a prefix.

    Places of pages that hold no token are NaN: none of it may come into a result. ``own``: the tokens of each unit.
    ``rows``: how many of the last ones are in the step.
    """

    def __init__(
        self, where: Where, shape: Shape, own: np.ndarray, rows: np.ndarray, sharing: int, prefix: int = _PREFIX
    ) -> None:
        on_prefix, tokens = np.arange(len(own)) < sharing, np.append(prefix, own)
        pages = -(-tokens // shape.page_size)
        self.units = Units(
            base=np.append(-1, np.where(on_prefix, 0, -1)),
            start=np.append(0, np.where(on_prefix, prefix, 0)),
            page_begin=np.append(0, np.cumsum(pages)),
            page=np.random.default_rng(0).permutation(int(pages.sum())),
        )
        begin, ends = np.cumsum(rows) - rows, own + np.where(on_prefix, prefix, 0)
        self.readers = Readers(np.arange(1, len(own) + 1), begin, rows, ends)
        self.lengths = np.repeat(ends - rows + 1 - begin, rows) + np.arange(rows.sum())  # [rows] tokens that each sees
        self.seen = torch.from_numpy(self.lengths.astype(np.int32)).to(where.device)
        self.shape = shape
        empty = np.ones((len(self.units.page), shape.page_size), dtype=bool)
        for unit, count in enumerate(tokens):
            mine = self.units.page[self.units.page_begin[unit] : self.units.page_begin[unit + 1]]
            empty[mine] = (np.arange(len(mine) * shape.page_size) >= count).reshape(len(mine), -1)
        generator = where.generator()
        q, k, v, sinks = (
            where.random(generator, *size, dtype=shape.dtype)
            for size in (
                (len(self.lengths), shape.heads, shape.qk_dim),
                (*empty.shape, shape.kv_heads, shape.qk_dim),
                (*empty.shape, shape.kv_heads, shape.v_dim),
                (shape.heads,),
            )
        )
        k[torch.from_numpy(empty).to(where.device)] = torch.nan
        v[torch.from_numpy(empty).to(where.device)] = torch.nan
        self.tensors = q, k, v, sinks if shape.sinks else None

    def by(self, attended: Callable[..., torch.Tensor], module: Any, wide: bool = False) -> torch.Tensor:
        """What ``attended(module, q, k, v, sinks)`` gives. ``wide``: computed from float32 in float64."""
        tensors = [each.double() if wide and each is not None else each for each in self.tensors]
        return attended(module, *tensors).to(self.shape.dtype)

    def held(self, home: str, attended: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The kernels' result, when it is their references', too."""
        kernels, references = both(home)
        ours = self.by(attended, kernels)
        near(ours, self.by(attended, references, wide=self.shape.dtype == torch.float32))
        return ours

    def results(self, q: torch.Tensor, parts: int = 0, sums: tuple[int, ...] = ()) -> tuple[torch.Tensor, ...]:
        """Memory for the results of rows, for those of parts, and for what parts have beside. It is NaN."""
        exact, (heads, dim) = torch.promote_types(q.dtype, torch.float32), (self.shape.heads, self.shape.v_dim)
        out = q.new_full((len(q), heads, dim), torch.nan)
        return out, *(out.new_full((parts, heads, *size), torch.nan, dtype=exact) for size in ((dim,), sums))


def decode(where: Where, shape: Shape, chunk: int = 1, brief: bool = False) -> None:
    """Both tiles: long ones for the shared prefix, short ones for each row's own tokens.

    ``chunk``: every third reader is a short chunk of a prompt, of so many rows. ``brief``: the launch for many items of
    a page each.
    """
    reading = Reading(where, shape, _OWN, np.where(np.arange(len(_OWN)) % 3 == 2, chunk, 1), _SHARING)
    ranges = make_ranges(
        reading.units, reading.readers, page_size=shape.page_size, window=shape.window, gate=0, gate_merged=0
    )
    work = build_work(ranges, reading.lengths, **shape.cut)
    work.brief = brief
    work = work.to(where.device)

    def attended(module: Any, q: torch.Tensor, *given: Any) -> torch.Tensor:
        *pages, sinks = given
        out, *parts = reading.results(q, work.parts)
        for tile in work.items:
            module.attend_items(tile, q, *pages, out, *parts, work, reading.seen, _SCALE, **shape.bounds)
        if work.merges or shape.sinks:
            module.merge_parts(out, *parts, work, sinks=sinks)
        return out

    reading.held("decode", attended)


def prompts(where: Where, shape: Shape, two_way: bool = False) -> None:
    """Two chunks on a prefix and one without, through each tile that the card has.

    ``two_way``: the first twenty rows of each see all of these, as an image's do in some models.
    """
    own = np.array([70, 21, 90])
    reading = Reading(where, shape, own, own, sharing=2)
    chunks = make_chunks(reading.units, reading.readers, page_size=shape.page_size)
    if two_way:
        chunks = replace(chunks, sees_to=np.maximum(reading.lengths, np.repeat(chunks.position + 20, own)))
    options = both("prefill")[0].launch_options(shape.group, shape.qk_dim, shape.v_dim, shape.dtype.itemsize)
    for tile in {options["tile"], options["tile"] if two_way else options.get("wide", options["tile"])}:
        sizes = {"group": shape.group, "page_size": shape.page_size, "tile": tile}
        work = build_prefill(chunks, **sizes, window=shape.window).to(where.device)

        def attended(module: Any, q: torch.Tensor, *given: Any, work: Any = work) -> torch.Tensor:
            *pages, sinks = given
            out, *_ = reading.results(q)
            module.attend_chunks(q, *pages, out, work, _SCALE, sinks=sinks, options=options, **shape.bounds)
            return out

        reading.held("prefill", attended)


def in_parts(where: Where, shape: Shape) -> None:
    """Decode rows, and prompts of a few tokens and of many, most of them on a prefix: the same bits in any blocks."""
    from ..kernels.triton.pages_triton import by_page

    count = np.where(np.arange(len(_OWN)) % 4 == 1, 3, 1)
    count[_OWN.argmax()] = 70
    reading = Reading(where, shape, _OWN, count, _SHARING, _PREFIX_IN_PARTS)

    def built(**options: Any) -> WorkLists:
        given = shape.cut | {"gates": (0, 0)} | options
        return build_fixed(reading.units, reading.readers, reading.lengths, **given).to(where.device)

    def attended(work: WorkLists, module: Any, q: torch.Tensor, *given: Any) -> torch.Tensor:
        *pages, sinks = given
        out, *parts = reading.results(q, work.parts, sums=(2,))
        boxes = tuple(map(by_page, pages))
        for tile in reversed(FIXED_TILES):
            if tile in work.items:
                module.attend_fixed(tile, q, *pages, boxes, out, *parts, work, reading.seen, _SCALE, **shape.bounds)
        if work.merges:
            module.merge_fixed(out, *parts, work, sinks=sinks)
        return out

    ours = reading.held("fixed_attention", partial(attended, built()))
    for way in _OTHER_WAYS:
        if not torch.equal(reading.by(partial(attended, built(**way)), both("fixed_attention")[0]), ours):
            raise Wrong("a row has other bits where its keys are read in other blocks")


def writing(where: Where, shape: Shape, turn: str = "llama", part: float = 1.0, more: bool = False) -> None:
    """K and V go to their slots, q and k turned on their way and as they are.

    ``turn``, ``part``: how, and which part of a head. ``more``: with norms of all three, and a factor of q.
    """
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

    caches = [
        torch.zeros(slots_there, shape.kv_heads, dim, dtype=shape.dtype, device=where.device)
        for dim in (shape.qk_dim, shape.v_dim)
    ]
    made = torch.full_like(q, torch.nan)
    for turns in (tables, [None, None]):
        held("layer_ops", "rope_and_write", q, k, v, *turns, *caches, slots, q_out=made, turn=turn, **norms)


def narrow(where: Where, dtype: torch.dtype, columns: int, depth: int) -> None:
    """Few columns, or an odd number: right, and the same bits among more rows and fewer."""
    generator = where.generator()
    sizes = (70, depth), (columns, depth), (columns,)
    x, weight, bias = (where.random(generator, *size, dtype=dtype) for size in sizes)
    held("narrow_products", "narrow_product", x, weight)
    every = held("narrow_products", "narrow_product", x, weight, bias=bias)
    product = both("narrow_products")[0].narrow_product
    for rows in (1, 2, 33):
        if not torch.equal(product(x[:rows], weight, bias=bias), every[:rows]):
            raise Wrong(f"in a narrow product of {rows} rows these have other bits")


def _kinds(where: Where, shape: Shape) -> Cases:
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
    return _failure(_kinds(where, shape) | {"many short items": partial(decode, where, shape, brief=True)}, shape)


def tried_in_parts(device: torch.device, shape: Shape) -> str | None:
    """What fails in attention in parts: see ``tried``."""
    where = Where(device)
    cases: Cases = {"KV cache": partial(writing, where, shape), "attention in parts": partial(in_parts, where, shape)}
    return _failure(cases, shape)


def _failure(cases: Cases, shape: Shape) -> str | None:
    for name, case in cases.items():
        try:
            case()
        except Exception as error:
            if is_others_work(error):
                raise
            return f"{name}, {shape}: {in_a_line(error)[:200]}"
    return None


def attention(where: Where) -> Cases:
    half = where.half
    shapes = {
        f"{str(half).removeprefix('torch.')}, head 128": Shape(8, 2, 128, 128, 64, half),
        "head 64, pages of 16": Shape(8, 2, 64, 64, 16, half),
        "head 256": Shape(4, 2, 256, 256, 32, half),
        "float16, window, soft cap": Shape(7, 1, 128, 128, 32, torch.float16, window=60, softcap=20.0),
        "heads of 96 and 80, sinks": Shape(6, 3, 96, 80, 128, half, sinks=True),
        "float32": Shape(4, 1, 128, 128, 16, torch.float32),
    }
    made: Cases = {}
    for name, shape in shapes.items():
        made |= {f"{kind}, {name}": case for kind, case in _kinds(where, shape).items()}
    # Launches of their own, where items are many.
    for name in list(shapes)[:3]:
        made[f"many short items, {name}"] = partial(decode, where, shapes[name], brief=True)
    plain = next(iter(shapes.values()))
    made["KV cache, norms of q, k and v"] = partial(writing, where, plain, more=True)
    made["prompts with images seen both ways"] = partial(prompts, where, shapes["head 256"], two_way=True)
    for turn in TURNS:
        made[f"KV cache, half turned as in {turn}"] = partial(writing, where, plain, turn, part=0.5)
    return made


def parts(where: Where) -> Cases:
    half = where.half
    shapes = {
        f"{str(half).removeprefix('torch.')}, head 128": Shape(8, 2, 128, 128, 64, half),
        "head 64, pages of 16": Shape(8, 2, 64, 64, 16, half),
        "head 256, window": Shape(4, 2, 256, 256, 32, half, window=100),
        "float16, soft cap": Shape(7, 1, 128, 128, 64, torch.float16, softcap=20.0),
        "heads of 96 and 80, sinks": Shape(6, 3, 96, 80, 128, half, sinks=True),
    }
    made: Cases = {f"attention in parts, {name}": partial(in_parts, where, shape) for name, shape in shapes.items()}
    made["a router's product"] = partial(narrow, where, half, 8, 256)
    made["a product of odd size"] = partial(narrow, where, torch.float32, 101, 75)
    return made
