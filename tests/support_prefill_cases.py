"""Random chunks of prompts for the prefill kernel and its reference, and what must come of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from support_attention_cases import (
    GUARD,
    NAN,
    Entries,
    PageList,
    Tensors,
    Variant,
    assert_near,
    columns,
    random_tensors,
    reference,
    tokens_of,
)

from hf_batchllm.kernels.lists import work_lists as wl
from hf_batchllm.kernels.reference import prefill_torch


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
        """Rows, their positions, slots and positions of the tokens that stand in pages of which they see some."""
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
            sees_to = at + 1 if self.chunks.sees_to is None else self.chunks.sees_to[rows]
            seen = positions[None] < sees_to[:, None]
            seen &= positions[None] > at[:, None] - (variant.window or 1 << 40)
            where = torch.from_numpy(slots).to(k.device)
            mask = torch.from_numpy(seen).to(k.device)
            out[rows] = reference(tensors.q[rows], k[where], v[where], mask, variant, tensors.sinks)
        return out


def prefill_case(seed: int, variant: Variant, *, chunks: int, most: int, two_way: bool = False) -> PrefillCase:
    """Chunks under no, one or two prefixes with ragged ends, which some of them share, at any place in their unit.

    ``two_way``: with runs of rows in them that see all of the run, as tokens of an image do in some models.
    """
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
    if two_way:
        built = replace(built, sees_to=_with_runs(built, row + 1, rng, kinds))
    return PrefillCase(variant, built, reads, row + 1, len(scattered), seed, kinds)


def _with_runs(chunks: wl.Chunks, rows: int, rng: np.random.Generator, kinds: Counter[str]) -> np.ndarray:
    """Up to where each row of the batch sees; 0 for rows of no chunk."""
    sees_to = np.zeros(rows, dtype=np.int64)
    for begin, end, first in zip(chunks.row_begin, chunks.row_end, chunks.position, strict=True):
        sees_to[begin:end] = np.arange(first, first + end - begin) + 1
        row = int(begin)
        while row < end:
            run = min(int(rng.integers(1, 40)), int(end) - row)
            if rng.random() < 0.5:
                sees_to[row : row + run] = first + row - begin + run
                kinds["runs"] += run > 1
                kinds["runs to the end"] += run > 1 and row + run == end
            row += run
    return sees_to


def check_prefill(
    kernels: ModuleType,
    case: PrefillCase,
    tile: int,
    device: str,
    options: dict[str, int] | None = None,
    *,
    references_on: str | None = None,
    guard: int = GUARD,
) -> dict[str, float]:
    """All chunks in one launch. The error of the kernel against its reference.

    Without a guard the output ends where its memory ends, so that a sanitizer sees what goes beyond.
    """
    variant, here = case.variant, references_on or device
    tensors = case.tensors(here)
    exact = tensors.to(torch.float64)
    work = case.work(tile, capacity=2)
    beyond = work.items[int(work.count) :]  # would do harm
    beyond.copy_(work.items[:1].expand_as(beyond))
    beyond[:, 2] = 0
    outputs = []
    for module, given, at in ((kernels, tensors.to(device), device), (prefill_torch, exact, here)):
        shape = (case.rows + 2 * guard, variant.heads, variant.v_dim)
        guarded = torch.full(shape, NAN, dtype=given.q.dtype, device=at)
        out = guarded[guard : len(guarded) - guard]
        module.attend_chunks(
            given.q, given.k, given.v, out, work.to(at), variant.scale,
            window=variant.window, softcap=variant.softcap, sinks=given.sinks, options=options,
        )  # fmt: skip
        around = torch.cat([guarded[:guard], guarded[len(guarded) - guard :]])
        assert around.isnan().all(), "written out of bounds"
        outputs.append(out.to(here))
    got, reference = outputs
    want = case.reference(exact)
    assert_near(got, want, variant.dtype, f"prefill, {variant}")
    assert_near(reference, want, torch.float64, f"prefill's reference, {variant}")
    return {"prefill": assert_near(got, reference, variant.dtype, f"prefill, {variant}, against its reference")}
