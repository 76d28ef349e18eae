"""Work lists: what the attention kernels of a step are to do, made on the host in NumPy.

For decode rows a step is cut into *ranges*: some rows (neighbours in the batch) against the pages that they all read,
be it a shared prefix or what one row owns. For prompts it is *chunks*: rows at consecutive positions of one unit
against their whole page table. Both become *items*: what one block for each KV head does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

TILES = (16, 64)  # lines of a decode tile: query rows x the heads that share a KV head
ITEM_FIELDS = 8  # row, rows, begin, full, end, part, causal, and a spare: a record is one 32-byte sector
CHUNK_FIELDS = 12  # row, rows, position, short, shorts, rest, full_from, full_to, pages, and three spare
ENTRY_FIELDS = 4  # page, tokens, first, and one spare
BLOCKS, MIN_PAGES = {16: 4, 64: 2}, 4  # to split: blocks for each multiprocessor, but no items below so many pages


@dataclass(frozen=True)
class Ranges:
    """Which rows read which pages together. Ranges nest: of one ``level``, no two share a row.

    All rows of a range see all of it, unless it is a single row, or ``causal``: a few rows at consecutive positions of
    one unit, each of which sees as far as its length.
    """

    row_begin: np.ndarray  # [ranges]
    row_end: np.ndarray  # [ranges]
    level: np.ndarray  # [ranges]
    page_begin: np.ndarray  # [ranges + 1]  a range's pages are [page_begin[i], page_begin[i + 1])
    page: np.ndarray  # [pages]
    tokens: np.ndarray  # [pages]  valid ones; all of the page where the unit may still grow into it
    first: np.ndarray  # [pages]  position of the page's first token; a range may have holes in position
    causal: np.ndarray | None = None  # [ranges] bool; None: none of them is


@dataclass(frozen=True)
class WorkLists:
    """One step's work, for all layers that attend in the same way."""

    items: dict[int, torch.Tensor]  # of each tile: [capacity, ITEM_FIELDS] int32, longest first
    counts: dict[int, torch.Tensor]  # of each tile: [1] int32, the items that there are
    entries: torch.Tensor  # [entries, ENTRY_FIELDS] int32
    row_parts: torch.Tensor  # [rows + 1] int32  row i's partial results are [row_parts[i], row_parts[i + 1])
    parts: int  # partial results in all
    merges: bool  # False where no row has more than one part
    causal: bool  # whether some item has several rows that do not all see the same

    def to(self, device: torch.device | str) -> WorkLists:
        return replace(
            self,
            items={tile: items.to(device) for tile, items in self.items.items()},
            counts={tile: count.to(device) for tile, count in self.counts.items()},
            entries=self.entries.to(device),
            row_parts=self.row_parts.to(device),
        )


def build_work(
    ranges: Ranges,
    lengths: np.ndarray,  # [rows]  how many positions each row sees as the lists are made
    *,
    kv_heads: int,
    group: int,  # query heads for each KV head
    page_size: int,
    multiprocessors: int,  # of the device
    most_pages: int | None = None,  # for one item; by default a fair share of what runs at once
    window: int | None = None,
    ahead: int = 0,  # with a window: the lists must hold until the rows have grown by this much
    capacity: int = 1,  # room in each list for this many times its items (a graph's bucket)
    direct: bool = True,  # False: rows with one part go through the merge too (sinks are applied there)
) -> WorkLists:
    rows, count = len(lengths), len(ranges.row_begin)
    assert group <= TILES[-1], "the heads that share a KV head must fit a tile"
    owner = np.repeat(np.arange(count), np.diff(ranges.page_begin))  # [pages]
    bounds = np.stack([ranges.row_begin, ranges.row_end], axis=1).ravel()
    padded = np.append(lengths, lengths[-1])  # reduceat takes no index past the end
    shortest = np.minimum.reduceat(padded, bounds)[::2][owner]  # [pages]
    longest = np.maximum.reduceat(padded, bounds)[::2][owner]
    masked = (ranges.tokens < page_size) | (ranges.first + page_size > shortest)
    if window is not None:
        masked |= ranges.first < longest + ahead - window  # not all rows see all of it
    # Keys may come in any order: full pages stand first, so that the loop over them needs no masks.
    order = np.lexsort((masked, owner))
    if window is not None:
        order = order[(ranges.first + ranges.tokens > shortest - window)[order]]  # some row sees some of it
    entries = np.zeros((max(1, len(order)), ENTRY_FIELDS), dtype=np.int32)
    for field, values in enumerate((ranges.page, ranges.tokens, ranges.first)):
        entries[: len(order), field] = values[order]
    pages = np.bincount(owner[order], minlength=count)
    begin = np.cumsum(pages) - pages
    full = begin + pages - np.bincount(owner[order], weights=masked[order], minlength=count).astype(np.int64)

    in_range = ranges.row_end - ranges.row_begin
    tile = np.where(in_range * group <= TILES[0], TILES[0], TILES[1])  # [ranges]
    tile_rows = tile // group
    blocks = -(-in_range // tile_rows)
    if most_pages is None:
        slots = multiprocessors * np.where(tile == TILES[0], *BLOCKS.values())  # [ranges]
        share = np.maximum(MIN_PAGES, (pages * blocks).sum() * kv_heads / slots)
        splits = np.maximum(np.rint(pages / share), pages > 0).astype(np.int64)  # [ranges]
    else:
        splits = -(-pages // most_pages)
    part, in_row = _ordinals(ranges, splits, rows)
    row_parts = np.concatenate([[0], np.cumsum(in_row)]).astype(np.int32)

    # One item for each block of rows and each split of a range.
    made = splits * blocks
    source = np.repeat(np.arange(count), made)  # [items]
    index = np.arange(len(source)) - np.repeat(np.cumsum(made) - made, made)
    nth_split, nth_block = index // blocks[source], index % blocks[source]  # blocks of the same keys are neighbours
    records = np.zeros((len(source), ITEM_FIELDS), dtype=np.int32)
    row = ranges.row_begin[source] + nth_block * tile_rows[source]
    records[:, 0] = row
    records[:, 1] = np.minimum(tile_rows[source], ranges.row_end[source] - row)
    records[:, 2] = begin[source] + pages[source] * nth_split // splits[source]
    records[:, 4] = begin[source] + pages[source] * (nth_split + 1) // splits[source]
    records[:, 3] = np.clip(full[source], records[:, 2], records[:, 4])
    records[:, 5] = np.where(direct & (in_row[row] == 1), -1, part[source] + nth_split)
    causal = ranges.causal is not None and bool(ranges.causal.any())
    if causal:
        records[:, 6] = ranges.causal[source]
    items, counts = {}, {}
    for size in TILES:
        mine = records[tile[source] == size]
        if len(mine):
            padded = np.zeros((capacity * len(mine), ITEM_FIELDS), dtype=np.int32)
            padded[: len(mine)] = mine[np.argsort(mine[:, 2] - mine[:, 4], kind="stable")]  # longest first
            items[size] = torch.from_numpy(padded)
            counts[size] = torch.tensor([len(mine)], dtype=torch.int32)
    merges = not direct or bool((in_row != 1).any())
    return WorkLists(
        items, counts, torch.from_numpy(entries), torch.from_numpy(row_parts), int(row_parts[-1]), merges, causal
    )


def _ordinals(ranges: Ranges, splits: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The place of each range's first part among its rows' parts [ranges]; how many parts each row has [rows]."""
    part = np.zeros(len(splits), dtype=np.int64)
    in_row = np.zeros(rows, dtype=np.int64)
    for level in np.unique(ranges.level):
        mine = ranges.level == level
        part[mine] = in_row[ranges.row_begin[mine]]
        steps = np.zeros(rows + 1, dtype=np.int64)
        np.add.at(steps, ranges.row_begin[mine], splits[mine])
        np.add.at(steps, ranges.row_end[mine], -splits[mine])
        in_row += np.cumsum(steps)[:rows]
    return part, in_row


@dataclass(frozen=True)
class Chunks:
    """Which rows are computed, and which pages each of them reads."""

    row_begin: np.ndarray  # [chunks]
    row_end: np.ndarray  # [chunks]
    position: np.ndarray  # [chunks]  of the first row; the others follow
    page_begin: np.ndarray  # [chunks + 1]  a chunk's pages are [page_begin[i], page_begin[i + 1])
    page: np.ndarray  # [pages]
    tokens: np.ndarray  # [pages]  valid ones; all of the page where the unit may still grow into it
    first: np.ndarray  # [pages]  position of the page's first token; ascends within a chunk


@dataclass(frozen=True)
class PrefillWork:
    """One step's work, for all layers that attend in the same way."""

    items: torch.Tensor  # [capacity, CHUNK_FIELDS] int32, longest first
    count: torch.Tensor  # [1] int32, the items that there are
    entries: torch.Tensor  # [entries, ENTRY_FIELDS] int32
    tile: int  # lines: query rows x the heads that share a KV head

    def to(self, device: torch.device | str) -> PrefillWork:
        return replace(self, items=self.items.to(device), count=self.count.to(device), entries=self.entries.to(device))


def build_prefill(
    chunks: Chunks,
    *,
    group: int,  # query heads for each KV head
    page_size: int,
    tile: int,
    window: int | None = None,
    capacity: int = 1,  # room for this many times the items (a graph's bucket)
) -> PrefillWork:
    assert group <= tile, "the heads that share a KV head must fit a tile"
    count = len(chunks.row_begin)
    owner = np.repeat(np.arange(count), np.diff(chunks.page_begin))  # [pages]

    # One item for each block of rows; its rows stand at the positions from ``low`` to ``high``.
    tile_rows = tile // group
    made = -(-(chunks.row_end - chunks.row_begin) // tile_rows)
    chunk = np.repeat(np.arange(count), made)  # [items]
    offset = (np.arange(len(chunk)) - np.repeat(np.cumsum(made) - made, made)) * tile_rows
    row = chunks.row_begin[chunk] + offset
    rows = np.minimum(tile_rows, chunks.row_end[chunk] - row)
    low = chunks.position[chunk] + offset
    high = low + rows - 1
    reach = window or int(high.max(initial=0)) + 1
    low_from, high_from = np.maximum(0, low - reach + 1), np.maximum(0, high - reach + 1)  # what these rows see first

    ends = chunks.first + chunks.tokens
    stride = int(max(ends.max(initial=0), high.max(initial=0))) + 2

    def pages_upto(which: np.ndarray, at: np.ndarray, last: np.ndarray) -> np.ndarray:
        """How many pages of those with ``at <= last`` there are, for each item; all of earlier chunks' among them."""
        return np.searchsorted((owner * stride + at)[which], chunk * stride + last, side="right")

    # Keys may come in any order. Partly filled pages stand apart: what all rows of a tile see whole is then one run.
    short = chunks.tokens < page_size
    shorts_begin = pages_upto(short, ends, low_from)
    shorts = pages_upto(short, chunks.first, high) - shorts_begin
    begin = pages_upto(~short, ends, low_from)
    full_end = pages_upto(~short, ends, low + 1)
    full_begin = np.minimum(pages_upto(~short, chunks.first, high_from - 1), full_end)
    pages = shorts + pages_upto(~short, chunks.first, high) - begin
    rest = begin - shorts + int(short.sum())  # the place of a page that is not short, less its number in the item
    full_from, full_to = shorts + full_begin - begin, shorts + full_end - begin
    entries = np.zeros((max(1, len(owner)), ENTRY_FIELDS), dtype=np.int32)
    for field, values in enumerate((chunks.page, chunks.tokens, chunks.first)):
        entries[: len(owner), field] = np.concatenate([values[short], values[~short]])
    items = np.zeros((capacity * len(chunk), CHUNK_FIELDS), dtype=np.int32)
    longest_first = np.argsort(-pages, kind="stable")
    for field, values in enumerate((row, rows, low, shorts_begin, shorts, rest, full_from, full_to, pages)):
        items[: len(chunk), field] = values[longest_first]
    return PrefillWork(
        torch.from_numpy(items), torch.tensor([len(chunk)], dtype=torch.int32), torch.from_numpy(entries), tile
    )
