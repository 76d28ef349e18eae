"""Runs of tokens that see each other both ways are not cut, however prompts are cut into chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hf_batchllm.engine.smaller_steps import parts_of
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import Prefix, Request
from hf_batchllm.planning.scheduler import FifoScheduler, GroupScheduler
from hf_batchllm.planning.step import Chunk, Step

RUNS = np.array([[3, 7], [7, 9], [15, 30]])


def request(tokens: int = 40, index: int = 0, runs: np.ndarray | None = RUNS, **options: Any) -> Request:
    return Request(index, np.arange(tokens, dtype=np.int32), 4, two_way=runs, **options)


def cuts(begin: int, end: int) -> bool:
    return any(first < end < last for first, last in RUNS.tolist())


def test_where_a_chunk_may_end() -> None:
    unit = request()
    starts = [begin for begin in range(40) if not cuts(0, begin)]
    for begin in starts:
        for end in range(begin + 1, 41):
            allowed = [at for at in range(begin + 1, end + 1) if not cuts(begin, at)]
            assert unit.chunk_end(begin, end) == max(allowed, default=begin)
            further = any(first < end and last > begin for first, last in RUNS.tolist())
            assert unit.has_two_way(begin, end) == further
        assert unit.shortest_chunk_end(begin) == min(at for at in range(begin + 1, 41) if not cuts(begin, at))


def test_without_runs_it_may_end_anywhere() -> None:
    for runs in (None, np.zeros((0, 2), dtype=np.int64)):
        unit = request(runs=runs)
        assert [unit.chunk_end(5, end) for end in (6, 40)] == [6, 40]
        assert unit.shortest_chunk_end(5) == 6
        assert not unit.has_two_way(0, 40)


@pytest.mark.parametrize("budget", [1, 4, 10, 16, 100])
@pytest.mark.parametrize("scheduler", [GroupScheduler, FifoScheduler])
def test_schedulers_do_not_cut_them(scheduler: Any, budget: int) -> None:
    """And they keep to the budget, but where one run alone is longer than it."""
    cache = PagedCache(200, 4)
    prefix = Prefix(np.arange(40, dtype=np.int32), 0, 31, two_way=RUNS)
    cache.attach(prefix, None)
    requests = [request(index=index, rank=index, start=31) for index in range(3)]
    alone = request(index=3, rank=3)
    for unit in requests:
        cache.attach(unit, prefix)
    cache.attach(alone, None)
    chosen, steps = scheduler(), 0
    chosen.start([*requests, alone], cache, budget)
    while (step := chosen.next()) is not None:
        steps += 1
        assert steps < 500
        assert not any(cuts(chunk.begin, chunk.end) for chunk in step.chunks)
        longest = max((chunk.end - chunk.begin for chunk in step.chunks), default=0)
        assert step.tokens <= max(budget, longest)
        if step.tokens > budget:
            assert len(step.chunks) == 1
            assert not step.rows
        for unit in step.sampling():
            unit.take(1)
            if unit.done:
                chosen.finish(unit)
    assert all(unit.done for unit in [*requests, alone])


@pytest.mark.parametrize("budget", [15, 16, 18, 40])
def test_images_do_not_wait_until_all_rows_have_ended(budget: int) -> None:
    """Steps that are hardly longer than an image have no room for it beside decode rows."""
    cache, count, new = PagedCache(2000, 4), 10, 30
    requests = [
        Request(index, np.arange(20, dtype=np.int32), new, rank=index, two_way=np.array([[3, 18]]))
        for index in range(count)
    ]
    for unit in requests:
        cache.attach(unit, None)
    chosen, steps, most_rows = GroupScheduler(), 0, 0
    chosen.start(requests, cache, budget)
    while (step := chosen.next()) is not None:
        steps += 1
        most_rows = max(most_rows, len(step.rows))
        for unit in step.sampling():
            unit.take(1)
            if unit.done:
                chosen.finish(unit)
    assert most_rows == count
    assert steps < 3 * new


@pytest.mark.parametrize("most", [1, 3, 5, 14, 39])
def test_smaller_parts_of_a_step(most: int) -> None:
    units = [request(), request(index=1)]
    rows = [request(5, 2, None), request(5, 3, None)]
    step = Step(rows=rows, chunks=[Chunk(units[0], 0, 40), Chunk(units[1], 9, 31)])
    parts = parts_of(step, most)
    assert [chunk.unit.index for part in parts for chunk in part.chunks] == sorted(
        chunk.unit.index for part in parts for chunk in part.chunks
    )
    for unit, begin, end in ((units[0], 0, 40), (units[1], 9, 31)):
        mine = [chunk for part in parts for chunk in part.chunks if chunk.unit is unit]
        assert [chunk.begin for chunk in mine] == [begin, *(chunk.end for chunk in mine[:-1])]
        assert mine[-1].end == end
        assert not any(cuts(chunk.begin, chunk.end) for chunk in mine)
    for part in parts:
        assert part.tokens
        assert part.tokens <= most or (len(part.chunks) == 1 and not part.rows)
    assert sum(part.tokens for part in parts) == step.tokens
