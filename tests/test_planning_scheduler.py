"""Schedulers without a model: what goes into each step, what is in the cache by then, and that all of it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support_cases import up_to
from support_families import build
from support_scheduler_runs import BUDGETS, PAGE_SIZES, Drive, Job, bare_minimum, jobs_strategy

from hf_batchllm import BatchConfig, BatchGenerator
from hf_batchllm.planning.base_scheduler import BaseScheduler, scheduler_name
from hf_batchllm.planning.expected_length import ExpectedLength
from hf_batchllm.planning.memory_forecast import Forecast
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.scheduler import FifoScheduler, GroupScheduler, make_scheduler
from hf_batchllm.planning.step import Chunk, Step


class GatheringScheduler(GroupScheduler):
    def __init__(self) -> None:
        super().__init__(gather_rows=3)


SCHEDULERS = [GroupScheduler, GatheringScheduler, FifoScheduler]


@settings(max_examples=up_to(400))
@given(
    jobs=jobs_strategy(),
    page_size=PAGE_SIZES,
    budget=BUDGETS,
    spare=st.sampled_from([0, 0, 1, 2, 5, 20, 1000]),
    fee=st.integers(0, 2),
    kind=st.sampled_from(SCHEDULERS),
)
def test_everything_is_run_once_and_ends(
    jobs: list[Job], page_size: int, budget: int, spare: int, fee: int, kind: Callable[[], BaseScheduler]
) -> None:
    cache = PagedCache(bare_minimum(jobs, page_size) + spare, page_size)
    drive = Drive(cache, kind(), budget)
    drive.call(jobs, fee)
    assert cache.free_pages == cache.num_pages
    assert drive.tokens == drive.needed + cache.lost_tokens


@settings(max_examples=up_to(400))
@given(
    calls=st.lists(jobs_strategy(most=6), min_size=2, max_size=4),
    page_size=PAGE_SIZES,
    budget=BUDGETS,
    spare=st.sampled_from([0, 0, 1, 2, 5, 1000]),
    keep=st.sampled_from([1, 1, 2, 5, 100]),
    kinds=st.lists(st.sampled_from(SCHEDULERS), min_size=4, max_size=4),
    grow=st.booleans(),
)
@example(  # a prefix below a kept one loses tokens, and the call after that loses none
    calls=[
        [Job([0], 1, 1), Job([0], 1, 1), Job([0], 6, 6), Job([0, 0, 0], 1, 1), Job([0, 0, 0], 1, 1)],
        [Job([0, 0, 0], 1, 1), Job([0, 1, 1, 0, 0], 1, 1), Job([0, 1, 1, 0, 0], 1, 1)],
        [Job([0, 1, 0, 0], 2, 2)],
        [Job([0], 2, 2), Job([0], 2, 2), Job([1, 0], 1, 1)],
    ],
    page_size=1,
    budget=3,
    spare=1,
    keep=2,
    kinds=[GroupScheduler] * 4,
    grow=False,
)
def test_calls_in_a_row_on_a_cache_that_keeps_prefixes(
    calls: list[list[Job]],
    page_size: int,
    budget: int,
    spare: int,
    keep: int,
    kinds: list[Callable[[], BaseScheduler]],
    grow: bool,
) -> None:
    least = [bare_minimum(jobs, page_size) for jobs in calls]
    cache = PagedCache((least[0] if grow else max(least)) + spare, page_size, keep_prefixes=keep)
    drive = Drive(cache, kinds[0](), budget)
    for jobs, minimum, kind in zip(calls, least, kinds[: len(calls)], strict=True):
        if cache.num_pages < minimum:
            cache.grow(minimum)
        drive.scheduler = kind()
        drive.call(jobs)
        assert cache.kept_prefixes <= keep
        held = {page for prefix in drive.kept for page in prefix.pages}
        assert cache.free_pages == cache.num_pages - len(held)
        assert drive.tokens == drive.needed + drive.lost_tokens
    cache.forget_kept()
    assert cache.free_pages == cache.num_pages


def test_deep_chains_need_no_recursion() -> None:
    jobs = [Job([*range(length), 9999], 2, 2) for length in range(1, 1100)]
    cache = PagedCache(5000, 1, keep_prefixes=1)
    scheduler = GroupScheduler()
    drive = Drive(cache, scheduler, 10_000)
    drive.begin(jobs)
    assert max(len(request.ancestors()) for request in drive.lineup.requests) > 1000
    while (step := scheduler.next()) is not None:  # unchecked: what is checked for each token is cubic here
        for request in step.sampling():
            request.take(1)
            if request.done:
                scheduler.finish(request)
    cache.check_integrity([])
    cache.forget_kept()
    assert cache.free_pages == cache.num_pages


# --- only what is new counts ---------------------------------------------------------------------------------------


class CountsWholePrompts(GroupScheduler):
    """Admission as it is without knowing of prefixes: a newcomer must have room for every page of its prompt."""

    def _fits(self, request: Request, forecast: Forecast) -> bool:
        if self.running and self.cache.pages_for(request.length) > self.cache.free_pages:
            return False
        return super()._fits(request, forecast)


class ChargesWholePrompts(GroupScheduler):
    """The budget as it is without knowing of prefixes: a newcomer is charged for every token of its prompt."""

    def _fill(self, request: Request, step: Step, budget: int) -> int:
        if step.tokens and request.length > budget:
            return budget  # the next step may have room for it
        return max(super()._fill(request, step, budget), request.length)


def members_of_one_document(count: int = 8, document: int = 60) -> list[Job]:
    return [Job([*range(document), 100 + member], 4, 4) for member in range(count)]


def test_pages_that_are_there_are_not_counted_again() -> None:
    """Eight members of a document: 15 pages for it and one for each, where whole prompts would take 16 each."""

    def most_running(scheduler: BaseScheduler) -> int:
        return Drive(PagedCache(15 + 8, 4), scheduler, 10_000).call(members_of_one_document()).most_running

    assert most_running(GroupScheduler()) == 8
    assert most_running(FifoScheduler()) == 8
    assert most_running(CountsWholePrompts()) == 1


def test_tokens_that_are_there_are_not_charged_again() -> None:
    """With the document computed, its members bring a token each: all enter one step, though whole they would not."""

    def prompt_steps(scheduler: BaseScheduler) -> list[int]:
        drive = Drive(PagedCache(200, 4, keep_prefixes=1), scheduler, 64)
        drive.call(members_of_one_document(2))
        drive.scheduler = type(scheduler)()
        drive.call(members_of_one_document())
        return [len(step.chunks) for step in drive.steps if step.chunks]

    assert prompt_steps(GroupScheduler()) == [8]
    assert prompt_steps(FifoScheduler()) == [8]
    assert len(prompt_steps(ChargesWholePrompts())) == 8


def test_a_prompt_shared_whole_costs_one_token() -> None:
    jobs = [Job(list(range(50)), 1, 1) for _ in range(5)]
    drive = Drive(PagedCache(100, 4), GroupScheduler(), 10_000).call(jobs)
    assert [step.tokens for step in drive.steps] == [49 + 5]


def test_a_prefix_and_its_members_run_in_the_same_step() -> None:
    """Nested ones too, in the order in which they stand on each other: no step is spent on prefixes alone."""
    outer, inner = list(range(20)), list(range(100, 130))
    jobs = [Job([*outer, *inner, 1], 2, 2), Job([*outer, *inner, 2, 3], 2, 2), Job([*outer, 4], 2, 2)]
    drive = Drive(PagedCache(100, 4), GroupScheduler(), 10_000).call(jobs)
    first = drive.steps[0]
    assert [chunk.end - chunk.begin for chunk in first.chunks] in ([20, 30, 1, 2, 1], [20, 1, 30, 1, 2])
    assert len(drive.steps) == 2 and len(drive.steps[1].rows) == 3


def test_a_prompt_longer_than_the_budget_runs_in_chunks_beside_decode_rows() -> None:
    jobs = [Job([1, 2, 3], 20, 20), Job(list(range(10, 60)), 2, 2)]
    drive = Drive(PagedCache(100, 4), GroupScheduler(), 10).call(jobs)
    mixed = [step for step in drive.steps if step.rows and step.chunks]
    assert len(mixed) >= 4
    assert all(step.tokens == 10 for step in mixed[:4])
    assert len(drive.steps) == 20  # the first is done in as many steps as it has tokens: nothing held it up


# --- when memory is short ------------------------------------------------------------------------------------------


def test_an_expectation_too_low_is_made_good_by_preemption() -> None:
    """All run to a limit of which half is expected: the youngest give way, come back, and nothing is lost but time."""
    jobs = [Job([10 + member, 1, 2], 40, 40) for member in range(6)]
    cache = PagedCache(6 * 11 // 2 + 4, 4)  # whole, each takes 11 pages
    drive = Drive(cache, GroupScheduler(), 10_000)
    drive.call(jobs)
    assert drive.most_running > 3
    assert drive.scheduler.preemptions > 0 and cache.lost_tokens > 0
    assert drive.tokens == 6 * (3 + 39) + cache.lost_tokens
    assert cache.free_pages == cache.num_pages
    orders = [[request.rank for request in step.rows] for step in drive.steps]
    assert all(0 in order for order in orders[1:40]), "the oldest missed a step"


def test_a_prefix_whose_members_were_preempted_stays_for_them() -> None:
    document = list(range(12))
    jobs = [Job([99, 98, 97], 60, 60), *(Job([*document, member], 30, 30) for member in (50, 51))]
    cache = PagedCache(28, 4)
    drive = Drive(cache, GroupScheduler(), 10_000).call(jobs)
    assert drive.tokens == drive.needed + cache.lost_tokens
    assert cache.free_pages == 28


def test_the_plain_scheduler_never_preempts() -> None:
    jobs = [Job([10 + member, 1, 2], 40, 40) for member in range(6)]
    cache = PagedCache(25, 4)
    drive = Drive(cache, FifoScheduler(), 10_000).call(jobs)
    assert drive.scheduler.preemptions == 0 and cache.lost_tokens == 0
    assert drive.most_running == 2  # 11 pages each


def test_the_plain_scheduler_makes_room_without_dropping_what_it_is_about_to_read() -> None:
    """Two documents are there and do not fit beside the longest answer: the other one goes, not the one's own."""
    one, other = [1] * 5, [2] * 5
    jobs = [Job([*one, 7], 1, 1), Job([*other, 7], 1, 1), Job([*one, 8], 6, 6), Job([*other, 8], 1, 1)]
    cache = PagedCache(12, 1)
    drive = Drive(cache, FifoScheduler(), 100).call(jobs)
    assert drive.tokens == drive.needed + cache.lost_tokens
    assert cache.lost_tokens == 5


def test_a_kept_prefix_that_fills_the_cache_gives_way_to_who_reads_a_little_of_it() -> None:
    """The kept prefix is cut down to what is read of it; at once, or when the answer grows."""
    document = list(range(12))
    for budget in (1, 5, 1000):
        for kind in SCHEDULERS:
            cache = PagedCache(14, 1, keep_prefixes=1)
            drive = Drive(cache, GroupScheduler(), budget)
            drive.call([Job([*document, 50], 1, 1), Job([*document, 51], 1, 1)])
            assert cache.free_pages == 2 and cache.kept_prefixes == 1
            drive.scheduler = kind()
            drive.call([Job([0, 1, 2, 60], 11, 11), Job([0, 1, 2, 61], 11, 2)])
            assert drive.lineup.cached_tokens == 3 and drive.lineup.without_prefixes == 0
            assert drive.lost_tokens <= 3 + 2 * 2
            cache.forget_kept()
            assert cache.free_pages == 14


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_kept_prefixes_do_not_keep_newcomers_out(kind: Callable[[], BaseScheduler]) -> None:
    cache = PagedCache(20, 1, keep_prefixes=5)
    drive = Drive(cache, kind(), 1000)
    for document in range(4):
        drive.call([Job([document] * 4 + [9, own], 1, 1) for own in (50, 51)])
    assert cache.kept_prefixes >= 3
    drive.scheduler = kind()
    drive.call([Job([30 + own] * 6, 1, 1) for own in range(3)])
    assert drive.most_running == 3  # side by side: 18 pages
    assert drive.lost_tokens == 0  # nobody in this call reads what went


@settings(max_examples=100)
@given(limits=st.lists(st.integers(1, 6), min_size=1, max_size=6), generated=st.integers(0, 3))
def test_the_expected_length_stays_between_what_is_there_and_the_limit(limits: list[int], generated: int) -> None:
    expected = ExpectedLength()
    request = Request(0, np.zeros(3, np.int32), 6)
    request.generated = [0] * generated
    for limit in limits * 3:
        assert generated < expected.of(request) <= 6
        expected.learn(limit)


def test_the_expected_length_learns() -> None:
    expected = ExpectedLength()
    request = Request(0, np.zeros(3, np.int32), 1000)
    assert expected.of(request) == 500
    for _ in range(20):
        expected.learn(10)
    assert expected.of(request) == 10
    for length in (10, 30) * 200:
        expected.learn(length)
    assert 20 < expected.of(request) <= 31
    request.generated = [0] * 400
    assert expected.of(request) == 401


def test_short_answers_let_more_in() -> None:
    """A limit of 200 of which 2 are used: once that is known, many more run side by side."""
    jobs = [Job([10 + member, 1, 2], 200, 2) for member in range(60)]
    drive = Drive(PagedCache(130, 4), GroupScheduler(), 10_000).call(jobs)
    beside = [len(step.sampling()) for step in drive.steps]
    assert max(beside[:2]) <= 16 and max(beside) >= 40


# --- one's own -----------------------------------------------------------------------------------------------------


class OneByOne:
    """The least that a scheduler can be: one request at a time, a token at a time."""

    def __init__(self) -> None:
        self.preemptions = 0
        self.calls: list[str] = []

    def start(self, requests: Sequence[Request], cache: PagedCache, max_batch_tokens: int) -> None:
        self.calls.append("start")
        self.queue, self.cache = list(requests), cache

    def next(self) -> Step | None:
        self.calls.append("next")
        if not self.queue:
            return None
        request = self.queue[0]
        for unit, end in [*request.ancestors(), (request, request.length)]:
            if unit.computed < end:
                unit.computed += 1
                self.cache.reserve(unit, unit.computed)
                return Step(chunks=[Chunk(unit, unit.computed - 1, unit.computed)])
        raise AssertionError("nothing left to run, and not finished")

    def finish(self, request: Request) -> None:
        self.calls.append("finish")
        self.queue.remove(request)
        self.cache.retire(request)


@settings(max_examples=50)
@given(jobs=jobs_strategy(), page_size=PAGE_SIZES)
def test_a_scheduler_of_ones_own_runs_everything(jobs: list[Job], page_size: int) -> None:
    cache = PagedCache(200, page_size)
    drive = Drive(cache, OneByOne(), 1).call(jobs)
    assert drive.tokens == drive.needed
    assert cache.free_pages == 200


def test_a_scheduler_of_ones_own_is_used() -> None:
    model = build("llama")
    mine = OneByOne()
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5], [7, 8]]
    found = BatchGenerator(model, scheduler=mine, min_shared_tokens=1).generate(prompts, max_new_tokens=4)
    plain = BatchGenerator(model).generate(prompts, max_new_tokens=4)
    assert [row.token_ids for row in found] == [row.token_ids for row in plain]
    assert mine.calls.count("start") == 1 and mine.calls.count("finish") == 3
    assert found.report.steps == mine.calls.count("next") - 1 == 3 + 1 + 1 + 2 + 3 * 3


def test_schedulers_by_name() -> None:
    assert isinstance(make_scheduler("groups"), GroupScheduler)
    assert isinstance(make_scheduler("fifo"), FifoScheduler)
    mine = GroupScheduler()
    assert make_scheduler(BatchConfig(scheduler=mine).scheduler) is mine


def test_a_scheduler_of_another_class_has_the_defaults_of_a_base_scheduler() -> None:
    made = make_scheduler(BatchConfig(scheduler=OneByOne()).scheduler)
    assert isinstance(made, BaseScheduler) and scheduler_name(made) == "OneByOne"
    assert not made.runs_ahead and not made.ends_waiting and made.preemptions == 0
    assert made.repeat(Step(), 5) == 1


# --- decode rows that wait for each other -------------------------------------------------------------------------


def steps_of(gather_rows: int, jobs: list[Job], budget: int) -> list[tuple[int, int]]:
    """Of each step: decode rows, and tokens of prompts."""
    drive = Drive(PagedCache(1000, 4), GroupScheduler(gather_rows), budget).call(jobs)
    return [(len(step.rows), step.tokens - len(step.rows)) for step in drive.steps]


def test_few_rows_wait_while_prompts_fill_the_step() -> None:
    jobs = [Job([index] * 10, 4, 4) for index in range(4)]
    eager, patient = steps_of(0, jobs, 10), steps_of(100, jobs, 10)
    assert eager[1] == (1, 9)
    assert patient == [(0, 10)] * 4 + [(4, 0)] * 3
    assert len(patient) < len(eager)


def test_rows_wait_no_longer_than_until_there_are_enough() -> None:
    jobs = [Job([index] * 10, 4, 4) for index in range(6)]
    steps = steps_of(2, jobs, 10)
    assert steps[:3] == [(0, 10), (0, 10), (2, 8)]


def test_rows_do_not_wait_for_prompts_that_leave_the_step_half_empty() -> None:
    jobs = [Job([1] * 10, 4, 4), Job([2] * 13, 4, 4)]
    assert steps_of(100, jobs, 10) == [(0, 10), (0, 10), (1, 3), (2, 0), (2, 0), (1, 0)]


def test_rows_do_not_wait_for_prompts_that_memory_keeps_out() -> None:
    jobs = [Job([index] * 10, 4, 4) for index in range(4)]
    drive = Drive(PagedCache(8, 4), GroupScheduler(100), 10).call(jobs)  # two of them at once, at most
    prompts, rows = [(0, 10)] * 2, [(2, 0)] * 3
    assert [(len(step.rows), step.tokens - len(step.rows)) for step in drive.steps] == [*prompts, *rows] * 2
