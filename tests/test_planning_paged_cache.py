"""The cache's bookkeeping: pages that are ragged, live as long as they are read, and are never asked for twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hf_batchllm.planning.paged_cache import OutOfPages, PagedCache
from hf_batchllm.planning.requests_and_prefixes import Prefix, Request


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def prefix_on(cache: PagedCache, base: Prefix | None, tokens: Sequence[int], *, key: str | None = None) -> Prefix:
    """A prefix that goes on from ``base``, with K and V of all of its tokens."""
    before = base.ids[: base.end].tolist() if base is not None else []
    prefix = Prefix(ids(*before, *tokens), len(before), len(before) + len(tokens), key=key)
    cache.attach(prefix, base)
    cache.reserve(prefix, prefix.end)
    prefix.computed = prefix.end
    return prefix


def request_on(
    cache: PagedCache, base: Prefix | None, own: int = 1, new: int = 1, *, start: int | None = None
) -> Request:
    """A request that reads ``base`` to its end (or to ``start``), with pages for its prompt, computed."""
    start = start if start is not None else base.end if base is not None else 0
    before = base.ids[:start].tolist() if base is not None else []
    request = Request(0, ids(*before, *range(900, 900 + own)), new, start=start)
    cache.attach(request, base)
    cache.reserve(request, request.length)
    request.computed = request.length
    return request


def kept_on(cache: PagedCache, base: Prefix | None, tokens: Sequence[int], *, key: str | None = None) -> Prefix:
    """A prefix whose only reader has come and gone."""
    prefix = prefix_on(cache, base, tokens, key=key)
    cache.retire(request_on(cache, prefix))
    assert prefix.kept
    return prefix


# --- pages ---------------------------------------------------------------------------------------------------------


def test_every_unit_starts_on_a_page_of_its_own() -> None:
    cache = PagedCache(10, page_size=4)
    outer = prefix_on(cache, None, range(5))  # ends inside its second page
    inner = prefix_on(cache, outer, range(4))  # fills one
    request = request_on(cache, inner, own=1, new=9)
    assert [len(unit.pages) for unit in (outer, inner, request)] == [2, 1, 1]
    assert cache.free_pages == 6
    assert len({*outer.pages, *inner.pages, *request.pages}) == 4
    cache.check_integrity([request])
    before = list(request.pages)
    cache.reserve(request, request.start + 4)  # there is room for these on its page
    assert request.pages == before
    cache.reserve(request, request.start + 5)
    assert request.pages[:1] == before and len(request.pages) == 2


def test_only_what_is_new_is_counted() -> None:
    cache = PagedCache(20, page_size=4)
    outer = Prefix(ids(*range(10)), 0, 10)
    inner = Prefix(ids(*range(16)), 10, 16)
    request = Request(0, ids(*range(19)), 6, start=16)
    cache.attach(outer, None)
    cache.attach(inner, outer)
    cache.attach(request, inner)
    assert [cache.missing(outer, 10), cache.missing(inner, 16), cache.missing(request, 19)] == [3, 2, 1]
    assert cache.missing_with_ancestors(request, 19) == 6
    cache.reserve(outer, 10)
    assert cache.missing_with_ancestors(request, 19) == 3
    cache.reserve(inner, 12)  # a part of it
    assert cache.missing_with_ancestors(request, 19) == 2
    cache.reserve(inner, 16)
    assert cache.missing_with_ancestors(request, 19) == 1
    other = Request(1, ids(*range(12)), 1, start=10)
    cache.attach(other, outer)
    assert cache.missing_with_ancestors(other, 12) == 1
    cache.reserve(request, 19)
    assert cache.missing_with_ancestors(request, 19) == 0
    assert cache.missing(request, 20) == 0 and cache.missing(request, 21) == 1
    assert cache.free_pages == 14


def test_a_prefix_is_counted_as_far_as_it_is_read() -> None:
    cache = PagedCache(20, page_size=4)
    prefix = Prefix(ids(*range(16)), 0, 16)
    cache.attach(prefix, None)
    request = Request(0, ids(*range(9)), 3, start=7)
    cache.attach(request, prefix)
    assert cache.missing_with_ancestors(request, 9) == 2 + 1
    assert cache.fits_alone(request)
    small = PagedCache(3, page_size=4)
    assert small.fits_alone(request)  # 7 tokens of the prefix, 4 of its own
    assert not PagedCache(2, page_size=4).fits_alone(request)


def test_asking_for_more_than_is_free_is_refused_and_takes_nothing() -> None:
    cache = PagedCache(3, page_size=2)
    request = request_on(cache, None, own=4, new=10)
    with pytest.raises(OutOfPages):
        cache.reserve(request, 8)
    assert cache.free_pages == 1 and len(request.pages) == 2
    cache.check_integrity([request])
    cache.reserve(request, 6)
    assert cache.free_pages == 0


def test_more_pages_leave_those_that_there_are_alone() -> None:
    cache = PagedCache(2, page_size=2)
    request = request_on(cache, None, own=4, new=10)
    before = list(request.pages)
    cache.grow(5)
    assert (cache.num_pages, cache.free_pages) == (5, 3)
    cache.reserve(request, 10)
    assert request.pages[:2] == before
    cache.check_integrity([request])
    cache.retire(request)
    assert cache.free_pages == 5


def test_the_peak_is_of_pages_held_at_once() -> None:
    cache = PagedCache(10, page_size=1)
    first = request_on(cache, None, own=4)
    cache.retire(first)
    second = request_on(cache, None, own=3)
    assert cache.peak_pages == 4
    request_on(cache, None, own=3)
    assert cache.peak_pages == 6
    cache.retire(second)
    assert cache.peak_pages == 6


# --- lifetimes -----------------------------------------------------------------------------------------------------


def test_a_prefix_goes_with_its_last_reader() -> None:
    cache = PagedCache(20, page_size=2)
    outer = prefix_on(cache, None, range(4))
    inner = prefix_on(cache, outer, range(4))
    on_inner = [request_on(cache, inner) for _ in range(2)]
    on_outer = request_on(cache, outer)
    assert cache.free_pages == 20 - 2 - 2 - 3
    cache.retire(on_inner[0])
    assert cache.free_pages == 20 - 2 - 2 - 2
    cache.check_integrity([on_inner[1], on_outer])
    cache.retire(on_inner[1])
    assert not inner.pages and outer.pages and cache.free_pages == 20 - 2 - 1
    cache.check_integrity([on_outer])
    cache.retire(on_outer)
    assert cache.free_pages == 20
    cache.check_integrity([])
    cache.retire(on_outer)  # once more changes nothing
    assert cache.free_pages == 20


def test_a_whole_chain_goes_at_once() -> None:
    cache = PagedCache(2001, page_size=1)
    base: Prefix | None = None
    for _ in range(2000):
        base = prefix_on(cache, base, [7])
    request = request_on(cache, base)
    assert cache.free_pages == 0
    cache.check_integrity([request])
    cache.retire(request)
    assert cache.free_pages == 2001


def test_readers_that_wait_keep_a_prefix_alive() -> None:
    cache = PagedCache(4, page_size=2)
    prefix = prefix_on(cache, None, range(4))
    running = request_on(cache, prefix)
    waiting = Request(1, ids(0, 1, 2, 3, 4), 1, start=4)
    cache.attach(waiting, prefix)
    cache.retire(running)
    assert prefix.pages and prefix.computed == 4
    cache.retire(waiting)
    assert cache.free_pages == 4


def test_what_is_given_up_is_counted_and_starts_anew() -> None:
    cache = PagedCache(8, page_size=2)
    prefix = prefix_on(cache, None, range(4))
    request = request_on(cache, prefix, own=3)
    cache.give_up(request)
    assert cache.lost_tokens == 3 and not request.pages and request.computed == request.start == 4
    assert request.base is prefix and prefix.refs == 1
    cache.check_integrity([request])


def test_prefixes_that_nobody_runs_on_are_given_up_for_one_that_runs() -> None:
    cache = PagedCache(6, page_size=1)
    idle, used = prefix_on(cache, None, range(3)), prefix_on(cache, None, range(2))
    waiting = Request(0, ids(*range(4)), 1, start=3)
    cache.attach(waiting, idle)
    running = request_on(cache, used)
    used.running = 1
    assert not cache.evict(1)
    assert cache.evict_idle(2)
    assert not idle.pages and idle.computed == 0 and idle.end == 3
    assert used.pages and cache.lost_tokens == 3
    cache.check_integrity([waiting, running])
    assert not cache.evict_idle(6)
    assert used.computed == 2 and cache.free_pages == 3


# --- prefixes kept from one call to the next -----------------------------------------------------------------------


def test_the_last_reader_leaves_a_prefix_behind_if_asked_to() -> None:
    cache = PagedCache(10, page_size=2, keep_prefixes=2)
    prefix = kept_on(cache, None, [1, 2, 3])
    assert cache.kept_prefixes == 1 and cache.free_pages == 8
    cache.check_integrity([])
    assert cache.match(ids(1, 2, 3, 4), 3, None) == (prefix, 3)
    cache.forget_kept()
    assert cache.free_pages == 10 and cache.kept_prefixes == 0
    assert cache.match(ids(1, 2, 3, 4), 3, None) == (None, 0)


def test_what_was_not_computed_is_not_kept() -> None:
    cache = PagedCache(10, page_size=2, keep_prefixes=2)
    prefix = prefix_on(cache, None, range(4))
    request = request_on(cache, prefix)
    prefix.computed = 3
    request.computed = request.start
    cache.retire(request)
    assert cache.free_pages == 10 and cache.kept_prefixes == 0


def test_what_stands_on_something_evicted_is_not_kept() -> None:
    cache = PagedCache(10, page_size=1, keep_prefixes=2)
    outer = prefix_on(cache, None, range(3))
    inner = prefix_on(cache, outer, range(2))
    waiting = Request(0, ids(*inner.ids, 9), 1, start=5)
    cache.attach(waiting, inner)
    assert cache.evict_idle(6) and not outer.pages and inner.pages
    cache.retire(waiting)  # gives up before it ever ran
    assert cache.free_pages == 10
    assert cache.match(inner.ids, 5, None) == (None, 0)


def test_nothing_stays_of_a_call_that_broke_off() -> None:
    cache = PagedCache(10, page_size=2, keep_prefixes=2)
    prefix = prefix_on(cache, None, range(4))
    cache.retire(request_on(cache, prefix), keep=False)
    assert cache.free_pages == 10


def test_the_match_ends_where_tokens_differ() -> None:
    cache = PagedCache(40, page_size=4, keep_prefixes=5)
    outer = prefix_on(cache, None, [1, 2, 3, 4, 5])
    inner = kept_on(cache, outer, [6, 7, 8])
    other = kept_on(cache, None, [1, 2, 9])
    keyed = kept_on(cache, None, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], key="adapter")
    long = list(range(1, 20))
    assert cache.match(ids(*long), 18, None) == (inner, 8)
    assert cache.match(ids(*long), 7, None) == (inner, 7)  # inside a page
    assert cache.match(ids(*long), 5, None) == (outer, 5)  # nothing of the inner one is read
    assert cache.match(ids(*long), 6, None) == (inner, 6)
    assert cache.match(ids(*long[:4], 99, 99), 5, None) == (outer, 4)  # inside the outer one
    assert cache.match(ids(1, 2, 9, 4), 3, None) == (other, 3)
    assert cache.match(ids(*long), 18, "adapter") == (keyed, 10)
    assert cache.match(ids(*long), 18, "another") == (None, 0)
    assert cache.match(ids(5, 1, 2), 2, None) == (None, 0)
    assert cache.match(ids(1), 0, None) == (None, 0)


def test_the_least_recently_matched_goes_first() -> None:
    cache = PagedCache(40, page_size=4, keep_prefixes=3)
    first, second, third = (kept_on(cache, None, [token, 0, 0]) for token in (1, 2, 3))
    cache.match(ids(1, 0, 0, 0), 3, None)
    kept_on(cache, None, [4, 0, 0])
    assert [prefix.kept for prefix in (first, second, third)] == [True, False, True]
    assert cache.kept_prefixes == 3 and cache.free_pages == 37
    assert cache.evict(38)
    assert [prefix.kept for prefix in (first, third)] == [True, False]
    cache.check_integrity([])


def test_eviction_spares_what_is_read() -> None:
    cache = PagedCache(4, page_size=4, keep_prefixes=3)
    read, idle = kept_on(cache, None, range(4)), kept_on(cache, None, range(10, 14))
    request = request_on(cache, read, start=2)
    assert cache.free_pages == 1
    assert cache.evict(2) and not idle.kept and read.kept
    assert not cache.evict(3) and read.pages
    cache.check_integrity([request])
    cache.forget_kept()
    assert read.kept and read.pages
    cache.check_integrity([request])


def test_an_outer_prefix_lives_as_long_as_an_inner_one_is_kept() -> None:
    cache = PagedCache(20, page_size=2, keep_prefixes=1)
    outer = prefix_on(cache, None, range(4))
    inner = kept_on(cache, outer, range(4))
    assert outer.pages and not outer.kept and cache.kept_prefixes == 1
    reader = request_on(cache, outer, start=3)
    cache.evict(20)
    assert not inner.pages and outer.pages
    cache.check_integrity([reader])
    cache.retire(reader)
    assert outer.kept  # now it is the innermost
    cache.evict(20)
    assert cache.free_pages == 20


def test_a_kept_prefix_is_cut_down_to_what_is_read_of_it() -> None:
    cache = PagedCache(9, page_size=2, keep_prefixes=1)
    prefix = kept_on(cache, None, range(16))
    waiting = Request(0, ids(*range(5), 99), 1, start=5)
    cache.attach(waiting, prefix)
    assert cache.fits_alone(waiting)
    assert not PagedCache(3, page_size=2).fits_alone(waiting) and PagedCache(4, page_size=2).fits_alone(waiting)
    assert cache.evict_idle(9)
    assert (prefix.end, prefix.computed, prefix.kept) == (5, 0, False)
    assert cache.lost_tokens == 5  # the other 11 need not be computed again
    cache.check_integrity([waiting])
    cache.reserve(prefix, 5)
    prefix.computed = 5
    cache.retire(waiting)
    assert prefix.kept and cache.free_pages == 6
    assert cache.match(ids(*range(16)), 16, None) == (prefix, 5)


def test_none_are_kept_unless_asked_for() -> None:
    cache = PagedCache(10, page_size=2)
    cache.retire(request_on(cache, prefix_on(cache, None, range(4))))
    assert cache.free_pages == 10 and cache.kept_prefixes == 0


def test_random_lives() -> None:
    """Whatever comes and goes in whatever order: the books balance at each moment, and in the end all is free."""
    for seed in range(150):
        rng = random.Random(seed)
        cache = PagedCache(60, rng.choice([1, 2, 3, 8]), keep_prefixes=rng.choice([0, 1, 2, 5]))
        prefixes: list[Prefix] = []
        alive: list[Request] = []
        for _ in range(60):
            prefixes = [prefix for prefix in prefixes if prefix.pages and prefix.computed == prefix.end]
            prefixes = [one for one in prefixes if all(below.computed >= cut for below, cut in one.ancestors())]
            base = rng.choice([None, *prefixes])
            action = rng.random()
            if action < 0.3 and cache.free_pages > 20:
                base = prefix_on(cache, base, [rng.randrange(3) for _ in range(rng.randint(1, 6))])
                prefixes.append(base)
                alive.append(request_on(cache, base, rng.randint(1, 4), 3))
            elif action < 0.5 and cache.free_pages > 20:
                start = rng.randint(base.start, base.end) if base is not None else 0
                alive.append(request_on(cache, base, rng.randint(1, 4), 3, start=start))
            elif action < 0.8 and alive:
                cache.retire(alive.pop(rng.randrange(len(alive))), keep=rng.random() < 0.8)
            elif action < 0.9:
                for request in alive:
                    if rng.random() < 0.3:
                        cache.give_up(request)
                for prefix in {prefix for request in alive for prefix, _ in request.ancestors()}:
                    prefix.running = sum(
                        prefix in (below for below, _ in request.ancestors()) and bool(request.pages)
                        for request in alive
                    )
                (cache.evict if rng.random() < 0.5 else cache.evict_idle)(rng.randint(1, 60))
            else:
                cache.grow(cache.num_pages + rng.randint(0, 2))
            cache.check_integrity(alive)
        for request in alive:
            cache.retire(request)
            cache.check_integrity()
        cache.forget_kept()
        assert cache.free_pages == cache.num_pages


# --- the proof is one ----------------------------------------------------------------------------------------------


def _lose_a_page(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    request.pages.pop()


def _share_a_page(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    request.pages[0] = outer.pages[0]


def _free_a_page_in_use(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    cache._free.append(inner.pages[0])


def _overflow(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    request.computed += 2


def _compute_beyond_the_end(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    outer.computed += 1


def _read_what_is_not_computed(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    outer.computed -= 1


def _forget_a_reader(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    inner.refs -= 1


def _leak_a_reader(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    outer.refs += 1


def _release_what_is_read(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    cache.release(inner)


def _cut_off_what_is_read(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    inner.end -= 1


def _claim_to_be_kept(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    inner.kept = True


def _forget_how_far_is_read(cache: PagedCache, outer: Prefix, inner: Prefix, request: Request) -> None:
    inner.read_end -= 1


Corruption = Callable[[PagedCache, Prefix, Prefix, Request], None]
CORRUPTIONS: list[Corruption] = [
    _lose_a_page,
    _share_a_page,
    _free_a_page_in_use,
    _overflow,
    _compute_beyond_the_end,
    _read_what_is_not_computed,
    _forget_a_reader,
    _leak_a_reader,
    _release_what_is_read,
    _cut_off_what_is_read,
    _claim_to_be_kept,
    _forget_how_far_is_read,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_corruption_is_noticed(corrupt: Corruption) -> None:
    cache = PagedCache(10, page_size=2)
    outer = prefix_on(cache, None, range(3))
    inner = prefix_on(cache, outer, range(3))
    request = request_on(cache, inner, own=3)
    cache.check_integrity([request])
    corrupt(cache, outer, inner, request)
    with pytest.raises(AssertionError):
        cache.check_integrity([request])


def test_a_prefix_that_outlives_its_readers_is_noticed() -> None:
    cache = PagedCache(10, page_size=2)
    prefix = prefix_on(cache, None, range(3))
    request = request_on(cache, prefix)
    cache.release(request)
    with pytest.raises(AssertionError):
        cache.check_integrity([])
