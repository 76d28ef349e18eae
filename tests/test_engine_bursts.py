"""Bursts: decode rows run several times in a row with their state on the device, before the host looks at a token.

Without a GPU nothing is captured; what a graph would replay is run over the kernels' references.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from support_calls import answers, as_generate, noted
from support_decode_graphs import captured as captured  # a fixture
from support_decode_graphs import graphs as graphs  # a fixture
from support_device_loop import assert_best
from support_families import build, family_params
from support_kernels import plain
from support_parity import assert_parity, mixed_prompts, pages_of_memory
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator, GenerationInterrupted
from hf_batchllm.engine.device_loop import run_ahead
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import DecodeRows
from hf_batchllm.engine.loop import Engine
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.scheduler import FifoScheduler, GroupScheduler
from hf_batchllm.planning.step import Step

pytestmark = [plain, pytest.mark.usefixtures("graphs")]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Every step, in order."""
    return noted(monkeypatch, Engine, "_launch", lambda self, step: step, after=True)


def assert_counts(result: Any) -> None:
    report = result.report
    decoded = sum(max(len(generation.token_ids) - 1, 0) for generation in result)
    assert report.model_tokens == report.computed_tokens + report.recomputed_tokens + decoded + report.idle_tokens


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["llama", "gemma2", "mistral", "qwen3"]))
@pytest.mark.parametrize("steps", [6, 32])
@pytest.mark.parametrize("scheduler", ["groups", "fifo"])
def test_rows_that_end_at_any_step_of_a_burst(
    family: str, steps: int, scheduler: str, watched: list[Any], launched: list[Step]
) -> None:
    prompts, stops = mixed_prompts(4), list(range(0, 97, 11))
    config = {"steps_per_sync": steps, "page_size": 8, "scheduler": scheduler}
    result = answers(family, prompts, config, max_new_tokens=30, eos_token_id=stops)
    assert_best("cpu", family, prompts, result, 30, stops)
    assert_counts(result)
    assert 2 < max(step.times for step in launched) <= steps // 2
    assert result.report.idle_tokens > 0
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.some_cases
@pytest.mark.parametrize("seed", range(2))
def test_limits_of_their_own_and_little_memory(seed: int, watched: list[Any]) -> None:
    """Rows that are as long as they may become leave in the middle; pages that are short make bursts shorter."""
    dice, model = random.Random(seed), build("llama")
    shared = [dice.randrange(97) for _ in range(20)]
    prompts = [
        shared[: dice.choice([0, 11, 20])] + [dice.randrange(97) for _ in range(dice.randrange(1, 20))]
        for _ in range(16)
    ]
    limits = [50 - len(prompt) for prompt in prompts]
    stops = [1000] if seed % 2 else [3, 4]
    whole = None
    for pages in (200, 20):
        memory = pages_of_memory(model, pages, 4)
        config = {"steps_per_sync": 16, "page_size": 4, "min_shared_tokens": 4, "kv_memory": memory}
        result = answers(model, prompts, config, max_length=50, eos_token_id=stops)
        assert_best("cpu", "llama", prompts, result, limits, stops)
        assert_counts(result)
        whole = whole or result
    assert result.report.preemptions > 0 and whole.report.preemptions == 0
    assert result.token_ids == whole.token_ids
    assert all(cache.free_pages == cache.num_pages for cache in watched)


def test_the_host_sends_nothing_within_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, runs = (noted(monkeypatch, DecodeRows, name, lambda *_: 1) for name in ("load", "run"))
    as_generate("llama", mixed_prompts(2), 65, {"steps_per_sync": 32})
    assert (len(loads), len(runs)) == (4, 64)


def test_a_row_that_has_ended_reads_and_writes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, run = [], DecodeRows.run

    def noted(self: DecodeRows) -> None:
        state = self._state
        ended = state.status != 0
        assert (state.slot[ended] == -1).all() and (state.length[ended] == 0).all()
        before = state.token[ended].clone()
        run(self)
        assert (state.token[ended] == before).all()
        idle.append(int(ended.sum()))

    monkeypatch.setattr(DecodeRows, "run", noted)
    stops = list(range(0, 97, 9))
    answers("llama", mixed_prompts(3), {"steps_per_sync": 8}, max_new_tokens=40, eos_token_id=stops)
    assert max(idle) > 3


@pytest.mark.some_cases
@pytest.mark.parametrize("options", [{}, {"top_p": 0.8, "repetition_penalty": 1.3, "min_new_tokens": 5}])
def test_sampled_tokens_are_the_same_in_bursts_of_any_length(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_batchllm.sampling.token_picking.why_picked_by_host", lambda *_, **__: None)
    options |= {"max_new_tokens": 25, "do_sample": True, "seed": 3, "eos_token_id": [3, 4, 5]}
    drawn = [
        answers("llama", mixed_prompts(2), {"steps_per_sync": steps}, **options).token_ids for steps in (1, 2, 7, 32)
    ]
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]


def test_a_stream_left_within_a_burst(watched: list[Any]) -> None:
    prompts = mixed_prompts(3)
    generator = BatchGenerator(build("llama"), steps_per_sync=32)
    stream = generator.stream(prompts, max_new_tokens=60, eos_token_id=list(range(0, 97, 9)))
    next(stream)
    stream.close()
    assert all(cache.free_pages == cache.num_pages for cache in watched)
    result = generator.generate(prompts, max_new_tokens=20, eos_token_id=1000)
    assert_parity("llama", prompts, result, 20)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(["llama", "gpt_oss", "mixtral", "gemma2"]))
@pytest.mark.parametrize("count", [11, 16])
def test_idle_rows_are_finite(family: str, count: int, watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody looks at may still send other rows astray: through a router, or a sum over the batch.

    Whatever has not been written is NaN: the cache's pages, too.
    """
    seen, rows = [], ModelRunner.rows

    def noted(self: ModelRunner, *given: Any) -> torch.Tensor:
        logits = rows(self, *given)
        seen.append(len(logits))
        assert logits.isfinite().all()
        return logits

    def poisoned(make: Any) -> Any:
        def made(*given: Any, **rest: Any) -> torch.Tensor:
            tensor = make(*given, **rest)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    generator = BatchGenerator(build(family), steps_per_sync=8, page_size=4)
    monkeypatch.setattr(ModelRunner, "rows", noted)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    prompts = [[5, 7, 9] * 4 + [index, 5, 7] for index in range(count)]  # the bucket is of 16
    stops = list(range(0, 97, 5))
    generator.generate(prompts, max_new_tokens=40, eos_token_id=stops)
    assert seen[0] == 16


def odd_repeat(gives: Any) -> type[GroupScheduler]:
    class Odd(GroupScheduler):
        def repeat(self, step: Step, most: int) -> Any:
            return gives(super().repeat(step, most), most)

    return Odd


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda times, most: most + 1, r"Odd.repeat\(\) gave 9: it must give a whole number from 1 to 8"),
        (lambda times, most: 0, "gave 0: it must"),
        (lambda times, most: None, "gave None: it must"),
        (lambda times, most: float(times), "gave 8.0: it must"),
        (lambda times, most: times - 1, "gave 7, so Request.* needs pages up to position"),
    ],
)
def test_what_a_scheduler_says_of_repeating_is_checked(gives: Any, message: str) -> None:
    config = {"steps_per_sync": 16, "scheduler": odd_repeat(gives)()}
    with pytest.raises((TypeError, ValueError), match=message):
        answers("llama", mixed_prompts(1), config, max_new_tokens=30)


def test_steps_per_sync_beyond_all_reason(graphs: list[DecodeGraphs], launched: list[Step]) -> None:
    as_generate("llama", mixed_prompts(1), 9, {"steps_per_sync": 10**9})
    assert graphs[0].most_times == 9 and max(step.times for step in launched) == 8


def test_an_interrupt_while_tokens_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs beyond the end of an answer is not taken for tokens of prompts."""
    waits, start = [], run_ahead.start_copy_to_host

    def interrupted(tokens: torch.Tensor) -> Any:
        wait = start(tokens)

        def waits_once() -> Any:
            waits.append(1)
            if len(waits) == 5:
                raise KeyboardInterrupt
            return wait()

        return waits_once

    monkeypatch.setattr(run_ahead, "start_copy_to_host", interrupted)
    prompts = mixed_prompts(3)
    generator = BatchGenerator(build("llama"), steps_per_sync=8)
    with pytest.raises(GenerationInterrupted) as caught:
        generator.generate(prompts, max_new_tokens=60, eos_token_id=list(range(0, 97, 3)))
    assert caught.value.result.report.computed_tokens == generator.plan(prompts).computed_tokens


# -- how often rows run in a row -------------------------------------------------------------------------------


def running(kind: type[Any], lengths: list[int], limits: list[int], pages: int, can_stop: bool = False) -> Any:
    """A scheduler whose requests have all got their first token."""
    cache, scheduler = PagedCache(pages, 4), kind()
    requests = [
        Request(index, np.arange(length), limit, rank=index, can_stop=can_stop)
        for index, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]
    scheduler.start(requests, cache, 1000)
    step = scheduler.next()
    for request in step.sampling():
        request.expect()
        request.take(1)
    return scheduler


@pytest.mark.parametrize("kind", [GroupScheduler, FifoScheduler])
def test_as_often_as_the_longest_may_run(kind: type[Any]) -> None:
    scheduler = running(kind, [5, 6], [4, 20], pages=100)
    step = scheduler.next()
    assert scheduler.repeat(step, 16) == 16
    step.times = 16
    assert [step.times_of(request) for request in step.rows] == [3, 16]
    assert [request.computed for request in step.rows] == [5 + 3, 6 + 16]
    for request in step.rows:
        request.expect(step.times_of(request))
        assert len(request.pages) * 4 >= request.computed - request.start
        assert request.todo == 1 or request.exhausted
    scheduler.cache.check_integrity(step.rows)
    again = scheduler.next()
    assert [request.index for request in again.rows] == [1]
    assert scheduler.repeat(again, 16) == 3


def test_no_oftener_than_there_are_pages_for() -> None:
    scheduler = running(GroupScheduler, [4, 4], [40, 40], pages=100)
    step, someone = scheduler.next(), Request(9, np.arange(400), 1)  # each row takes its second page
    scheduler.cache.reserve(someone, (scheduler.cache.free_pages - 3) * 4)
    assert scheduler.repeat(step, 16) == 8
    assert scheduler.cache.free_pages == 1
    scheduler.cache.check_integrity(step.rows)


def test_answers_that_may_stop_begin_with_short_bursts() -> None:
    scheduler = running(GroupScheduler, [4, 4], [90, 90], pages=100, can_stop=True)
    times = []
    for _ in range(8):
        step = scheduler.next()
        step.times = scheduler.repeat(step, 16)
        times.append(step.times)
        for request in step.rows:
            request.expect(step.times)
            request.extend([5] * step.times, False)
    assert times == [4, 4, 4, 6, 9, 14, 16, 16]


def test_where_others_wait_the_first_to_end_ends_the_burst() -> None:
    for can_stop, most, times in ((False, 16, 6), (True, 16, 4), (True, 8, 2)):
        scheduler = running(FifoScheduler, [4, 4, 8], [7, 9, 9], pages=6, can_stop=can_stop)
        assert len(scheduler.waiting) == 1
        assert scheduler.repeat(scheduler.next(), most) == times


def test_rows_that_wait_for_their_turn_get_it_after_one_step() -> None:
    scheduler = running(GroupScheduler, [4, 4, 4], [9, 9, 9], pages=60)
    scheduler.max_batch_tokens = 2
    step = scheduler.next()
    assert len(step.rows) == 2 and scheduler.repeat(step, 16) == 1
