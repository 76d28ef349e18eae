"""Random cases for the attention kernels and their twins, and what must come of them.

Whatever no row may see is NaN in the caches, and all outputs are NaN before a kernel runs: a key that should not have
been read shows, and so does an element that was left out, or written though nothing belongs there. A kernel is held
against its twin in float64, and both against a reference that knows nothing of work lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hf_batchllm.kernels import cascade_torch
from hf_batchllm.kernels import work_lists as wl

NAN = float("nan")
GROW = 5  # how much decode rows grow while a case's lists are kept
# The error's norm by the result's, over all rows; of a single row it may be twice that.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}
LSE_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-3}  # absolute
_GUARD = 16  # rows before and behind each output
Entries = list[tuple[int, int, int]]  # page, tokens, position of the first


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    page: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        return 1.3 * self.qk_dim**-0.5

    def __str__(self) -> str:
        said = f"{self.heads}/{self.kv_heads}x{self.qk_dim}"
        said += f"/{self.v_dim}" if self.v_dim != self.qk_dim else ""
        said += f" page {self.page} {str(self.dtype).removeprefix('torch.')}"
        said += f" window {self.window}" if self.window else ""
        return said + (" softcap" if self.softcap else "") + (" sinks" if self.sinks else "")


@dataclass
class Tensors:
    q: torch.Tensor  # [rows, heads, qk_dim]
    k: torch.Tensor  # [pages, page, kv_heads, qk_dim]
    v: torch.Tensor  # [pages, page, kv_heads, v_dim]
    sinks: torch.Tensor | None  # [heads] float32

    def double(self) -> Tensors:
        return Tensors(self.q.double(), self.k.double(), self.v.double(), self.sinks)


class PageList:
    """Hands out page numbers, each once."""

    def __init__(self, size: int) -> None:
        self.size, self.count = size, 0

    def take(self, start: int, tokens: int, *, whole: bool = False) -> Entries:
        """Pages for so many positions from ``start`` on; ``whole``: the last one may still be grown into."""
        taken = []
        for at in range(0, tokens, self.size):
            taken.append((self.count, self.size if whole else min(self.size, tokens - at), start + at))
            self.count += 1
        return taken


def columns(entries: Entries) -> np.ndarray:  # [entries, 3]
    return np.array(entries, dtype=np.int64).reshape(-1, 3)


def tokens_of(entries: np.ndarray, page: int) -> tuple[np.ndarray, np.ndarray]:
    """Slot and position of each token of some entries."""
    nth = np.arange(page)[None] + np.zeros_like(entries[:, :1])
    inside = nth < entries[:, 1:2]
    return (entries[:, 0:1] * page + nth)[inside], (entries[:, 2:3] + nth)[inside]


def random_tensors(
    rng: np.random.Generator, variant: Variant, rows: int, written: np.ndarray, device: str
) -> Tensors:  # written: [slots] bool
    generator = torch.Generator(device).manual_seed(int(rng.integers(1 << 30)))
    unwritten = torch.from_numpy(~written).to(device)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(variant.dtype)

    def cache(dim: int) -> torch.Tensor:
        values = draw(len(written), variant.kv_heads, dim)
        values[unwritten] = NAN
        return values.view(-1, variant.page, variant.kv_heads, dim)

    sinks = torch.linspace(-1, 2, variant.heads, device=device) if variant.sinks else None
    return Tensors(draw(rows, variant.heads, variant.qk_dim), cache(variant.qk_dim), cache(variant.v_dim), sinks)


def reference(
    q: torch.Tensor,  # [rows, heads, qk_dim] float64, as are k and v
    k: torch.Tensor,  # [keys, kv_heads, qk_dim]
    v: torch.Tensor,  # [keys, kv_heads, v_dim]
    seen: torch.Tensor,  # [rows, keys]
    variant: Variant,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # [rows, heads, v_dim]
    """Softmax attention, spelled out. Each row sees something, or there are no keys at all."""
    if len(k) == 0:
        return q.new_zeros(len(q), variant.heads, variant.v_dim)
    grouped = q.unflatten(1, (variant.kv_heads, variant.group))
    scores = torch.einsum("rhgd,khd->rhgk", grouped, k) * variant.scale
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.double().view(variant.kv_heads, variant.group, 1).expand(len(q), -1, -1, -1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("rhgk,khd->rhgd", weights, v).flatten(1, 2)


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> float:
    """The norm of the error by that of ``want``, for what is not NaN."""
    assert (got.isnan() == want.isnan()).all(), f"{what}: an element was left out, or another one written"
    got, want = got.double().nan_to_num(), want.double().nan_to_num()
    error = got - want
    whole = float(error.norm() / want.norm().clamp(min=1e-300))
    assert whole <= TOLERANCE[dtype], f"{what}: off by {whole}"
    rows = error.flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp(min=1e-300)
    assert not rows.numel() or rows.max() <= 2 * TOLERANCE[dtype], f"{what}: row {int(rows.argmax())} by {rows.max()}"
    return whole


# -- decode ----------------------------------------------------------------------------------------------------


@dataclass
class DecodeCase:
    variant: Variant
    ranges: wl.Ranges
    lengths: np.ndarray  # [rows]  as the lists are made; padding rows come last, and have 0
    reads: list[np.ndarray]  # of each row: all entries that it reads
    ended: np.ndarray  # [any]  rows that end while the lists are kept
    pages: int
    seed: int
    split: int | None
    kinds: Counter[str]  # of what there is, how many

    def work(self, **options: Any) -> wl.WorkLists:
        variant = self.variant
        given = {"most_pages": self.split, "window": variant.window, "direct": not variant.sinks, "ahead": GROW}
        return wl.build_work(
            self.ranges,
            self.lengths,
            kv_heads=variant.kv_heads,
            group=variant.group,
            page_size=variant.page,
            multiprocessors=3,
            **(given | options),
        )

    def stages(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Lengths for which the same lists hold, and the rows which then go on."""
        going = self.lengths > 0
        yield self.lengths, going
        grown = self.lengths + GROW * going
        yield grown, going
        grown, going = grown.copy(), going.copy()
        grown[self.ended], going[self.ended] = 0, False
        yield grown, going

    def tensors(self, device: str) -> Tensors:
        written = np.zeros(self.pages * self.variant.page, dtype=bool)
        for row, entries in enumerate(self.reads):
            if self.variant.window is not None:  # pages that it sees nothing of any more
                entries = entries[entries[:, 2] + entries[:, 1] > self.lengths[row] - self.variant.window]
            slots, positions = tokens_of(entries, self.variant.page)
            written[slots[positions < self.lengths[row] + GROW]] = True
        rng = np.random.default_rng(self.seed)
        tensors = random_tensors(rng, self.variant, len(self.lengths), written, device)
        tensors.q[torch.from_numpy(self.lengths == 0).to(device)] = NAN
        return tensors

    def reference(self, tensors: Tensors, lengths: np.ndarray) -> torch.Tensor:
        """All rows; ``tensors`` in float64."""
        k, v = tensors.k.flatten(0, 1), tensors.v.flatten(0, 1)
        rows = []
        for row, entries in enumerate(self.reads):
            slots, positions = tokens_of(entries, self.variant.page)
            seen = (positions < lengths[row]) & (positions >= lengths[row] - (self.variant.window or 1 << 40))
            at = torch.from_numpy(slots[seen]).to(k.device)
            q, all_seen = tensors.q[row : row + 1], at.new_ones(1, len(at), dtype=torch.bool)
            rows.append(reference(q, k[at], v[at], all_seen, self.variant, tensors.sinks))
        return torch.cat(rows)


def decode_case(seed: int, variant: Variant, *, rows: int, most: int, suffixes: bool = False) -> DecodeCase:
    """Up to ``rows`` rows under prefixes of up to ``most`` tokens that nest, and as many tokens of their own.

    A prefix is a range, or is joined to its readers' own pages. With ``suffixes`` some units have several rows.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1 if rng.random() < 0.3 else (rows + 1) // 2, rows + 1))
    starts = [0]  # first rows of the units
    while starts[-1] < count:
        starts.append(min(count, starts[-1] + (int(rng.integers(2, 17)) if suffixes and rng.random() < 0.4 else 1)))
    pages = PageList(variant.page)
    ranges: list[tuple[int, int, int, Entries, bool]] = []  # row_begin, row_end, level, pages, causal
    lengths, reads = np.zeros(count, dtype=np.int64), [columns([])] * count
    kinds: Counter[str] = Counter()

    def grow(low: int, high: int, depth: int, above: Entries, alone: Entries) -> None:
        """The units [low, high), of which all read ``above``; of that, no range holds ``alone`` yet."""
        start = sum(tokens for _, tokens, _ in above)
        while low < high:
            stop = int(rng.integers(low + 1, high + 1))
            if depth < 3 and rng.random() < (0.85, 0.5, 0.3)[depth]:
                prefix = pages.take(start, int(rng.integers(1, most)))
                shared = rng.random() < 0.7
                if shared:
                    ranges.append((starts[low], starts[stop], depth, prefix, False))
                    kinds["one-row group"] += starts[stop] - starts[low] == 1
                    kinds["ragged prefix"] += prefix[-1][1] < variant.page
                if rng.random() < 0.1:
                    ranges.append((starts[low], starts[stop], 3 + depth, [], False))
                    kinds["empty range"] += 1
                grow(low, stop, depth + 1, above + prefix, alone if shared else alone + prefix)
            else:
                for unit in range(low, stop):
                    own(starts[unit], starts[unit + 1], start, above, alone)
            low = stop

    def own(begin: int, end: int, start: int, above: Entries, alone: Entries) -> None:
        earlier = int(rng.integers(0, most))
        mine = pages.take(start, earlier + end - begin + GROW, whole=True)
        ranges.append((begin, end, 9, alone + mine, end - begin > 1))
        lengths[begin:end] = start + earlier + 1 + np.arange(end - begin)
        reads[begin:end] = [columns(above + mine)] * (end - begin)
        kinds["in no segment"] += len(above) == len(alone)
        positions = columns(alone + mine)
        kinds["hole"] += bool((positions[1:, 2] > (positions[:, 1] + positions[:, 2])[:-1]).any())
        kinds["causal"] += end - begin > 1
        kinds["grows onto a page"] += (earlier + end - begin) % variant.page > variant.page - GROW

    grow(0, len(starts) - 1, 0, [], [])
    scattered = rng.permutation(pages.count + 3)
    flat = columns([entry for *_, entries, _ in ranges for entry in entries])
    for entries in {id(each): each for each in (flat, *reads)}.values():
        entries[:, 0] = scattered[entries[:, 0]]
    built = wl.Ranges(
        row_begin=np.array([begin for begin, *_ in ranges]),
        row_end=np.array([end for _, end, *_ in ranges]),
        level=np.array([level for _, _, level, *_ in ranges]),
        page_begin=np.concatenate([[0], np.cumsum([len(entries) for *_, entries, _ in ranges])]),
        page=flat[:, 0],
        tokens=flat[:, 1],
        first=flat[:, 2],
        causal=np.array([causal for *_, causal in ranges]) if suffixes else None,
    )
    if variant.window is not None:
        for begin, end, level, entries, _ in ranges:
            size, last = sum(tokens for _, tokens, _ in entries), columns(entries)[-1:]
            if level < 3:
                kinds["window within a segment"] += variant.window < size
                kinds["window beyond a segment"] += variant.window > size
                kinds["range out of the window"] += int((last[:, 2] + last[:, 1]).sum()) <= (
                    lengths[begin:end].min() - variant.window
                )
    single = np.array([row for row, end in zip(starts, starts[1:], strict=False) if end == row + 1], dtype=np.int64)
    ended = single[rng.random(len(single)) < 0.3]
    padding = int(rng.integers(0, 4)) if rng.random() < 0.4 else 0
    kinds["padding row"] += padding
    kinds["ended"] += len(ended)
    lengths = np.append(lengths, np.zeros(padding, dtype=np.int64))
    reads += [columns([])] * padding
    split = None if rng.random() < 0.4 else int(rng.integers(1, 5))
    return DecodeCase(variant, built, lengths, reads, ended, len(scattered), seed, split, kinds)


class Outputs:
    """Where launches write: all NaN, with room around that stays so."""

    def __init__(self, case: DecodeCase, parts: int, dtype: torch.dtype, device: str) -> None:
        self.guarded = [
            torch.full((count + 2 * _GUARD, case.variant.heads, *shape), NAN, dtype=kind, device=device)
            for count, shape, kind in (
                (len(case.lengths), [case.variant.v_dim], dtype),
                (parts, [case.variant.v_dim], torch.promote_types(dtype, torch.float32)),
                (parts, [], torch.promote_types(dtype, torch.float32)),
            )
        ]
        self.out, self.part_out, self.part_lse = self.inside = [each[_GUARD:-_GUARD] for each in self.guarded]

    def add(self, other: Outputs) -> None:
        """What another launch has written, to other places."""
        for mine, its in zip(self.inside, other.inside, strict=True):
            assert (mine.isnan() | its.isnan()).all(), "two launches wrote to the same place"
            mine.copy_(torch.where(its.isnan(), mine, its))

    def assert_guarded(self) -> None:
        for each in self.guarded:
            assert each[:_GUARD].isnan().all() and each[-_GUARD:].isnan().all(), "written out of bounds"


def check_decode(kernels: ModuleType, case: DecodeCase, device: str) -> dict[str, float]:
    """A decode step, launch by launch, at each stage of the rows. The worst error of each kernel against its twin."""
    dtype, variant = case.variant.dtype, case.variant
    tensors = case.tensors(device)
    exact = tensors.double()
    work = case.work(capacity=2).to(device)
    for tile, items in work.items.items():  # what is beyond the count would do harm
        items[int(work.counts[tile]) :] = items[0]
        items[int(work.counts[tile]) :, 5] = -1
    given = {"window": variant.window, "softcap": variant.softcap}
    errors = {"own": 0.0, "segment": 0.0, "merge": 0.0}
    for lengths, going in case.stages():
        on_device = torch.from_numpy(lengths.astype(np.int32)).to(device)
        ours = Outputs(case, work.parts, dtype, device)
        for tile in work.items:
            got, want = Outputs(case, work.parts, dtype, device), Outputs(case, work.parts, torch.float64, device)
            for module, given_tensors, to in ((kernels, tensors, got), (cascade_torch, exact, want)):
                module.attend_items(
                    tile, given_tensors.q, given_tensors.k, given_tensors.v, *to.inside, work, on_device,
                    variant.scale, **given,
                )  # fmt: skip
                to.assert_guarded()
            kernel = "own" if tile == wl.TILES[0] else "segment"
            finite = torch.where(want.part_lse.isneginf(), 0.0, want.part_lse)
            assert (got.part_lse.isneginf() == want.part_lse.isneginf()).all(), f"{kernel}: LSE of nothing"
            difference = (torch.where(got.part_lse.isneginf(), 0.0, got.part_lse) - finite).abs().nan_to_num()
            assert not difference.numel() or difference.max() <= LSE_TOLERANCE[dtype], f"{kernel}: LSE"
            for mine, its in ((got.out, want.out), (got.part_out, want.part_out)):
                errors[kernel] = max(errors[kernel], assert_near(mine, its, dtype, f"{kernel}, {variant}"))
            ours.add(got)
        _assert_parts_are_written(work, ours, direct=not variant.sinks)
        joined = ours.out.double()
        cascade_torch.merge_parts(joined, ours.part_out.double(), ours.part_lse.double(), work, sinks=tensors.sinks)
        kernels.merge_parts(*ours.inside, work, sinks=tensors.sinks)
        ours.assert_guarded()
        errors["merge"] = max(errors["merge"], assert_near(ours.out, joined, dtype, f"merge, {variant}"))
        assert ours.out.isfinite().all()
        assert (ours.out[case.lengths == 0] == 0).all(), "padding rows"
        expected = case.reference(exact, lengths)
        rows = torch.from_numpy(going).to(device)
        assert_near(ours.out[rows], expected[rows], dtype, f"whole step, {variant}")
    return errors


def _assert_parts_are_written(work: wl.WorkLists, outputs: Outputs, direct: bool) -> None:
    """By now the output of a row with a single part stands, or all parts of a row that is to be merged."""
    counts = work.row_parts.diff()
    merged = counts != 1 if direct else torch.ones_like(counts, dtype=torch.bool)
    assert (outputs.out.isnan().flatten(1).all(1) == merged).all() and not outputs.out[~merged].isnan().any()
    assert (outputs.part_lse.isnan().all(1) == ~merged.repeat_interleave(counts)).all(), "a part is missing"


# -- prefill ---------------------------------------------------------------------------------------------------


@dataclass
class PrefillCase:
    variant: Variant
    chunks: wl.Chunks
    reads: list[np.ndarray]  # of each chunk: all entries of its unit
    rows: int  # in the batch; some belong to no chunk
    pages: int
    seed: int
    kinds: Counter[str]  # of what there is, how many

    def work(self, tile: int, **options: Any) -> wl.PrefillWork:
        variant = self.variant
        return wl.build_prefill(
            self.chunks, group=variant.group, page_size=variant.page, tile=tile, window=variant.window, **options
        )

    def each_chunk(self) -> Iterator[tuple[slice, np.ndarray, np.ndarray, np.ndarray]]:
        """Rows and their positions; slots and positions of the tokens that stand in the pages of which they see some."""
        chunks = self.chunks
        window = self.variant.window or 1 << 40
        for begin, end, first, entries in zip(
            chunks.row_begin, chunks.row_end, chunks.position, self.reads, strict=True
        ):
            seen = entries[entries[:, 2] + entries[:, 1] > first + 1 - window]
            slots, positions = tokens_of(seen, self.variant.page)
            known = positions < first + end - begin
            yield slice(begin, end), np.arange(first, first + end - begin), slots[known], positions[known]

    def tensors(self, device: str) -> Tensors:
        written = np.zeros(self.pages * self.variant.page, dtype=bool)
        for *_, slots, _ in self.each_chunk():
            written[slots] = True
        return random_tensors(np.random.default_rng(self.seed), self.variant, self.rows, written, device)

    def reference(self, tensors: Tensors) -> torch.Tensor:
        """All rows; NaN where no chunk has one. ``tensors`` in float64."""
        variant = self.variant
        out = tensors.q.new_full((self.rows, variant.heads, variant.v_dim), NAN)
        k, v = tensors.k.flatten(0, 1), tensors.v.flatten(0, 1)
        for rows, at, slots, positions in self.each_chunk():
            seen = positions[None] <= at[:, None]
            seen &= positions[None] > at[:, None] - (variant.window or 1 << 40)
            where = torch.from_numpy(slots).to(k.device)
            mask = torch.from_numpy(seen).to(k.device)
            out[rows] = reference(tensors.q[rows], k[where], v[where], mask, variant, tensors.sinks)
        return out


def prefill_case(seed: int, variant: Variant, *, chunks: int, most: int) -> PrefillCase:
    """Chunks under no, one or two prefixes with ragged ends, which some of them share, at any place in their unit."""
    rng = np.random.default_rng(seed)
    pages = PageList(variant.page)
    row_begin, row_end, position, reads = [], [], [], []
    prefix: Entries = []  # what the last chunk read below its unit
    row = 0
    kinds: Counter[str] = Counter()
    for _ in range(int(rng.integers(1, chunks + 1))):
        if rng.random() < 0.6:
            prefix = []
            for _ in range(int(rng.integers(0, 3))):
                prefix = prefix + pages.take(sum(tokens for _, tokens, _ in prefix), int(rng.integers(1, most)))
        else:
            kinds["shared prefix"] += bool(prefix and row_begin)
        start = sum(tokens for _, tokens, _ in prefix)
        earlier = int(rng.integers(0, most)) if rng.random() < 0.5 else 0  # computed in steps before
        rows = int(rng.integers(1, most)) if rng.random() < 0.8 else 1
        # A unit's last page counts as full where it may still grow into it, and may lie ahead of the chunk.
        ahead = int(rng.integers(0, most)) if rng.random() < 0.3 else 0
        own = pages.take(start, earlier + rows + ahead, whole=rng.random() < 0.7)
        row += int(rng.integers(0, 3))
        row_begin.append(row)
        row += rows
        row_end.append(row)
        position.append(start + earlier)
        reads.append(columns(prefix + own))
        kinds["ragged prefix"] += any(tokens < variant.page for _, tokens, _ in prefix)
        kinds["no prefix"] += not prefix
        kinds["resumed"] += earlier > 0
        kinds["pages ahead"] += ahead > variant.page
        kinds["one row"] += rows == 1
        if variant.window is not None:
            kinds["window within the chunk"] += variant.window < rows
            kinds["window beyond the chunk"] += variant.window > rows
            kinds["prefix out of the window"] += 0 < start <= start + earlier + 1 - variant.window
    scattered = rng.permutation(pages.count + 3)
    for entries in reads:
        entries[:, 0] = scattered[entries[:, 0]]
    flat = np.concatenate(reads)
    built = wl.Chunks(
        row_begin=np.array(row_begin),
        row_end=np.array(row_end),
        position=np.array(position),
        page_begin=np.concatenate([[0], np.cumsum([len(entries) for entries in reads])]),
        page=flat[:, 0],
        tokens=flat[:, 1],
        first=flat[:, 2],
    )
    return PrefillCase(variant, built, reads, row + 1, len(scattered), seed, kinds)


def check_prefill(
    kernels: ModuleType, case: PrefillCase, tile: int, device: str, options: dict[str, int] | None = None
) -> dict[str, float]:
    """All chunks in one launch. The error of the kernel against its twin."""
    variant = case.variant
    tensors = case.tensors(device)
    exact = tensors.double()
    work = case.work(tile, capacity=2).to(device)
    beyond = work.items[int(work.count) :]  # would do harm
    beyond.copy_(work.items[:1].expand_as(beyond))
    beyond[:, 2] = 0
    given = {"window": variant.window, "softcap": variant.softcap, "sinks": tensors.sinks, "options": options}
    outputs = []
    for module, made in ((kernels, tensors), (cascade_torch, exact)):
        guarded = torch.full((case.rows + 2 * _GUARD, variant.heads, variant.v_dim), NAN, device=device).to(
            made.q.dtype
        )
        outputs.append(guarded[_GUARD:-_GUARD])
        module.attend_chunks(made.q, made.k, made.v, outputs[-1], work, variant.scale, **given)
        assert guarded[:_GUARD].isnan().all() and guarded[-_GUARD:].isnan().all(), "written out of bounds"
    got, twin = outputs
    want = case.reference(exact)
    assert_near(got, want, variant.dtype, f"prefill, {variant}")
    assert_near(twin, want, torch.float64, f"prefill's twin, {variant}")
    return {"prefill": assert_near(got, twin, variant.dtype, f"prefill, {variant}, against its twin")}
