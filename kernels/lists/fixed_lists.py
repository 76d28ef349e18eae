"""Work lists for attention in parts that end at fixed positions: a row's result depends on no other row.

Keys are cut into parts at multiples of PART positions. A row's parts are folded into its result in the order of their
positions, each computed as if there were no other. So a block may compute one part, or a row's first few and fold them;
what is shared by several rows, how work is divided among blocks, and how many rows there are change no bit. For that,
units begin with a page at a multiple of the page size.

Where a shared prefix ends within a part, its readers go on with that part from what the block of the prefix has stored
of it. That block must have run: tiles are launched from the largest down, and a prefix has a larger tile than what
follows it. Where no larger tile is left, the prefix is read together up to its last whole part.

So may a block that reads all that a row has of its own: it folds the parts before it, goes on, and writes the result.
What is left for the merge are rows whose own keys are divided among several blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .ranges import GATE, GATE_MERGED, Nodes, Readers, Units, nodes_of
from .work_lists import ITEM_FIELDS, MIN_PAGES, WorkLists, ordinals

PART = 256  # positions; a multiple of all page sizes
FIXED_TILES = (16, 64, 128)  # lines of a block: query rows x the heads that share a KV head
_AT_ONCE = (4, 2, 1)  # blocks of each on a multiprocessor
# What blocks need not read of a prefix that is read together must be so many tokens for each line: each line's values
# are written and read once more, in float32. Prompts of many tokens would gain nothing, as they wait for products.
_TOKENS_A_LINE = 8
FINISHED = 1 << 30  # stands beside a row's first part where a block finishes the row: the merge has nothing to do


def build_fixed(
    units: Units,
    readers: Readers,
    lengths: np.ndarray,  # [rows]  positions that each row sees when the lists are made
    *,
    kv_heads: int,
    group: int,  # query heads for each KV head
    page_size: int,
    multiprocessors: int,  # of the device
    window: int | None = None,
    gates: tuple[float, float] = (GATE, GATE_MERGED),
    direct: bool = True,  # False: rows with one part go through the merge, too (it applies sinks)
    share: float | None = None,  # pages for one block; by default a fair share of the blocks that run at once
) -> WorkLists:
    """Lists for ``attend_fixed`` and ``merge_fixed``, in the form of other lists.

    An item's record has its rows; the first of its entries; how many parts before it are folded first; the end of its
    entries; its place among its rows' parts, or -1 where it writes their results; whether lengths bound its reading;
    and the place of the part with which it goes on, or -1.
    """
    assert group <= FIXED_TILES[1], "the heads that share a KV head must fit a tile"
    assert PART % page_size == 0, "a part does not end with a page"
    assert (units.start % page_size == 0).all(), "a unit does not begin with a page of the sequence"
    assert (readers.end > units.start[readers.unit]).all(), "a reader has no keys of its own"
    rows = len(lengths)
    row_begin, row_end, level, low, high, unit, kind, goes_on, is_last, is_own = _ranges(
        units, readers, lengths, group, page_size, window, gates
    )
    low_page, high_page = low // page_size, -(-high // page_size)
    pages = np.maximum(high_page - low_page, 0)  # [ranges]
    entries = _entries(units, unit, low_page, high_page, page_size)

    in_range = row_end - row_begin
    tile_rows = np.array(FIXED_TILES)[kind] // group
    blocks = -(-in_range // tile_rows)
    of_part = PART // page_size  # pages
    first_part = low_page // of_part
    parts = np.where(pages > 0, (high_page - 1) // of_part - first_part + 1, 0)  # [ranges]
    if share is None:
        fair = (pages * blocks).sum() * kv_heads / multiprocessors
        most = np.maximum(MIN_PAGES, fair / np.array(_AT_ONCE)[kind])
    else:
        most = np.full(len(pages), share)
    is_open = ~is_own & (high % PART > 0)  # others go on with its last part
    # The parts that one block may fold.
    folded = np.clip(np.rint(most / of_part).astype(np.int64), 1, np.maximum(parts - is_open, 1))
    finishes = direct & is_last & (folded == parts) & (parts > 0)
    folded = np.where(finishes | _begins(row_begin, row_end, level, pages, rows), folded, 1)
    splits = np.where(parts > 0, parts - folded + 1, 0)  # the first of them has ``folded`` parts, the others one each
    part, in_row = ordinals(row_begin, row_end, level, np.where(finishes, 0, splits - goes_on), rows)
    part -= goes_on  # it takes the place of the part with which it goes on
    row_parts = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(in_row, out=row_parts[1:])
    finished = np.zeros(rows + 1, dtype=np.int64)
    finished[row_begin[finishes]] += 1
    finished[row_end[finishes]] -= 1
    finished = np.cumsum(finished)

    begin = np.cumsum(pages) - pages
    of_tile = {}
    for number, size in enumerate(FIXED_TILES):
        which = np.flatnonzero((kind == number) & (splits > 0))
        if len(which):
            made = (splits * blocks)[which]
            source = np.repeat(which, made)  # [items]
            nth_split, nth_block = np.divmod(
                np.arange(len(source)) - np.repeat(np.cumsum(made) - made, made), blocks[source]
            )
            row = row_begin[source] + nth_block * tile_rows[source]
            part_from = first_part[source] + np.where(nth_split > 0, folded[source] - 1 + nth_split, 0)
            part_to = first_part[source] + folded[source] + nth_split
            records = np.zeros((len(source), ITEM_FIELDS), dtype=np.int32)
            records[:, 0] = row
            records[:, 1] = np.minimum(tile_rows[source], row_end[source] - row)
            offset = begin[source] - low_page[source]
            records[:, 2] = offset + np.maximum(part_from * of_part, low_page[source])
            records[:, 3] = np.where(finishes[source], part[source], 0)
            records[:, 4] = offset + np.minimum(part_to * of_part, high_page[source])
            only = direct & (in_row[row] == 1) & (finished[row] == 0) & ~is_open[source]
            records[:, 5] = np.where(finishes[source] | only, -1, part[source] + nth_split)
            records[:, 6] = is_own[source]
            records[:, 7] = np.where(goes_on[source] & (nth_split == 0), part[source], -1)
            of_tile[size] = records[np.argsort(records[:, 2] - records[:, 4], kind="stable")]  # longest first

    merges = not direct or bool(((in_row != 1) & (finished[:-1] == 0)).any())
    # Partial results of thousands of rows take much memory: none where each row is written by one block.
    work = WorkLists.room(
        rows=rows,
        items={size: len(records) for size, records in of_tile.items()},
        entries=max(1, len(entries)),
        parts=int(row_parts[-1]) if merges or (goes_on | (finishes & (part > 0))).any() else 0,
        device="cpu",
        direct=direct,
    )
    work.merges = merges
    for size, records in of_tile.items():
        work.items[size].numpy()[: len(records)] = records
        work.counts[size].fill_(len(records))
    work.row_parts.numpy()[:] = row_parts + FINISHED * finished
    work.entries.numpy()[: len(entries), :3] = entries
    return work


class _Ranges(NamedTuple):
    """Nodes that pay, then all readers. All fields have a number for each."""

    row_begin: np.ndarray
    row_end: np.ndarray
    level: np.ndarray  # those of one level share no row
    low: np.ndarray  # positions [low, high) are read
    high: np.ndarray
    unit: np.ndarray  # the innermost
    kind: np.ndarray  # which of the tiles
    goes_on: np.ndarray  # bool: with the last part of a range around it
    is_last: np.ndarray  # bool: its rows read nothing else later, and all before it is launched earlier
    is_own: np.ndarray  # bool: a reader's


def _ranges(
    units: Units,
    readers: Readers,
    lengths: np.ndarray,
    group: int,
    page_size: int,
    window: int | None,
    gates: tuple[float, float],
) -> _Ranges:
    nodes = nodes_of(units, readers)
    end_of_rows = readers.row + readers.rows
    sees_from = np.zeros(len(readers.unit), dtype=np.int64)  # [readers]  the first row, as the lists are made
    if window is not None:
        sees_from = np.maximum(lengths[readers.row] - window, 0)
    sees_from -= sees_from % page_size
    whole, kind = _together(nodes, readers, group)  # [nodes]
    saved = _saved(nodes, readers, FIXED_TILES[-1] // group, group)
    mine, read, low = _kept(nodes, whole, sees_from, saved, gates)
    read_before = np.append(read, 0)  # -1, for none, finds the 0
    smallest = np.full(len(nodes) + 1, len(FIXED_TILES))  # tile of a node's range and those around it [nodes, and none]
    is_kept = np.zeros(len(nodes), dtype=bool)
    is_kept[mine] = True
    for level in range(nodes.levels):
        at = np.flatnonzero(nodes.level == level)
        smallest[at] = np.minimum(smallest[nodes.parent[at]], np.where(is_kept[at], kind[at], len(FIXED_TILES)))
    of_readers = _kinds(readers.rows, group)
    of_node, of_reader = read_before[nodes.parent[mine]], read_before[nodes.of_reader]
    low = np.concatenate([low[mine], np.maximum(of_reader, sees_from)])
    before = np.concatenate([of_node, of_reader])
    is_own = np.arange(len(low)) >= len(mine)
    return _Ranges(
        np.concatenate([readers.row[nodes.first[mine]], readers.row]),
        np.concatenate([end_of_rows[nodes.end[mine] - 1], end_of_rows]),
        np.concatenate([nodes.level[mine], np.full(len(readers.unit), nodes.levels, dtype=np.int64)]),
        low,
        np.concatenate([whole[mine], readers.end]),
        np.concatenate([nodes.unit[mine], readers.unit]),
        np.concatenate([kind[mine], of_readers]),
        (low == before) & (before % PART > 0),
        np.concatenate([np.zeros(len(mine), dtype=bool), smallest[nodes.of_reader] > of_readers]),
        is_own,
    )


def _kinds(rows: np.ndarray, group: int) -> np.ndarray:
    """Which of the tiles so many rows fill."""
    return np.searchsorted(FIXED_TILES[:-1], rows * group)


def _together(nodes: Nodes, readers: Readers, group: int) -> tuple[np.ndarray, np.ndarray]:
    """The position up to which a node is read together, and its tile [nodes].

    Others go on from there only if there is a tile for it that is larger than all of theirs.
    """
    rows = np.append(0, np.cumsum(readers.rows))
    kind = _kinds(rows[nodes.end] - rows[nodes.first], group)
    upto = nodes.upto - nodes.upto % PART
    below = np.zeros(len(nodes) + 1, dtype=np.int64)  # the largest tile of what follows a node; the last one is for -1
    np.maximum.at(below, nodes.of_reader, _kinds(readers.rows, group))
    for level in reversed(range(nodes.levels)):
        mine = np.flatnonzero(nodes.level == level)
        larger = np.maximum(kind[mine], below[mine] + 1)
        can = larger < len(FIXED_TILES)
        upto[mine] = np.where(can, nodes.upto[mine], upto[mine])
        kind[mine] = np.where(can, larger, kind[mine])
        np.maximum.at(below, nodes.parent[mine], np.maximum(kind[mine], below[mine]))
    return upto, kind


def _saved(
    nodes: Nodes, readers: Readers, rows_of_a_tile: int, group: int
) -> tuple[np.ndarray, np.ndarray]:  # both [nodes]
    """The share of a node that its readers' blocks do not read if they read it together; and the blocks that need not
    read it, for each line."""
    blocks = np.append(0, np.cumsum(-(-readers.rows // rows_of_a_tile)))
    rows = np.append(0, np.cumsum(readers.rows))
    here = rows[nodes.end] - rows[nodes.first]
    alone = blocks[nodes.end] - blocks[nodes.first]
    less = alone - -(-here // rows_of_a_tile)
    return less / np.maximum(alone, 1), less / np.maximum(here * group, 1)


def _kept(
    nodes: Nodes,
    whole: np.ndarray,
    sees_from: np.ndarray,
    saved: tuple[np.ndarray, np.ndarray],
    gates: tuple[float, float],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The nodes that become ranges; up to where each node, or one around it, is read by a range [nodes]; and from where
    a node's range reads [nodes]."""
    share, for_each_line = saved
    seen = np.zeros(len(nodes), dtype=np.int64)
    if len(nodes):
        bounds = np.stack([nodes.first, nodes.end], axis=1).ravel()
        seen = np.minimum.reduceat(np.append(sees_from, 0), bounds)[::2]
    read, low = np.zeros(len(nodes), dtype=np.int64), np.zeros(len(nodes), dtype=np.int64)
    kept, merged = np.zeros(len(nodes), dtype=bool), np.zeros(len(nodes), dtype=bool)
    for level in range(nodes.levels):
        mine = np.flatnonzero(nodes.level == level)
        above = nodes.parent[mine] if level else np.full(len(mine), -1)
        there = above >= 0
        before = np.where(there, read[above], 0)
        merged[mine] = there & merged[above]
        low[mine] = np.maximum(before, seen[mine])
        gate = np.where(merged[mine], gates[1], gates[0])
        size = whole[mine] - low[mine]
        kept[mine] = (size > 0) & (size * share[mine] >= gate) & (size * for_each_line[mine] >= _TOKENS_A_LINE)
        merged[mine] |= kept[mine]
        read[mine] = np.where(kept[mine], whole[mine], before)
    return np.flatnonzero(kept), read, low


def _entries(
    units: Units,
    unit: np.ndarray,  # [ranges]  the innermost
    low_page: np.ndarray,  # [ranges]  counted from the sequence's first
    high_page: np.ndarray,
    page_size: int,
) -> np.ndarray:  # [entries, 3]  page, tokens, position of the first
    """The pages of each range, in order of position."""
    pages = np.maximum(high_page - low_page, 0)
    begin = np.cumsum(pages) - pages
    made = np.empty((int(pages.sum()), 3), dtype=np.int64)
    nth = np.arange(len(made)) - np.repeat(begin, pages)
    made[:, 1] = page_size
    made[:, 2] = (nth + np.repeat(low_page, pages)) * page_size
    which, unit, stop = np.flatnonzero(pages > 0), unit[pages > 0], high_page[pages > 0]
    while len(which):
        start = np.minimum(units.start[unit] // page_size, stop)
        first = np.maximum(start, low_page[which])
        count = np.maximum(stop - first, 0)
        at = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        place = np.repeat(begin[which] + first - low_page[which], count) + at
        of_unit = np.repeat(units.page_begin[unit] + first - units.start[unit] // page_size, count) + at
        assert (of_unit < np.repeat(units.page_begin[unit + 1], count)).all(), "a unit lacks pages"
        made[place, 0] = units.page[of_unit]
        more = start > low_page[which]
        which, stop, unit = which[more], start[more], units.base[unit[more]]
    return made


def _begins(
    row_begin: np.ndarray, row_end: np.ndarray, level: np.ndarray, pages: np.ndarray, rows: int
) -> np.ndarray:  # [ranges] bool
    """Which ranges have the first part of all of their rows: only those are folded from nothing."""
    first = np.full(rows, np.iinfo(np.int64).max)
    for at in range(int(level.max(initial=-1)), -1, -1):
        mine = np.flatnonzero((level == at) & (pages > 0))
        inside = np.zeros(rows + 1, dtype=np.int64)
        inside[row_begin[mine]] += 1
        np.add.at(inside, row_end[mine], -1)
        first[np.cumsum(inside)[:rows] > 0] = at
    return np.asarray(first[row_begin] == level) if rows else np.zeros(len(level), dtype=bool)
