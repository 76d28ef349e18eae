"""Attention problems: how batches are written, which rows read which tokens, their floor, and their inputs.

Decode, one token for each row: ``16x16:2000+250`` is groups x rows : tokens that a group shares + own tokens of each
row. A ``~`` at the end draws each of these lengths between 0.2 and 1.8 times as much. ``2000/32x8:100+250`` puts 2,000
tokens in front that all rows share. ``random:40`` is 40 groups of 1 to 64 rows, with 100 to 8,000 shared and 20 to 500
own tokens; ``random:40@7`` draws them with another seed.

Prefill, causal: ``4x2048`` is chunks x rows; ``4x2000+16x200`` adds members x rows that read each chunk as their prefix
in the same step; ``1x2048@6144`` puts tokens of earlier steps before each chunk.

**The floor** is the least time that a kernel can take on this GPU. It is the larger of two times: the bytes of K and V,
each token once however many rows read it, at the rate of a copy; and the operations at the sustained rate of large
matrix products. Operations are 4 x heads x dim for each (row, key) pair that counts: a product and a sum for the score,
and again for the value. Both rates are measured in the same run. Queries, outputs and partial results do not count.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import common
import numpy as np
import torch

from hf_batchllm.bench.floor import Rates, measure_rates
from hf_batchllm.kernels.lists.ranges import GATE, GATE_MERGED, Readers, Units, make_chunks, make_ranges
from hf_batchllm.kernels.lists.work_lists import Chunks, Ranges

PAGE = 64
TOLERANCE = 8e-3  # bfloat16 weights and output against float32
EVERY, NEVER = 1e-9, np.inf  # gates that make every shared prefix a segment, and none


def operations(pairs: int, heads: int, dim: int) -> int:
    return 4 * heads * dim * pairs


def unique_bytes(tokens: int, kv_heads: int, dim: int) -> int:
    """Bytes of K and V in bfloat16."""
    return 2 * 2 * kv_heads * dim * tokens


def floor_ms(moved: int, computed: int, copy: float, matmul: float) -> float:
    return 1e3 * max(moved / copy, computed / matmul)


@dataclass(frozen=True)
class Batch:
    """Query rows over units of tokens, whose pages lie scattered over the cache."""

    name: str
    tokens: np.ndarray  # [units]
    base: np.ndarray  # [units]  the unit before each, or -1
    start: np.ndarray  # [units]  position of its first token
    readers: Readers
    prefixes: np.ndarray  # [groups]  tokens that all readers of a group see, in a decode batch
    degrees: np.ndarray  # [groups]  readers

    def __str__(self) -> str:
        return self.name

    @property
    def total_rows(self) -> int:
        return int(self.readers.rows.sum())

    @property
    def shares(self) -> bool:
        return bool(((self.degrees > 1) & (self.prefixes > 0)).any())

    @property
    def lengths(self) -> np.ndarray:  # [readers]
        return self.readers.end

    @property
    def unique_tokens(self) -> int:
        return int(self.tokens.sum())

    @property
    def pairs(self) -> int:
        """(row, key) pairs that causality needs."""
        rows = self.readers.rows
        return int((rows * (self.lengths - rows) + rows * (rows + 1) // 2).sum())

    @property
    def pages(self) -> int:
        return len(self.units.page)

    @cached_property
    def units(self) -> Units:
        begin = np.concatenate([[0], np.cumsum(-(-self.tokens // PAGE))])
        page = np.random.default_rng(0).permutation(int(begin[-1]))
        return Units(base=self.base, start=self.start, page_begin=begin, page=page)

    @cached_property
    def layout(self) -> Chunks:
        return make_chunks(self.units, self.readers, page_size=PAGE)

    @cached_property
    def slots(self) -> list[np.ndarray]:
        """The slots of the cache that each reader's last row sees, in order of position."""
        chunks, at, found = self.layout, np.arange(PAGE), []
        for i, end in enumerate(self.lengths):
            mine = slice(chunks.page_begin[i], chunks.page_begin[i + 1])
            seen = (at < chunks.tokens[mine, None]) & (chunks.first[mine, None] + at < end)
            found.append((chunks.page[mine, None] * PAGE + at)[seen])
        return found

    def ranges(self, gate: float = GATE, gate_merged: float = GATE_MERGED, window: int | None = None) -> Ranges:
        return make_ranges(self.units, self.readers, page_size=PAGE, window=window, gate=gate, gate_merged=gate_merged)


def decode_of(name: str, degrees: np.ndarray, shared: np.ndarray, own: np.ndarray, outer: int = 0) -> Batch:
    """One unit for all rows (``outer`` tokens), one for each group (degrees, shared), one for each row (own)."""
    groups, row = len(degrees), np.arange(len(own))
    lengths = outer + np.repeat(shared, degrees) + own
    return Batch(
        name=name,
        tokens=np.concatenate([[outer], shared, own]),
        base=np.concatenate([[-1], np.full(groups, 0 if outer else -1), 1 + np.repeat(np.arange(groups), degrees)]),
        start=np.concatenate([[0], np.full(groups, outer), lengths - own]),
        readers=Readers(1 + groups + row, row, np.ones_like(row), lengths),
        prefixes=outer + shared,
        degrees=degrees,
    )


def decode_batch(text: str) -> Batch:
    if drawn := re.fullmatch(r"random:(\d+)(?:@(\d+))?", text):
        rng, groups = np.random.default_rng(int(drawn[2] or 0)), int(drawn[1])
        degrees, shared = rng.integers(1, 65, groups), rng.integers(100, 8001, groups)
        return decode_of(text, degrees, shared, rng.integers(20, 501, int(degrees.sum())))
    found = re.fullmatch(r"(?:(\d+)/)?(\d+)x(\d+):(\d+)\+(\d+)(~?)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not GROUPSxROWS:SHARED+OWN, with OUTER/ before or ~ after it, or random:GROUPS[@SEED]"
        )
    outer, groups, rows, shared, own = (int(number or 0) for number in found.groups()[:5])
    spread = np.random.default_rng(1).uniform(0.2, 1.8, groups + groups * rows)
    if not found[6]:
        spread[:] = 1
    of_groups, of_rows = spread[:groups] * shared, np.maximum(1, spread[groups:] * own)
    return decode_of(text, np.full(groups, rows), of_groups.astype(np.int64), of_rows.astype(np.int64), outer)


def prefill_batch(text: str) -> Batch:
    found = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+)x(\d+))?(?:@(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not CHUNKSxROWS, with +MEMBERSxROWS or @EARLIER after it")
    chunks, rows, members, member_rows, earlier = (int(number or 0) for number in found.groups())
    of_members, upper = np.repeat(np.arange(chunks), members), earlier + rows
    queries = np.repeat([rows, member_rows], [chunks, len(of_members)])
    start = np.repeat([0, upper], [chunks, len(of_members)])
    ends = np.where(start, upper + member_rows, upper)
    nothing = np.zeros(0, dtype=np.int64)
    return Batch(
        name=text,
        tokens=ends - start,
        base=np.concatenate([np.full(chunks, -1), of_members]),
        start=start,
        readers=Readers(np.arange(len(queries)), np.cumsum(queries) - queries, queries, ends),
        prefixes=nothing,
        degrees=nothing,
    )


@dataclass
class Problem:
    """A batch with queries and several caches; rivals get the same."""

    batch: Batch
    q: torch.Tensor  # [rows, heads, dim]
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # each [pages, PAGE, kv_heads, dim]
    want: torch.Tensor  # [rows, heads, dim]  of the first cache
    window: int | None = None

    @classmethod
    def make(cls, batch: Batch, heads: int, kv_heads: int, dim: int, caches: int, window: int | None = None) -> Problem:
        q = common.randn(batch.total_rows, heads, dim)
        pairs = [(common.randn(batch.pages, PAGE, kv_heads, dim), common.randn(batch.pages, PAGE, kv_heads, dim))
                 for _ in range(caches)]  # fmt: skip
        return cls(batch, q, pairs, reference(batch, q, *pairs[0], window), window)

    @property
    def kv_heads(self) -> int:
        return self.caches[0][0].shape[2]

    @property
    def dim(self) -> int:
        return self.q.shape[2]

    @property
    def least(self) -> tuple[int, int]:
        """Bytes that must be moved, and operations."""
        moved = unique_bytes(self.batch.unique_tokens, self.kv_heads, self.dim)
        return moved, operations(self.batch.pairs, self.q.shape[1], self.dim)

    def check(self, got: torch.Tensor) -> float:
        """The relative error, which must be that of weights and outputs in bfloat16."""
        error = float((got.float() - self.want).norm() / self.want.norm())
        if not error < TOLERANCE:
            raise ValueError(f"its result is wrong: relative error {error:.1e}")
        return error


def reference(batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """[rows, heads, dim] in float32."""
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # [slots, kv_heads, dim]
    out, group, device = [], q.shape[1] // k.shape[1], q.device
    for queries, slots in zip(q.split(batch.readers.rows.tolist()), batch.slots, strict=True):
        places = torch.from_numpy(slots).to(device)
        keys, values = k[places].float(), v[places].float()
        at = torch.arange(len(slots), device=device)
        for some, position in zip(queries.split(1024), at[-len(queries) :].split(1024), strict=True):
            scaled = some.float().unflatten(1, (-1, group)) * q.shape[2] ** -0.5
            scores = torch.einsum("rhgd,khd->rhgk", scaled, keys)
            unseen = at > position[:, None]
            if window is not None:
                unseen |= at <= position[:, None] - window
            scores.masked_fill_(unseen[:, None, None], float("-inf"))
            out.append(torch.einsum("rhgk,khd->rhgd", scores.softmax(-1), values).flatten(1, 2))
    return torch.cat(out)


def read(about: str | None, arguments: Sequence[str] | None, rivals: str, names: Iterable[str], replays: int,
         **more: Mapping[str, Any]) -> tuple[argparse.Namespace, Rates]:  # fmt: skip
    """The options of the scripts that time attention, and the rates of the machine. ``rivals``: the default."""
    flags = {**more, "--rivals": {"default": rivals, "help": f"a list of {', '.join(names)}; none; or all"}}
    asked = common.read(
        about, arguments, flags, on="gpu", figures=True, heads=(32, "query heads"), kv_heads=(8, "KV heads"),
        dim=(128, "of a head"), caches=(3, "that a graph goes over"), replays=(replays, "of each graph"),
    )  # fmt: skip
    torch.manual_seed(0)
    rates = measure_rates(torch.device("cuda"), torch.bfloat16)
    common.warm_branches()
    print(f"{common.card()}: {rates}; {asked.heads} / {asked.kv_heads} heads of {asked.dim}")
    return asked, rates
