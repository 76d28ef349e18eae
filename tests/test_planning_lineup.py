"""From a plan to units: every request stands on exactly its own tokens, on what is new and on what was kept."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support_cases import up_to

from hf_batchllm.inputs.prompts import Prompt
from hf_batchllm.planning.lineup import Lineup, line_up, pages_at_once
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import Prefix, Request
from hf_batchllm.planning.sharing import plan_sharing
from hf_batchllm.results.sharing_plan import SharingPlan

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=10)


def prompts_of(rows: Sequence[Sequence[int]], key: Hashable = None) -> list[Prompt]:
    return [Prompt(np.array(row, np.int32), key) for row in rows]


def lined_up(
    rows: Sequence[Sequence[int]],
    cache: PagedCache,
    *,
    new: int = 1,
    fee: int = 0,
    samples: int = 1,
    key: Hashable = None,
) -> Lineup:
    prompts = [prompt for prompt in prompts_of(rows, key) for _ in range(samples)]
    plan = plan_sharing(prompts, min_shared_tokens=fee, new_tokens=new)
    return line_up(prompts, plan, [new] * len(prompts), cache, [samples] * len(rows))


def run(lineup: Lineup, cache: PagedCache) -> None:
    """All of a call, one request after the other, as far as the cache can see."""
    for request in sorted(lineup.requests, key=lambda request: request.rank):
        for prefix, cut in request.ancestors():
            cache.reserve(prefix, cut)
            prefix.computed = max(prefix.computed, cut)
        cache.reserve(request, request.length)
        request.computed = request.length
        cache.retire(request)
    cache.check_integrity([])


def to_compute(lineup: Lineup) -> int:
    """Prompt tokens that are not there yet, of all prefixes as far as they are read, and of all requests."""
    read: dict[Prefix, int] = {}
    for request in lineup.requests:
        for prefix, cut in request.ancestors():
            read[prefix] = max(read.get(prefix, 0), cut)
    shared = sum(max(0, cut - prefix.computed) for prefix, cut in read.items())
    return shared + sum(len(request.prompt_ids) - request.start for request in lineup.requests)


def assert_stands_on_its_own_tokens(request: Request, row: Sequence[int]) -> None:
    assert request.prompt_ids.tolist() == list(row)
    assert request.computed == request.start < len(row)
    reached = 0
    for prefix, cut in request.ancestors():
        assert prefix.start == reached and prefix.key == request.key
        assert prefix.start <= cut <= prefix.end
        assert prefix.ids[:cut].tolist() == list(row[:cut])
        reached = cut
    assert reached == request.start


@settings(max_examples=up_to(300))
@given(rows=PROMPTS, fee=st.integers(0, 3), page_size=st.integers(1, 5), new=st.integers(1, 5))
def test_requests_stand_on_what_the_plan_says(rows: list[list[int]], fee: int, page_size: int, new: int) -> None:
    prompts = prompts_of(rows)
    plan = plan_sharing(prompts, min_shared_tokens=fee, new_tokens=new)
    cache = PagedCache(1000, page_size)
    lineup = line_up(prompts, plan, [new] * len(rows), cache)
    assert not lineup.too_long and not lineup.without_prefixes and not lineup.cached_tokens
    for place, (request, row) in enumerate(zip(lineup.requests, rows, strict=True)):
        assert (request.index, request.sample) == (place, 0)
        assert_stands_on_its_own_tokens(request, row)
    assert [lineup.requests[place].rank for place in plan.order] == list(range(len(rows)))
    assert to_compute(lineup) == plan.computed_tokens
    cache.check_integrity(lineup.requests)
    run(lineup, cache)
    assert cache.free_pages == 1000


def all_at_once(lineup: Lineup, cache: PagedCache) -> None:
    """Every request with room for its longest answer, at the same time."""
    for request in lineup.requests:
        for prefix, cut in request.ancestors():
            cache.reserve(prefix, cut)
        cache.reserve(request, request.max_length)


@settings(max_examples=up_to(300))
@given(rows=PROMPTS, fee=st.integers(0, 3), page_size=st.integers(1, 5), new=st.integers(1, 9), more=PROMPTS)
def test_the_pages_asked_for_hold_the_whole_list(
    rows: list[list[int]], fee: int, page_size: int, new: int, more: list[list[int]]
) -> None:
    def plan_of(some: list[list[int]]) -> tuple[list[Prompt], SharingPlan, list[int]]:
        prompts = prompts_of(some)
        return prompts, plan_sharing(prompts, min_shared_tokens=fee), [new] * len(some)

    prompts, plan, limits = plan_of(rows)
    cache = PagedCache(pages_at_once(prompts, plan, limits, page_size), page_size, keep_prefixes=3)
    lineup = line_up(prompts, plan, limits, cache)
    assert not lineup.too_long and not lineup.without_prefixes
    all_at_once(lineup, cache)
    run(lineup, cache)
    # And beside what a call before it left behind.
    prompts, plan, limits = plan_of(more)
    kept = cache.num_pages - cache.free_pages
    cache.grow(max(cache.num_pages, kept + pages_at_once(prompts, plan, limits, page_size)))
    lineup = line_up(prompts, plan, limits, cache)
    assert not lineup.too_long and not lineup.without_prefixes
    all_at_once(lineup, cache)
    run(lineup, cache)


def test_no_more_pages_are_asked_for_than_the_list_takes() -> None:
    def pages(rows: list[list[int]], page_size: int) -> int:
        prompts = prompts_of(rows)
        return pages_at_once(prompts, plan_sharing(prompts, min_shared_tokens=0), [5] * len(rows), page_size)

    assert pages([[1] * 12], 4) == 4  # 12 tokens, and 4 of the answer: the last is never run
    assert pages([[1] * 12 + [2], [1] * 12 + [3]], 4) == 3 + 2 * 2


@settings(max_examples=up_to(300))
@given(
    calls=st.lists(PROMPTS, min_size=2, max_size=4),
    keep=st.integers(1, 6),
    fee=st.integers(0, 2),
    page_size=st.integers(1, 4),
)
def test_calls_in_a_row_stand_on_kept_prefixes(
    calls: list[list[list[int]]], keep: int, fee: int, page_size: int
) -> None:
    cache = PagedCache(1000, page_size, keep_prefixes=keep)
    for rows in calls:
        new_to_it = plan_sharing(prompts_of(rows), min_shared_tokens=fee).computed_tokens
        lineup = lined_up(rows, cache, fee=fee)
        for request, row in zip(lineup.requests, rows, strict=True):
            assert_stands_on_its_own_tokens(request, row)
        cache.check_integrity(lineup.requests)
        assert to_compute(lineup) == new_to_it - lineup.cached_tokens
        run(lineup, cache)
    cache.forget_kept()
    assert cache.free_pages == 1000


def test_samples_of_a_prompt_share_all_but_its_last_token() -> None:
    cache = PagedCache(100, page_size=4)
    lineup = lined_up([[1, 2, 3, 4], [5, 6, 7]], cache, samples=3)
    assert [(request.index, request.sample) for request in lineup.requests] == [
        (index, sample) for index in range(2) for sample in range(3)
    ]
    assert [request.start for request in lineup.requests] == [3, 3, 3, 2, 2, 2]
    assert to_compute(lineup) == 3 + 3 + 2 + 3


def test_a_kept_prefix_is_found_again() -> None:
    cache = PagedCache(100, page_size=4, keep_prefixes=4)
    document = list(range(10, 20))
    run(lined_up([[*document, 1], [*document, 2]], cache), cache)
    assert cache.kept_prefixes == 1
    again = lined_up([[*document, 3], [*document, 4, 5]], cache)
    assert again.cached_tokens == 10 and to_compute(again) == 1 + 2
    run(again, cache)
    alone = lined_up([[*document, 6]], cache)  # shared with nobody in its own list
    assert alone.cached_tokens == 10 and to_compute(alone) == 1
    run(alone, cache)
    shorter = lined_up([document[:5]], cache)  # its last token is its own
    assert shorter.cached_tokens == 4 and to_compute(shorter) == 1
    run(shorter, cache)
    assert cache.kept_prefixes == 1


def test_each_reader_of_a_kept_prefix_goes_on_where_it_differs() -> None:
    """The list shares less than was kept: the planned prefix is empty, and its readers reach beyond it."""
    cache = PagedCache(100, page_size=4, keep_prefixes=4)
    document = list(range(10, 30))
    run(lined_up([[*document, 1], [*document, 2]], cache), cache)
    lineup = lined_up([[*document[:8], 7, 7], [*document[:15], 8], [*document[:8], 6]], cache)
    assert [request.start for request in lineup.requests] == [8, 15, 8]
    assert lineup.cached_tokens == 8 + 7
    assert to_compute(lineup) == 2 + 1 + 1
    cache.check_integrity(lineup.requests)
    run(lineup, cache)


def test_a_prefix_goes_on_from_a_kept_one() -> None:
    cache = PagedCache(100, page_size=4, keep_prefixes=4)
    document = list(range(10, 20))
    run(lined_up([[*document, 1], [*document, 2]], cache), cache)
    longer = [*document, 30, 31, 32]
    lineup = lined_up([[*longer, 1], [*longer, 2]], cache)
    assert lineup.cached_tokens == 10 and to_compute(lineup) == 3 + 2
    run(lineup, cache)
    again = lined_up([[*longer, 3]], cache)
    assert again.cached_tokens == 13
    run(again, cache)
    cache.forget_kept()
    assert cache.free_pages == 100


def test_another_key_is_another_text() -> None:
    cache = PagedCache(100, page_size=4, keep_prefixes=4)
    document = list(range(10, 20))
    run(lined_up([[*document, 1], [*document, 2]], cache, key="one"), cache)
    other = lined_up([[*document, 1]], cache, key="other")
    assert other.cached_tokens == 0 and to_compute(other) == 11
    run(other, cache)
    assert lined_up([[*document, 1]], cache, key="one").cached_tokens == 10


def test_a_prompt_that_can_never_fit_is_named_and_leaves_nothing() -> None:
    cache = PagedCache(4, page_size=4)
    shared = list(range(10))
    lineup = lined_up([[*shared, *range(50, 60)], [*shared, 1], [5] * 16], cache)
    assert lineup.too_long == {0: 5}
    for place in lineup.too_long:
        assert lineup.requests[place].base is None
    fitting = [request for place, request in enumerate(lineup.requests) if place not in lineup.too_long]
    cache.check_integrity(fitting)
    assert fitting[0].base is not None  # it went on alone on the prefix
    lineup.requests = fitting
    run(lineup, cache)
    assert cache.free_pages == 4


def test_a_prompt_that_fits_only_without_its_prefixes_goes_without() -> None:
    """Ragged pages: three tokens in prefixes and one of its own take four pages here, and two when all are together."""
    cache = PagedCache(3, page_size=2)
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 7]]
    lineup = lined_up(rows, cache)
    assert lineup.without_prefixes == 2 and not lineup.too_long
    for request, row in zip(lineup.requests, rows, strict=True):
        assert_stands_on_its_own_tokens(request, row)
        assert cache.fits_alone(request)
    cache.check_integrity(lineup.requests)
    for request in lineup.requests:  # their time is over before they have begun
        cache.retire(request)
    assert cache.lost_tokens == 0


def test_what_a_prompt_without_prefixes_does_not_read_is_not_counted_as_cached() -> None:
    cache = PagedCache(4, page_size=4, keep_prefixes=1)
    document = list(range(10, 15))
    run(lined_up([[*document, 1], [*document, 2]], cache), cache)
    lineup = lined_up([[*document, *range(30, 40)]], cache, new=2)  # 5 tokens and 11: five pages, where 16 take four
    assert lineup.without_prefixes == 1
    assert lineup.cached_tokens == 0 and to_compute(lineup) == 15
    cache.check_integrity(lineup.requests)


def test_how_far_an_earlier_call_read_does_not_count() -> None:
    """A long kept prefix in a cache that it fills: who reads little of it needs little of it."""
    cache = PagedCache(4, page_size=4, keep_prefixes=1)
    document = list(range(10, 22))
    run(lined_up([[*document, 1], [*document, 2]], cache), cache)
    lineup = lined_up([[*document[:4], *range(30, 35)]], cache, new=4)
    assert lineup.without_prefixes == 0 and lineup.cached_tokens == 4
    assert cache.fits_alone(lineup.requests[0])


def test_deep_chains_need_no_recursion() -> None:
    depth = 2000
    rows = [[*range(length), 9999] for length in range(1, depth)]
    cache = PagedCache(4 * depth, page_size=1, keep_prefixes=1)
    lineup = lined_up(rows, cache)
    assert max(len(request.ancestors()) for request in lineup.requests) > 0.9 * depth
    last = max(lineup.requests, key=lambda request: request.start)
    assert_stands_on_its_own_tokens(last, rows[last.index])
    for request in lineup.requests:
        cache.retire(request, keep=False)
    cache.check_integrity([])
