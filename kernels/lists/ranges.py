"""From units and their readers to the ranges and chunks of which work lists are made.

A *unit* is a run of tokens with pages of its own. It stands on a base, which holds the tokens before it; the base may
be longer than the part that the unit reads. A *reader* is a run of rows of one unit: a decode row, or a few rows of a
prompt. Readers of the same prefix that are neighbours in the batch make a *node*, and nodes nest as prefixes do. A node
that pays becomes a range of its own: its K and V are read once for all of its rows. Any other node is joined to the
ranges of the nodes and readers inside it. Loops here go over the levels of the tree, never over rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .work_lists import Chunks, Ranges

# A node becomes a range if it saves at least so many tokens: its tokens times (readers - 1) / readers. The first limit
# holds where this range makes a merge of its rows necessary, the second where they are merged anyway.
GATE, GATE_MERGED = 136, 40


@dataclass(frozen=True)
class Units:
    base: np.ndarray  # [units]  the unit below, -1 for none
    start: np.ndarray  # [units]  position of the first token; the base is read up to it
    page_begin: np.ndarray  # [units + 1]  a unit's pages are [page_begin[i], page_begin[i + 1])
    page: np.ndarray  # [pages]


@dataclass(frozen=True)
class Readers:
    """Runs of rows of one unit each, in the order of the batch."""

    unit: np.ndarray  # [readers]
    row: np.ndarray  # [readers]  the first row's place in the batch
    rows: np.ndarray  # [readers]  number of rows, at consecutive positions
    end: np.ndarray  # [readers]  positions that the last row sees, at most, while the lists are in use


@dataclass(frozen=True)
class Nodes:
    unit: np.ndarray  # [nodes]
    upto: np.ndarray  # [nodes]  the position up to which the unit is read
    level: np.ndarray  # [nodes]  outermost prefixes have 0
    first: np.ndarray  # [nodes]  readers [first, end)
    end: np.ndarray  # [nodes]
    parent: np.ndarray  # [nodes]  -1 for none
    of_reader: np.ndarray  # [readers]  the innermost, -1 for none
    levels: int

    def __len__(self) -> int:
        return len(self.unit)


def make_ranges(
    units: Units,
    readers: Readers,
    *,
    page_size: int,
    window: int | None = None,
    gate: float = GATE,
    gate_merged: float = GATE_MERGED,
) -> Ranges:
    """With a window, tokens before it do not count towards the gate; `build_work` leaves their pages out."""
    assert (readers.rows > 0).all() and (window is None or window > 0)
    nodes = nodes_of(units, readers)
    begin = units.start[nodes.unit]
    if window is not None and len(nodes):
        sees_from = readers.end - readers.rows + 1 - window  # [readers]  the first row
        bounds = np.stack([nodes.first, nodes.end], axis=1).ravel()
        begin = np.maximum(begin, np.minimum.reduceat(np.append(sees_from, 0), bounds)[::2])
    kept = _kept(nodes, np.maximum(nodes.upto - begin, 0), gate, gate_merged)
    mine = np.flatnonzero(kept)
    readers_level = np.full(len(readers.unit), nodes.levels, dtype=np.int64)
    piece_range, piece_unit, piece_upto, piece_short = _pieces(nodes, kept, mine, readers)
    page_begin, page, tokens, first = _pages(
        units, len(mine) + len(readers.unit), piece_range, piece_unit, piece_upto, piece_short, page_size
    )
    last = nodes.end[mine] - 1
    row_end = readers.row + readers.rows
    causal = readers.rows > 1
    return Ranges(
        row_begin=np.concatenate([readers.row[nodes.first[mine]], readers.row]),
        row_end=np.concatenate([row_end[last], row_end]),
        level=np.concatenate([nodes.level[mine], readers_level]),
        page_begin=page_begin,
        page=page,
        tokens=tokens,
        first=first,
        causal=np.concatenate([np.zeros(len(mine), dtype=bool), causal]) if causal.any() else None,
    )


def make_chunks(units: Units, readers: Readers, *, page_size: int) -> Chunks:
    """Each reader against its whole page table."""
    nodes = nodes_of(units, readers)
    none = np.empty(0, dtype=np.int64)
    pieces = _pieces(nodes, np.zeros(len(nodes), dtype=bool), none, readers)
    page_begin, page, tokens, first = _pages(units, len(readers.unit), *pieces, page_size)
    row_end = readers.row + readers.rows
    return Chunks(readers.row, row_end, readers.end - readers.rows, page_begin, page, tokens, first)


def nodes_of(units: Units, readers: Readers) -> Nodes:
    count = len(readers.unit)
    # How deep each reader stands: as many levels as there are bases below it.
    below, depth = units.base[readers.unit], np.zeros(count, dtype=np.int64)
    while (there := below >= 0).any():
        depth += there
        below = np.where(there, units.base[below], -1)
    levels = int(depth.max(initial=0))
    unit = np.full((levels, count), -1, dtype=np.int64)
    upto = np.zeros((levels, count), dtype=np.int64)
    child, index = readers.unit, np.arange(count)
    for step in range(levels):
        there = depth > step
        child, index = child[there[index]], index[there[index]]
        at = depth[index] - 1 - step
        upto[at, index] = units.start[child]
        child = units.base[child]
        unit[at, index] = child

    # Neighbours that read the same unit equally far make one node. Below it they do so too: nodes nest.
    begins = np.ones((levels, count), dtype=bool)
    gap = readers.row[1:] != readers.row[:-1] + readers.rows[:-1]
    begins[:, 1:] = (unit[:, 1:] != unit[:, :-1]) | (upto[:, 1:] != upto[:, :-1]) | gap
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], levels * count)
    real = unit.ravel()[starts] >= 0
    number = np.where(real, np.cumsum(real) - 1, -1)
    node_at = np.repeat(number, ends - starts).reshape(levels, count)
    starts, ends = starts[real], ends[real]
    level, first = np.divmod(starts, max(count, 1))
    return Nodes(
        unit=unit.ravel()[starts],
        upto=upto.ravel()[starts],
        level=level,
        first=first,
        end=ends - level * count,
        parent=np.where(level > 0, node_at[level - 1, first], -1) if levels else level,
        of_reader=np.where(depth > 0, node_at[depth - 1, np.arange(count)], -1) if levels else np.full(count, -1),
        levels=levels,
    )


def _kept(nodes: Nodes, size: np.ndarray, gate: float, gate_merged: float) -> np.ndarray:
    """Whether each node, of ``size`` tokens, becomes a range of its own [nodes]."""
    readers = nodes.end - nodes.first
    saved = 1 - 1 / np.maximum(readers, 1)
    tokens = size.astype(np.float64)
    kept = np.zeros(len(nodes), dtype=bool)
    merged = np.zeros(len(nodes), dtype=bool)  # whether this node, or one around it, is kept
    for level in range(nodes.levels):
        mine = np.flatnonzero(nodes.level == level)
        if level:
            parent = nodes.parent[mine]
            tokens[mine] += np.where(kept[parent], 0, tokens[parent])  # with the tokens that are joined to it
            merged[mine] = merged[parent]
        kept[mine] = tokens[mine] * saved[mine] >= np.where(merged[mine], gate_merged, gate)
        merged[mine] |= kept[mine]
    return kept


def _pieces(
    nodes: Nodes, kept: np.ndarray, mine: np.ndarray, readers: Readers
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The pieces that ranges read: (range, unit, position up to which it is read, whether the unit is final there).

    The ranges are the nodes in ``mine``, then the readers. The pieces of a range stand together, in order of position.
    """
    count = len(mine) + len(readers.unit)
    ranges = [np.arange(count)]
    unit = [np.concatenate([nodes.unit[mine], readers.unit])]
    upto = [np.concatenate([nodes.upto[mine], readers.end])]
    short = [np.arange(count) < len(mine)]
    around = np.concatenate([nodes.parent[mine], nodes.of_reader])
    which = ranges[0]
    while len(which := which[joined := _joins(around, kept)]):
        around = around[joined]
        ranges.append(which)
        unit.append(nodes.unit[around])
        upto.append(nodes.upto[around])
        short.append(np.ones(len(which), dtype=bool))
        around = nodes.parent[around]
    if len(ranges) == 1:
        return ranges[0], unit[0], upto[0], short[0]
    flat = np.concatenate(ranges[::-1])  # the outermost first
    order = np.argsort(flat, kind="stable")

    def sorted_like(values: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(values[::-1])[order]

    return flat[order], sorted_like(unit), sorted_like(upto), sorted_like(short)


def _joins(around: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Where there is an enclosing node that is not a range of its own."""
    joins = around >= 0
    joins[joins] = ~kept[around[joins]]
    return joins


def _pages(
    units: Units,
    ranges: int,
    piece_range: np.ndarray,  # [pieces]  ascending
    unit: np.ndarray,  # [pieces]
    upto: np.ndarray,  # [pieces]
    short: np.ndarray,  # [pieces] bool
    page_size: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Where each range's pages begin [ranges + 1]; the number, tokens and first position of each page [pages]."""
    start = units.start[unit]
    pages = -(-(upto - start) // page_size)  # [pieces]
    assert (pages <= units.page_begin[unit + 1] - units.page_begin[unit]).all(), "a unit lacks pages"
    begin = np.cumsum(pages) - pages
    nth = np.arange(int(pages.sum()), dtype=np.int64)
    page = units.page[nth + np.repeat(units.page_begin[unit] - begin, pages)]
    first = nth * page_size + np.repeat(start - begin * page_size, pages)
    # A unit that may still grow into its last page counts all of it: how far a row sees is read on the device.
    last = np.where(short, upto, np.iinfo(np.int64).max // 2)
    tokens = np.minimum(np.repeat(last, pages) - first, page_size)
    page_begin = np.zeros(ranges + 1, dtype=np.int64)
    np.cumsum(np.bincount(piece_range, pages, ranges).astype(np.int64), out=page_begin[1:])
    return page_begin, page, tokens, first
