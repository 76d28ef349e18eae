"""What memory is expected to be needed, and who is let in because of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support_cases import up_to
from support_scheduler_runs import PAGE_SIZES, Drive, Job, bare_minimum, jobs_strategy

from hf_batchllm.planning.memory_forecast import Lifetimes
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import FinishReason, Request
from hf_batchllm.planning.scheduler import GroupScheduler


class KnowsLengths(GroupScheduler):
    """No answer ends before it is as long as it may become."""

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        for request in requests:
            request.can_stop = False
        super().start(requests, cache, max_batch_tokens)


def ended(tokens: int, reason: FinishReason = FinishReason.STOP, limit: int = 1000) -> Request:
    request = Request(0, np.zeros(3, np.int32), limit)
    request.generated = [0] * tokens
    request.finish_reason = reason
    return request


def longer_than(lifetimes: Lifetimes, tokens: int, running: Sequence[int] = ()) -> float:
    return float(lifetimes.survival(np.array(running, dtype=np.int64)).longer(np.array([tokens]))[0])


def to_their_limits(jobs: list[Job]) -> list[Job]:
    return [replace(job, stops=job.limit) for job in jobs]


SPARE = st.sampled_from([0, 1, 2, 5, 20])


@settings(max_examples=up_to(200))
@given(jobs=jobs_strategy(), page_size=PAGE_SIZES, spare=SPARE, budget=st.sampled_from([10, 11, 17, 10_000]))
def test_where_lengths_are_known_nobody_is_preempted(jobs: list[Job], page_size: int, spare: int, budget: int) -> None:
    """Nor where a prompt takes several steps, beside decode rows that all go on."""
    cache = PagedCache(bare_minimum(jobs, page_size) + spare, page_size)
    drive = Drive(cache, KnowsLengths(), budget).call(to_their_limits(jobs))
    assert drive.scheduler.preemptions == 0


def test_a_long_prompt_holds_its_pages_until_it_has_been_computed_and_answered() -> None:
    """Its last token comes in the second step, so it ends in the fifth, when the first needs a third page."""
    jobs = to_their_limits([Job([0], 5, 5), Job([1] * 10, 4, 4)])
    drive = Drive(PagedCache(9, 2), KnowsLengths(), 10).call(jobs)
    assert drive.scheduler.preemptions == 0


class PreemptsBesideOthers(KnowsLengths):
    """Who is alone may have to enter anew once, so that a kept prefix is cut down to what it reads."""

    beside = 0

    def _preempt(self, request: Request) -> None:
        self.beside += len(self.running) > 1
        super()._preempt(request)


@settings(max_examples=up_to(200))
@given(
    calls=st.lists(jobs_strategy(most=6), min_size=2, max_size=3),
    page_size=PAGE_SIZES,
    spare=SPARE,
    keep=st.sampled_from([1, 2, 100]),
)
def test_nor_where_prefixes_were_kept_from_earlier_calls(
    calls: list[list[Job]], page_size: int, spare: int, keep: int
) -> None:
    """What somebody waits for, the newcomer itself among them, is no room for its answer."""
    pages = max(bare_minimum(jobs, page_size) for jobs in calls) + spare
    drive = Drive(PagedCache(pages, page_size, keep_prefixes=keep), KnowsLengths(), 10_000)
    for jobs in calls:
        drive.scheduler = PreemptsBesideOthers()
        drive.call(to_their_limits(jobs))
        assert drive.scheduler.beside == 0


def test_who_ends_soon_makes_room_for_the_growth_of_others() -> None:
    """Four short answers and four long ones, of 16 and 2 pages in the end: at no time do they need all of them."""
    jobs = [Job([10 + member], 64, 64) for member in range(4)] + [Job([50 + member], 8, 8) for member in range(4)]
    drive = Drive(PagedCache(4 * 16, 4), KnowsLengths(), 10_000).call(jobs)
    assert drive.most_running == 8
    assert drive.scheduler.preemptions == 0
    assert len(drive.steps) == 64


def test_a_document_leaves_with_its_last_readers() -> None:
    """It has 10 pages and each reader 5 in the end, when the long one has 30: 50 at most, though that becomes 48."""
    document = list(range(40))
    jobs = [Job([*document, 50 + member], 20, 20) for member in range(2)] + [Job([90] * 100, 90, 90)]

    def beside(pages: int) -> int:
        drive = Drive(PagedCache(pages, 4), KnowsLengths(), 10_000).call(jobs)
        assert drive.scheduler.preemptions == 0
        return len(drive.steps[0].sampling())

    assert beside(50) == 3
    assert beside(49) == 2


def test_lengths_are_learned() -> None:
    lifetimes = Lifetimes(1000)
    assert 0.2 < longer_than(lifetimes, 30) < 0.8
    for _ in range(100):
        lifetimes.learn(ended(10))
    assert longer_than(lifetimes, 4) > 0.9
    assert longer_than(lifetimes, 30) < 0.05
    for _ in range(100):
        lifetimes.learn(ended(400))
    assert 0.4 < longer_than(lifetimes, 300) < 0.6


def test_those_who_have_not_ended_count_as_long_as_they_have_come() -> None:
    lifetimes = Lifetimes(1000)
    for _ in range(20):
        lifetimes.learn(ended(10))
    assert longer_than(lifetimes, 30, running=[100] * 20) > 0.4 > longer_than(lifetimes, 30)
    assert longer_than(lifetimes, 30, running=[5] * 20) < 0.2


def test_a_limit_says_nothing_of_what_would_have_come() -> None:
    lifetimes = Lifetimes(1000)
    for _ in range(20):
        lifetimes.learn(ended(50, FinishReason.LENGTH, limit=50))
    assert longer_than(lifetimes, 60) > 0.7


@given(st.lists(st.integers(1, 37), max_size=30), st.lists(st.integers(0, 36), max_size=30), st.integers(37, 3000))
def test_fewer_and_fewer_go_on(lengths: list[int], running: list[int], longest: int) -> None:
    lifetimes = Lifetimes(longest)
    for length in lengths:
        lifetimes.learn(ended(length))
    survival = lifetimes.survival(np.array(running, dtype=np.int64))
    share = survival.longer(np.arange(longest + 1))
    assert (share > 0).all() and (np.diff(share) <= 0).all() and share[0] == 1
