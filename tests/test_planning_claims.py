"""Schedulers of a process that runs a call together with others: what another has taken is forgotten at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_families import build, random_prompts
from support_parity import assert_parity
from support_scheduler_runs import Drive, Job

from hf_batchllm import BaseScheduler, BatchGenerator
from hf_batchllm.engine.call import Call
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import FinishReason, Request
from hf_batchllm.planning.scheduler import FifoScheduler, GroupScheduler
from hf_batchllm.planning.step import Chunk, Step
from hf_batchllm.pool.piece_claims import PieceClaims


@dataclass
class Others:
    """Another process takes ``theirs`` as soon as a number of requests has been asked for."""

    theirs: set[int]
    after: int = 0
    asked: list[int] = field(default_factory=list)
    mine: set[int] = field(default_factory=set)

    def take(self, index: int) -> bool:
        self.asked.append(index)
        if index in self.mine:
            return True
        if index in self.theirs and len(self.asked) > self.after:
            return False
        self.mine.add(index)
        return True


@given(
    jobs=st.lists(
        st.builds(
            Job, st.lists(st.integers(0, 1), min_size=1, max_size=6), limit=st.integers(1, 5), stops=st.integers(1, 5)
        ),
        min_size=1,
        max_size=9,
    ),
    theirs=st.sets(st.integers(0, 8)),
    after=st.integers(0, 6),
    page_size=st.integers(1, 3),
    budget=st.integers(1, 9),
    kind=st.sampled_from([GroupScheduler, FifoScheduler, lambda: GroupScheduler(4)]),
)
def test_what_another_has_is_withdrawn_and_the_rest_runs(
    jobs: list[Job],
    theirs: set[int],
    after: int,
    page_size: int,
    budget: int,
    kind: Callable[[], BaseScheduler],
) -> None:
    cache = PagedCache(sum(job.tokens + 1 for job in jobs) + 8, page_size)
    drive = Drive(cache, kind(), budget)
    claims = drive.scheduler.claims = Others(theirs, after)
    drive.begin(jobs)
    while (step := drive.next()) is not None:
        drive.sample(step)
        assert len(drive.steps) < 500
    for request, job in zip(drive.lineup.requests, jobs, strict=True):
        assert not request.pages and request.base is None
        if request.index in claims.mine:
            assert len(request.generated) == min(job.stops, job.limit)
        else:
            assert request.index in theirs and request.finish_reason is FinishReason.WITHDRAWN
            assert not request.generated
    assert cache.free_pages == cache.num_pages


@pytest.mark.parametrize("scheduler", ["groups", "fifo"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
@pytest.mark.filterwarnings("ignore:`scheduler` has no effect")
def test_only_claimed_prompts_are_run(scheduler: str, options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, claims = random_prompts(random.Random(2), 97, "nested", 12), Others({1, 2, 5, 11})
    found = run_with(claims, monkeypatch, build("llama"), prompts, scheduler, **options)
    assert sorted(found) == [0, 3, 4, 6, 7, 8, 9, 10]
    if "num_beams" not in options:
        with BatchGenerator(build("llama")) as whole:
            assert_parity("llama", prompts, whole.generate(prompts, max_new_tokens=5, eos_token_id=None), 5)
            wanted = whole.generate(prompts, max_new_tokens=5, eos_token_id=None).token_ids
        assert all(found[index] == wanted[index] for index in found)


class OneByOne(BaseScheduler):
    """A scheduler that knows nothing of claims."""

    def start(self, requests: list[Request], cache: PagedCache, max_batch_tokens: int) -> None:  # type: ignore[override]
        self.left, self.cache, self.most = list(requests), cache, max_batch_tokens

    def next(self) -> Step | None:
        step = Step()
        if not self.left:
            return None
        request = self.left[0]
        for prefix, end in request.prefixes():
            self.cache.reserve(prefix, end)
            if prefix.computed < end:
                step.chunks.append(Chunk(prefix, prefix.computed, end))
                prefix.computed = end
        self.cache.reserve(request, request.length)
        step.chunks.append(Chunk(request, request.computed, request.length))
        request.computed = request.length
        return step

    def finish(self, request: Request) -> None:
        self.left.remove(request)
        self.cache.retire(request)


def test_a_scheduler_that_does_not_ask_has_all_claimed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, claims = random_prompts(random.Random(2), 97, "prefix", 6), Others({0, 4})
    found = run_with(claims, monkeypatch, build("llama"), prompts, OneByOne())
    assert sorted(found) == [1, 2, 3, 5] and claims.asked == [0, 1, 2, 3, 4, 5]


def run_with(claims, monkeypatch, model, prompts, scheduler, **options):  # type: ignore[no-untyped-def]
    """The tokens of each prompt that was run."""
    real = Call.__init__

    def claiming(self: Call, *given: object, **named: object) -> None:
        real(self, *given, **named, claims=claims)  # type: ignore[arg-type]

    monkeypatch.setattr(Call, "__init__", claiming)
    with BatchGenerator(model, scheduler=scheduler, max_batch_tokens=64) as generator:
        stream = generator.stream(prompts, max_new_tokens=5, eos_token_id=None, **options)
        found = {each.index: each.token_ids for each in stream}
    monkeypatch.undo()
    return found


def test_pieces_that_have_begun_are_not_given_up() -> None:
    told: list[int] = []
    claims = PieceClaims({0: 7, 1: 7, 2: 8, 3: 9, 4: 10}, told.append)
    assert claims.take(1)
    claims.give_up([7, 8])
    claims.give_up([8, 9])
    assert claims.take(0) and not claims.take(2) and not claims.take(3) and claims.take(4)
    assert told == [7, 10]
