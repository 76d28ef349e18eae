"""Which rows read which pages together: made from units and readers, held against a walk over each row's own chain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from hf_batchllm.kernels.lists.ranges import Readers, Units, make_chunks, make_ranges
from hf_batchllm.kernels.lists.work_lists import MANY_BLOCKS, Ranges, WorkLists, build_work

PAGE = 4
Key = tuple[int, int, int]  # page, place in the page, position


def random_tree(seed: int, most_readers: int = 12, runs: bool = True) -> tuple[Units, Readers]:
    """Units of ragged lengths on others, read to their ends or not as far; their readers stand in the order of the
    tree, but for a few, and some rows between them are nobody's."""
    rng = np.random.default_rng(seed)
    base, start, held = [], [], []
    prefixes = int(rng.integers(0, 7))
    for _ in range(prefixes):
        below = int(rng.integers(-1, len(base))) if base else -1
        _stand_on(below, base, start, held, rng)
        held.append(int(rng.integers(1, 15)))
    below_of = rng.integers(-1, prefixes, int(rng.integers(1, most_readers + 1)))
    if rng.random() < 0.8:
        below_of = np.sort(below_of)
    row, unit, at, rows, end = 0, [], [], [], []
    for below in below_of:
        _stand_on(int(below), base, start, held, rng)
        many = int(rng.integers(1, 6)) if runs and rng.random() < 0.3 else 1
        size = many + int(rng.integers(0, 12))
        held.append(size + int(rng.integers(0, 6)))  # it may have room to grow
        row += int(rng.random() < 0.15)
        unit.append(len(base) - 1)
        at.append(row)
        rows.append(many)
        end.append(start[-1] + size)
        row += many
    pages = -(-np.array(held) // PAGE)
    page_begin = np.concatenate([[0], np.cumsum(pages)])
    units = Units(np.array(base), np.array(start), page_begin, rng.permutation(int(pages.sum())))
    return units, Readers(np.array(unit), np.array(at), np.array(rows), np.array(end))


def _stand_on(below: int, base: list[int], start: list[int], held: list[int], rng: np.random.Generator) -> None:
    upto = 0
    if below >= 0:
        least = start[below] + (rng.random() < 0.9)  # a few stand where their base begins: they read none of it
        upto = start[below] + held[below]
        if rng.random() < 0.2:
            upto = int(rng.integers(least, upto + 1))
    base.append(below)
    start.append(upto)


def chain_keys(units: Units, unit: int, end: int) -> list[Key]:
    """What a row of ``unit`` that sees the positions before ``end`` reads."""
    keys: list[Key] = []
    while unit >= 0:
        pages = units.page[units.page_begin[unit] : units.page_begin[unit + 1]]
        begin = int(units.start[unit])
        keys += [(int(pages[(p - begin) // PAGE]), (p - begin) % PAGE, p) for p in range(begin, end)]
        end, unit = begin, int(units.base[unit])
    return keys


def range_keys(ranges: Ranges, row: int, sees: int) -> list[Key]:
    keys: list[Key] = []
    for i in np.flatnonzero((ranges.row_begin <= row) & (row < ranges.row_end)):
        single = ranges.row_end[i] - ranges.row_begin[i] == 1 or (ranges.causal is not None and ranges.causal[i])
        for j in range(ranges.page_begin[i], ranges.page_begin[i + 1]):
            first = int(ranges.first[j])
            keys += [
                (int(ranges.page[j]), at, first + at)
                for at in range(int(ranges.tokens[j]))
                if not single or first + at < sees
            ]
    return keys


def sees_of(readers: Readers) -> dict[int, tuple[int, int]]:
    """Of each row that someone has: its reader, and how many positions it sees."""
    return {
        int(row + nth): (i, int(end - rows + nth + 1))
        for i, (row, rows, end) in enumerate(zip(readers.row, readers.rows, readers.end, strict=True))
        for nth in range(rows)
    }


@pytest.mark.some_cases
@pytest.mark.parametrize("gate", [0, 3, 8, np.inf])
@pytest.mark.parametrize("seed", range(150))
def test_each_row_meets_each_of_its_keys_once(seed: int, gate: float) -> None:
    units, readers = random_tree(seed)
    ranges = make_ranges(units, readers, page_size=PAGE, gate=gate, gate_merged=gate / 2)
    for row, (reader, sees) in sees_of(readers).items():
        expected = chain_keys(units, int(readers.unit[reader]), sees)
        assert Counter(range_keys(ranges, row, sees)) == Counter(expected)
    rows = int(ranges.row_end.max())
    for level in np.unique(ranges.level):
        mine = ranges.level == level
        taken = np.zeros(rows + 1, dtype=int)
        np.add.at(taken, ranges.row_begin[mine], 1)
        np.add.at(taken, ranges.row_end[mine], -1)
        assert np.cumsum(taken).max() <= 1, "two ranges of a level share a row"
    if gate == np.inf:
        assert len(ranges.row_begin) == len(readers.unit), "nothing is shared"


@pytest.mark.some_cases
@pytest.mark.parametrize("seed", range(100))
def test_chunks_read_their_whole_page_table_in_order(seed: int) -> None:
    units, readers = random_tree(seed)
    chunks = make_chunks(units, readers, page_size=PAGE)
    for i, (unit, end) in enumerate(zip(readers.unit, readers.end, strict=True)):
        mine = slice(chunks.page_begin[i], chunks.page_begin[i + 1])
        assert (np.diff(chunks.first[mine]) >= 0).all()
        listed = [
            (int(page), at, int(first) + at)
            for page, tokens, first in zip(chunks.page[mine], chunks.tokens[mine], chunks.first[mine], strict=True)
            for at in range(tokens)
            if first + at < end
        ]
        assert sorted(listed, key=lambda key: key[2]) == listed
        assert Counter(listed) == Counter(chain_keys(units, int(unit), int(end)))
        assert (chunks.row_begin[i], chunks.row_end[i]) == (readers.row[i], readers.row[i] + readers.rows[i])
        assert chunks.position[i] == end - readers.rows[i]


def two_groups(tokens: int, readers: int) -> tuple[Units, Readers]:
    """Two prefixes, each with as many readers, which own two tokens each."""
    total = 2 * readers
    base = np.concatenate([[-1, -1], np.repeat([0, 1], readers)])
    start = np.concatenate([[0, 0], np.full(total, tokens)])
    pages = -(-np.concatenate([[tokens] * 2, [2] * total]) // PAGE)
    page_begin = np.concatenate([[0], np.cumsum(pages)])
    units = Units(base, start, page_begin, np.arange(page_begin[-1]))
    row = np.arange(total)
    return units, Readers(row + 2, row, np.ones(total, dtype=int), np.full(total, tokens + 2))


def test_a_prefix_is_a_range_of_its_own_from_the_gate_on() -> None:
    """What it saves is its tokens for all of its readers but one."""
    for tokens, readers, shared in ((16, 2, False), (19, 2, False), (20, 2, True), (15, 3, True), (14, 3, False)):
        ranges = make_ranges(*two_groups(tokens, readers), page_size=PAGE, gate=10)
        assert len(ranges.row_begin) == 2 * readers + (2 if shared else 0), (tokens, readers)
        assert (ranges.row_end - ranges.row_begin).max() == (readers if shared else 1)


def test_rows_that_are_merged_anyway_have_a_gate_of_their_own() -> None:
    base = np.array([-1, 0, 0, 1, 1, 2, 2])  # one prefix, two inside it, two readers of each of these
    start = np.array([0, 40, 40, 80, 80, 80, 80])
    page_begin = np.concatenate([[0], np.cumsum([10, 10, 10, 1, 1, 1, 1])])
    units = Units(base, start, page_begin, np.arange(34))
    readers = Readers(np.arange(3, 7), np.arange(4), np.ones(4, dtype=int), np.full(4, 82))
    # The outer one saves 30 tokens a reader, each inner one 20 of its own and 40 together with the outer one's.
    for gate, gate_merged, levels in ((30, 20, [0, 1, 1]), (30, 21, [0]), (31, 50, [1, 1]), (41, 0, [])):
        ranges = make_ranges(units, readers, page_size=PAGE, gate=gate, gate_merged=gate_merged)
        assert ranges.level[:-4].tolist() == levels, (gate, gate_merged)


def test_more_pages_than_a_unit_has_are_noticed() -> None:
    units, readers = two_groups(8, 2)
    readers.end[:] += PAGE
    with pytest.raises(AssertionError, match="lacks pages"):
        make_ranges(units, readers, page_size=PAGE)


def lists(seed: int, capacity: int = 1) -> WorkLists:
    units, readers = random_tree(seed, runs=False)
    ranges = make_ranges(units, readers, page_size=PAGE, gate=3)
    lengths = np.zeros(int(ranges.row_end.max()), dtype=np.int64)
    lengths[readers.row] = readers.end
    return build_work(
        ranges, lengths, kv_heads=2, group=4, page_size=PAGE, multiprocessors=2, most_pages=2, capacity=capacity
    )


def test_lists_travel_in_one_piece() -> None:
    work = lists(3, capacity=2)
    moved = work.to("cpu")
    for tile, items in work.items.items():
        assert (moved.items[tile] == items).all() and (moved.counts[tile] == work.counts[tile]).all()
        assert items.untyped_storage().data_ptr() == work.packed.untyped_storage().data_ptr()
        assert items.storage_offset() % 8 == work.counts[tile].storage_offset() % 8 == 0
    assert (moved.entries == work.entries).all() and (moved.row_parts == work.row_parts).all()


def test_lists_with_room_take_over_the_work_of_others() -> None:
    room = WorkLists.room(rows=20, items={16: 60, 64: 30}, entries=200, parts=100, device="cpu")
    addresses = [room.packed.data_ptr(), room.items[16].data_ptr(), room.entries.data_ptr()]
    for seed in range(20):
        work = lists(seed)
        room.fill(work)
        for tile, items in room.items.items():
            count = int(room.counts[tile])
            assert count == int(work.counts[tile]) if tile in work.items else count == 0
            if count:
                assert (items[:count] == work.items[tile]).all()
        assert (room.entries[: len(work.entries)] == work.entries).all()
        assert (room.row_parts[: work.rows + 1] == work.row_parts).all()
        assert (room.row_parts[work.rows :] == work.parts).all(), "rows beyond those have no part"
    assert addresses == [room.packed.data_ptr(), room.items[16].data_ptr(), room.entries.data_ptr()]


@pytest.mark.parametrize(
    ("short", "message"),
    [
        ({"rows": 1}, "rows do not fit"),
        ({"items": {16: 1, 64: 30}}, "items of 16 lines do not fit"),
        ({"items": {64: 30}}, "items of 16 lines do not fit"),
        ({"entries": 2}, "entries do not fit"),
        ({"parts": 1}, "parts do not fit"),
        ({"direct": False}, "made for other kernels"),
    ],
)
def test_what_does_not_fit_is_refused(short: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"rows": 20, "items": {16: 60, 64: 30}, "entries": 200, "parts": 100, "device": "cpu"}
    room = WorkLists.room(**(options | short))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        room.fill(lists(5))


def a_prefix(tokens: int, own: int) -> tuple[Units, Readers]:
    """One prefix and two rows behind it."""
    held = -(-np.array([tokens, own, own]) // 4)
    begin = np.concatenate([[0], np.cumsum(held)])
    units = Units(np.array([-1, 0, 0]), np.array([0, tokens, tokens]), begin, np.arange(begin[-1]))
    return units, Readers(np.array([1, 2]), np.arange(2), np.ones(2, dtype=int), np.full(2, tokens + own))


@pytest.mark.parametrize(("window", "shared"), [(None, True), (29, False), (30, True)])
def test_the_gate_counts_what_a_window_leaves_in_sight(window: int | None, shared: bool) -> None:
    """With 10 tokens of its own, a row sees window - 10 of the prefix; two rows save half of that."""
    ranges = make_ranges(*a_prefix(40, 10), page_size=4, window=window, gate=10, gate_merged=0)
    assert (len(ranges.row_begin) == 3) == shared


def test_a_row_between_readers_parts_them() -> None:
    units, readers = a_prefix(40, 10)
    readers.row[1] = 2
    ranges = make_ranges(units, readers, page_size=4, gate=0)
    assert not any((ranges.row_begin <= 1) & (ranges.row_end > 1)), "nobody's row got work"


def test_causal_lists_do_not_go_where_no_item_is_causal() -> None:
    units = Units(np.array([-1]), np.array([0]), np.array([0, 2]), np.arange(2))
    one = np.zeros(1, dtype=np.int64)
    ranges = make_ranges(units, Readers(one, one, one + 3, one + 5), page_size=4)
    options: dict[str, Any] = {"kv_heads": 1, "group": 1, "page_size": 4, "multiprocessors": 1}
    work = build_work(ranges, np.array([3, 4, 5]), **options)
    with pytest.raises(ValueError, match="other kernels"):
        WorkLists.room(rows=3, items={16: 9}, entries=9, parts=9, device="cpu").fill(work)


@pytest.mark.parametrize(("own", "multiprocessors", "brief"), [(3, 1, True), (3, 2, False), (5, 1, False)])
def test_many_items_of_a_page_each_are_brief(own: int, multiprocessors: int, brief: bool) -> None:
    rows = np.arange(MANY_BLOCKS)
    begin = np.arange(MANY_BLOCKS + 1) * -(-own // 4)
    units = Units(rows * 0 - 1, rows * 0, begin, np.arange(begin[-1]))
    readers = Readers(rows, rows, rows * 0 + 1, rows * 0 + own)
    ranges, lengths = make_ranges(units, readers, page_size=4), np.full(MANY_BLOCKS, own)
    work = build_work(ranges, lengths, kv_heads=1, group=1, page_size=4, multiprocessors=multiprocessors)
    assert work.brief == work.to("cpu").brief == brief


def test_a_row_without_parts_asks_for_the_merge() -> None:
    """It is the merge that writes its zeros."""
    units = Units(np.array([-1]), np.array([0]), np.array([0, 2]), np.arange(2))
    one = np.zeros(1, dtype=np.int64)
    ranges = make_ranges(units, Readers(one, one, one + 1, one + 5), page_size=4)
    options: dict[str, Any] = {"kv_heads": 1, "group": 1, "page_size": 4, "multiprocessors": 1}
    assert build_work(ranges, np.array([5, 0]), **options).merges
    assert not build_work(ranges, np.array([5]), **options).merges
