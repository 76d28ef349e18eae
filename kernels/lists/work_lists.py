"""Work lists: the work of a step for the attention kernels, listed on the host in NumPy.

Decode rows are cut into *ranges*: some rows (neighbours in the batch) against the pages that they all read, either a
shared prefix or one row's own pages. Prompts are cut into *chunks*: rows at consecutive positions of one unit against
their whole page table. Both become *items*: the work of one block for each KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

PAGE_SIZES = (16, 32, 64, 128)  # that the Triton kernels take
TILES = (16, 64)  # lines of a decode tile: query rows x the heads that share a KV head
ITEM_FIELDS = 8  # row, rows, begin, full, end, part, causal, and a spare: a record is one 32-byte sector
CHUNK_FIELDS = 12  # row, rows, position, short, shorts, rest, full_from, full_to, pages, reach, and two spare
ENTRY_FIELDS = 4  # page, tokens, first, and one spare
# A large prefill tile pays from this many blocks on, with this many pages for each, and this share of lines in use.
WIDE_BLOCKS, WIDE_PAGES, WIDE_FILLED = 200, 6, 0.75
# Ranges are split into so many blocks (for each tile) on a multiprocessor, but not into items of fewer pages than this.
BLOCKS, MIN_PAGES = {16: 4, 64: 2}, 4
MANY_BLOCKS = 64  # on a multiprocessor: from so many on, items of one page each are launched in another way


@dataclass(frozen=True)
class Ranges:
    """Which rows read which pages together. Ranges nest: two ranges of one ``level`` share no row.

    All rows of a range see all of it. Two kinds are bounded by the rows' lengths: a single row, and a ``causal`` range,
    a few rows at consecutive positions of one unit.
    """

    row_begin: np.ndarray  # [ranges]
    row_end: np.ndarray  # [ranges]
    level: np.ndarray  # [ranges]
    page_begin: np.ndarray  # [ranges + 1]  a range's pages are [page_begin[i], page_begin[i + 1])
    page: np.ndarray  # [pages]
    tokens: np.ndarray  # [pages]  valid ones; all of the page where the unit may still grow into it
    first: np.ndarray  # [pages]  position of the page's first token; a range may have holes in position
    causal: np.ndarray | None = None  # [ranges] bool; None: no range is causal


class NoRoom(ValueError):
    """Lists are longer than the lists that are to be filled with them."""


class WorkLists:
    """One step's work, for all layers that attend in the same way.

    All lists lie in one piece of memory, so that they travel in one copy.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        rows: int,
        room: dict[int, int],  # from tile to items
        entries: int,
        *,
        parts: int,
        merges: bool,
        causal: bool,
        direct: bool,
        brief: bool = False,
    ) -> None:
        self.packed = packed  # int32
        self.rows = rows
        self.parts = parts  # partial results in all
        self.merges = merges  # False where no row has more than one part
        self.causal = causal  # whether the rows of some item see different numbers of positions
        self.direct = direct  # whether a row's only part is written as its output
        self.brief = brief  # whether items of the small tile read a page each, and are many
        self.counts: dict[int, torch.Tensor] = {}  # for each tile: [1], the number of its items
        self.items: dict[int, torch.Tensor] = {}  # for each tile: [room, ITEM_FIELDS], longest first
        for tile, size in room.items():
            at = _sections(rows, room, entries)[tile]
            self.counts[tile] = packed[at : at + 1]
            self.items[tile] = packed[at + _ALIGN :][: size * ITEM_FIELDS].view(size, ITEM_FIELDS)
        at = _sections(rows, room, entries)["row_parts"]
        self.row_parts = packed[at : at + rows + 1]  # row i's partial results are [row_parts[i], row_parts[i + 1])
        at = _sections(rows, room, entries)["entries"]
        self.entries = packed[at:][: entries * ENTRY_FIELDS].view(entries, ENTRY_FIELDS)

    @classmethod
    def room(
        cls,
        *,
        rows: int,
        items: dict[int, int],
        entries: int,
        parts: int,
        device: torch.device | str,
        causal: bool = False,
        direct: bool = True,
    ) -> WorkLists:
        """Lists without work, to be filled again and again: a captured graph reads them."""
        size = _sections(rows, items, entries)["end"]
        if torch.device(device).type == "cpu":
            # NumPy makes the zeros: torch would start threads for them, which takes longer than making all lists.
            packed = torch.from_numpy(np.zeros(size, dtype=np.int32))
        else:  # made on the device: a copy would wait for all work in its queue
            packed = torch.zeros(size, dtype=torch.int32, device=device)
        return cls(packed, rows, items, entries, parts=parts, merges=True, causal=causal, direct=direct)

    def fill(self, work: WorkLists) -> None:
        """Take over the work of other lists, in place; NoRoom if they are longer. Further rows get no work."""
        self.packed.copy_(self.fitted(work).packed, non_blocking=True)

    def fitted(self, work: WorkLists) -> WorkLists:
        """The work of other lists on the host, in lists of the same form as these."""
        have = {tile: len(items) for tile, items in self.items.items()}
        want = {tile: int(work.counts[tile]) for tile in work.items}
        for name, needed, there in (
            ("rows", work.rows, self.rows),
            ("entries", len(work.entries), len(self.entries)),
            ("parts", work.parts, self.parts),
            *((f"items of {tile} lines", size, have.get(tile, 0)) for tile, size in want.items()),
        ):
            if needed > there:
                raise NoRoom(f"{needed} {name} do not fit into lists with room for {there}")
        if work.causal > self.causal or work.direct != self.direct:
            raise ValueError("the lists differ in `causal` or `direct`: they were made for other kernels")
        made = WorkLists.room(
            rows=self.rows, items=have, entries=len(self.entries), parts=self.parts,
            device="cpu", causal=self.causal, direct=self.direct,
        )  # fmt: skip
        for tile, size in want.items():
            made.items[tile][:size] = work.items[tile][:size]
            made.counts[tile].fill_(size)
        made.entries[: len(work.entries)] = work.entries
        made.row_parts[: work.rows + 1] = work.row_parts
        made.row_parts[work.rows + 1 :] = work.row_parts[-1]
        return made

    def to(self, device: torch.device | str, non_blocking: bool = False) -> WorkLists:
        return WorkLists(
            sent(self.packed, device, non_blocking),
            self.rows,
            {tile: len(items) for tile, items in self.items.items()},
            len(self.entries),
            parts=self.parts,
            merges=self.merges,
            causal=self.causal,
            direct=self.direct,
            brief=self.brief,
        )


def sent(tensor: torch.Tensor, device: torch.device | str, non_blocking: bool = True) -> torch.Tensor:
    """The tensor on the device. Without blocking, the host does not wait for the work launched before: on CUDA alone.

    Elsewhere the tensor is not pinned, and what is read late may be something else by then.
    """
    if non_blocking and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


_ALIGN = 8  # int32: each list starts with a sector


def _sections(rows: int, items: dict[int, int], entries: int) -> dict[int | str, int]:
    """Where each list starts."""
    at, starts = 0, {}
    sizes: dict[int | str, int] = {tile: _ALIGN + size * ITEM_FIELDS for tile, size in items.items()}
    for name, size in (sizes | {"row_parts": rows + 1, "entries": entries * ENTRY_FIELDS, "end": 0}).items():
        starts[name] = at
        at += -(-size // _ALIGN) * _ALIGN
    return starts


def build_work(
    ranges: Ranges,
    lengths: np.ndarray,  # [rows]  positions that each row sees when the lists are made
    *,
    kv_heads: int,
    group: int,  # query heads for each KV head
    page_size: int,
    multiprocessors: int,  # of the device
    most_pages: int | None = None,  # for one item; by default a fair share of the blocks that run at once
    window: int | None = None,
    ahead: int = 0,  # with a window: the lists must hold until the rows have grown by this much
    capacity: int = 1,  # room in each list for this many times its items
    direct: bool = True,  # False: rows with one part go through the merge, too (it applies sinks)
) -> WorkLists:
    rows = len(lengths)
    assert group <= TILES[-1], "the heads that share a KV head must fit a tile"
    page, tokens, first, begin, pages, full = _in_order(ranges, lengths, page_size, window, ahead)

    in_range = ranges.row_end - ranges.row_begin
    small = in_range * group <= TILES[0]  # [ranges]
    tile_rows = np.where(small, TILES[0] // group, TILES[1] // group)
    blocks = -(-in_range // np.maximum(tile_rows, 1))
    if most_pages is None:
        share = (pages * blocks).sum() * kv_heads / multiprocessors
        share = np.where(small, *(max(MIN_PAGES, share / at_once) for at_once in BLOCKS.values()))  # [ranges]
        splits = np.maximum(np.rint(pages / share), pages > 0).astype(np.int64)  # [ranges]
    else:
        splits = -(-pages // most_pages)
    part, in_row = ordinals(ranges.row_begin, ranges.row_end, ranges.level, splits, rows)
    row_parts = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(in_row, out=row_parts[1:])
    causal = ranges.causal if ranges.causal is not None and ranges.causal.any() else None

    of_tile = {}
    for size, mine in zip(TILES, (small, ~small), strict=True):
        which = np.flatnonzero(mine & (splits > 0))
        if len(which):
            # One item for each block of rows and each split of a range; blocks of the same keys are neighbours.
            source = np.repeat(which, (splits * blocks)[which])  # [items]
            records = np.zeros((len(source), ITEM_FIELDS), dtype=np.int32)
            row, cuts = ranges.row_begin[source], splits[source]
            nth_split = 0
            if len(source) > len(which):
                made = (splits * blocks)[which]
                index = np.arange(len(source)) - np.repeat(np.cumsum(made) - made, made)
                nth_split, nth_block = np.divmod(index, blocks[source])
                row = row + nth_block * tile_rows[source]
            low = begin[source] + pages[source] * nth_split // cuts
            high = begin[source] + pages[source] * (nth_split + 1) // cuts
            records[:, 0] = row
            records[:, 1] = np.minimum(tile_rows[source], ranges.row_end[source] - row)
            records[:, 2] = low
            records[:, 3] = np.clip(full[source], low, high)
            records[:, 4] = high
            records[:, 5] = np.where(direct & (in_row[row] == 1), -1, part[source] + nth_split)
            if causal is not None:
                records[:, 6] = causal[source]
            of_tile[size] = records[np.argsort(low - high, kind="stable")]  # longest first

    work = WorkLists.room(
        rows=rows,
        items={size: capacity * len(records) for size, records in of_tile.items()},
        entries=max(1, len(page)),
        parts=int(row_parts[-1]),
        device="cpu",
        causal=causal is not None,
        direct=direct,
    )
    work.merges = not direct or bool((in_row != 1).any())
    if (short := of_tile.get(TILES[0])) is not None:
        many = len(short) * kv_heads >= MANY_BLOCKS * multiprocessors
        work.brief = many and int(short[0, 4] - short[0, 2]) <= 1
    for size, records in of_tile.items():
        work.items[size].numpy()[: len(records)] = records
        work.counts[size].fill_(len(records))
    work.row_parts.numpy()[:] = row_parts
    for field, values in enumerate((page, tokens, first)):
        work.entries.numpy()[: len(page), field] = values
    return work


def _in_order(
    ranges: Ranges, lengths: np.ndarray, page_size: int, window: int | None, ahead: int
) -> tuple[np.ndarray, ...]:
    """The pages to read, range by range: first the full pages that all rows see whole, then the rest.

    Keys may come in any order, and the loop over the first pages needs no masks. Returns the number, the tokens and the
    first position of each page [pages]; each range's first entry, number of pages and end of the full pages [ranges].
    """
    bounds = np.empty(2 * len(ranges.row_begin), dtype=np.int64)
    bounds[::2], bounds[1::2] = ranges.row_begin, ranges.row_end
    padded = np.append(lengths, lengths[-1:])  # reduceat takes no index past the end
    pages = np.diff(ranges.page_begin)
    page, tokens, first = ranges.page, ranges.tokens, ranges.first
    shortest = np.repeat(np.minimum.reduceat(padded, bounds)[::2], pages)  # [pages]
    masked = (tokens < page_size) | (first + page_size > shortest)
    owner = np.repeat(np.arange(len(pages)), pages)
    if window is not None:
        longest = np.repeat(np.maximum.reduceat(padded, bounds)[::2], pages)
        masked |= first < longest + ahead - window  # not all rows see all of it
        seen = first + tokens > shortest - window  # some row sees some of it
        page, tokens, first, masked, owner = (of_page[seen] for of_page in (page, tokens, first, masked, owner))
        pages = np.bincount(owner, minlength=len(pages))
    begin = np.cumsum(pages) - pages
    full = begin + pages - np.bincount(owner[masked], minlength=len(pages))
    key = 2 * owner + masked
    if (key[1:] < key[:-1]).any():
        order = np.argsort(key, kind="stable")
        page, tokens, first = page[order], tokens[order], first[order]
    return page, tokens, first, begin, pages, full


def ordinals(
    row_begin: np.ndarray, row_end: np.ndarray, level: np.ndarray, splits: np.ndarray, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """The place of each range's first part among its rows' parts [ranges]; the number of parts of each row [rows]."""
    part = np.zeros(len(splits), dtype=np.int64)
    in_row = np.zeros(rows, dtype=np.int64)
    for at in range(int(level.max(initial=-1)) + 1):
        mine = np.flatnonzero(level == at)
        part[mine] = in_row[row_begin[mine]]
        steps = np.zeros(rows + 1, dtype=np.int64)  # ranges of one level share no row
        steps[row_begin[mine]] += splits[mine]
        steps[row_end[mine]] -= splits[mine]
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
    # [rows of the batch]  the position up to which each row sees, which never falls from row to row of a chunk. None:
    # each sees what is before it, and itself.
    sees_to: np.ndarray | None = None


@dataclass(frozen=True)
class PrefillWork:
    """One step's work, for all layers that attend in the same way."""

    items: torch.Tensor  # [capacity, CHUNK_FIELDS] int32, longest first
    count: torch.Tensor  # [1] int32, the number of items
    entries: torch.Tensor  # [entries, ENTRY_FIELDS] int32
    tile: int  # lines: query rows x the heads that share a KV head
    sees_to: torch.Tensor | None = None  # [rows of the batch] int32, as in ``Chunks``

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PrefillWork:
        """In one copy."""
        parts = [self.count, self.items, self.entries, *([] if self.sees_to is None else [self.sees_to])]
        sizes = [-(-part.numel() // _ALIGN) * _ALIGN for part in parts]
        packed = torch.from_numpy(np.zeros(sum(sizes), dtype=np.int32))
        for part, place in zip(parts, packed.split(sizes), strict=True):
            place[: part.numel()] = part.flatten()
        there = sent(packed, device, non_blocking).split(sizes)
        count, items, entries, *sees_to = (
            place[: part.numel()].view(part.shape) for part, place in zip(parts, there, strict=True)
        )
        return PrefillWork(items, count, entries, self.tile, *sees_to)


def build_prefill(
    chunks: Chunks,
    *,
    group: int,  # query heads for each KV head
    page_size: int,
    tile: int,
    window: int | None = None,
    capacity: int = 1,  # room for this many times the items (a graph's bucket)
    wide: int | None = None,  # a larger tile, to be used if that pays
    kv_heads: int = 1,  # only to decide about `wide`
) -> PrefillWork:
    if wide is not None and chunks.sees_to is None:  # the kernel of large tiles is causal
        wider = build_prefill(chunks, group=group, page_size=page_size, tile=wide, window=window, capacity=capacity)
        in_wide = wider.items[: int(wider.count)].numpy()
        filled = in_wide[:, 1].sum() * group >= WIDE_FILLED * wide * len(in_wide)
        if filled and len(in_wide) * kv_heads >= WIDE_BLOCKS and in_wide[:, 8].sum() >= WIDE_PAGES * len(in_wide):
            return wider
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
    back = window or int(high.max(initial=0)) + 1
    low_from, high_from = np.maximum(0, low - back + 1), np.maximum(0, high - back + 1)  # what these rows see first
    low_to, high_to = low + 1, high + 1  # and up to where
    if chunks.sees_to is not None:
        low_to, high_to = chunks.sees_to[row], chunks.sees_to[row + rows - 1]

    ends = chunks.first + chunks.tokens
    stride = int(max(ends.max(initial=0), high_to.max(initial=0))) + 2

    def pages_upto(which: np.ndarray, at: np.ndarray, last: np.ndarray) -> np.ndarray:
        """For each item, the number of pages with ``at <= last``, counting all pages of earlier chunks."""
        count: np.ndarray = np.searchsorted((owner * stride + at)[which], chunk * stride + last, side="right")
        return count

    # Keys may come in any order. Partly filled pages stand apart, so that pages seen whole by a whole tile are one run.
    short = chunks.tokens < page_size
    shorts_begin = pages_upto(short, ends, low_from)
    shorts = pages_upto(short, chunks.first, high_to - 1) - shorts_begin
    begin = pages_upto(~short, ends, low_from)
    full_end = pages_upto(~short, ends, low_to)
    full_begin = np.minimum(pages_upto(~short, chunks.first, high_from - 1), full_end)
    pages = shorts + pages_upto(~short, chunks.first, high_to - 1) - begin
    rest = begin - shorts + int(short.sum())  # a page that is not short stands at `rest` + its number in the item
    full_from, full_to = shorts + full_begin - begin, shorts + full_end - begin
    entries = np.zeros((max(1, len(owner)), ENTRY_FIELDS), dtype=np.int32)
    for field, values in enumerate((chunks.page, chunks.tokens, chunks.first)):
        entries[: len(owner), field] = np.concatenate([values[short], values[~short]])
    items = np.zeros((capacity * len(chunk), CHUNK_FIELDS), dtype=np.int32)
    longest_first = np.argsort(-pages, kind="stable")
    for field, values in enumerate((row, rows, low, shorts_begin, shorts, rest, full_from, full_to, pages, high_to)):
        items[: len(chunk), field] = values[longest_first]
    return PrefillWork(
        torch.from_numpy(items),
        torch.tensor([len(chunk)], dtype=torch.int32, device="cpu"),
        torch.from_numpy(entries),
        tile,
        None if chunks.sees_to is None else torch.from_numpy(chunks.sees_to.astype(np.int32)),
    )
