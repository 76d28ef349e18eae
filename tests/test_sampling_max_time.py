"""``max_time``: a call that ends when its time is over, whatever it is doing. The clock is the test's."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_families import build
from support_kernels import plain
from support_parity import mixed_prompts, pages_of_memory, reference
from support_parity import watched as watched  # a fixture
from transformers import GenerationConfig, MaxTimeCriteria

from hf_batchllm import BatchGenerator, accelerated
from hf_batchllm.engine.loop import Engine
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import FinishReason, Request
from hf_batchllm.planning.scheduler import FifoScheduler, GroupScheduler
from hf_batchllm.planning.step import Step

pytestmark = [plain, pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")]
FAMILY = "llama"
PROMPTS = mixed_prompts(2)


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A second for each time that rows are run."""
    clock, launch = Clock(), Engine._launch

    def ticking(self: Engine, step: Step) -> Any:
        running = launch(self, step)
        clock.now += step.times
        return running

    monkeypatch.setattr(time, "time", lambda: clock.now)
    monkeypatch.setattr(Engine, "_launch", ticking)
    return clock


def assert_cut_short(result: Any, prompts: Sequence[Sequence[int]], limit: int) -> None:
    """Each row has what it would have had, up to some point, and says whether that is all."""
    for prompt, generation in zip(prompts, result, strict=True):
        expected, sure = reference(FAMILY, tuple(prompt), limit)
        tokens = generation.token_ids
        assert tokens[:sure] == expected[: min(sure, len(tokens))]
        assert generation.finish_reason == ("length" if len(tokens) == limit else "time")
    report = result.report
    decoded = sum(max(len(tokens) - 1, 0) for tokens in result.token_ids)
    assert report.sequences == report.finished == len(prompts)
    assert report.new_tokens == sum(map(len, result.token_ids))
    assert report.model_tokens == report.computed_tokens + report.recomputed_tokens + decoded + report.idle_tokens
    assert report.computed_tokens >= 0


@pytest.mark.some_cases
@pytest.mark.parametrize("scheduler", ["groups", "fifo"])
@pytest.mark.parametrize("seconds", [-1, 3, 9, 14, 1000])
def test_whoever_has_not_ended_keeps_what_it_has(
    scheduler: str, seconds: float, clock: Clock, watched: list[Any]
) -> None:
    generator = BatchGenerator(build(FAMILY), scheduler=scheduler, page_size=4, max_batch_tokens=32)
    result = generator.generate(PROMPTS, max_new_tokens=8, max_time=seconds, progress=False)
    assert_cut_short(result, PROMPTS, 8)
    reasons = [generation.finish_reason for generation in result]
    assert ("time" in reasons) == (seconds < 1000)
    if seconds == 9:
        begun = [bool(tokens) for tokens in result.token_ids]
        assert any(begun) and not all(begun) and result[begun.index(False)].text is None
    assert result.report.steps == seconds + 1 or seconds == 1000
    assert all(cache.free_pages == cache.num_pages for cache in watched)
    again = generator.generate(PROMPTS, max_new_tokens=8, progress=False)
    assert_cut_short(again, PROMPTS, 8)


@pytest.mark.some_cases
@pytest.mark.parametrize(("steps", "pages"), [(1, 28), (2, None), (8, 28), (32, 28), (32, None)])
def test_what_is_on_its_way_arrives(
    steps: int, pages: int | None, device: str, clock: Clock, watched: list[Any]
) -> None:
    memory = None if pages is None else pages_of_memory(build(FAMILY), pages, 4)
    generator = BatchGenerator(
        model_on(device, FAMILY),
        steps_per_sync=steps,
        page_size=4,
        kv_memory=memory,
        min_shared_tokens=4,
        keep_prefixes=2,
    )
    preemptions = 0
    for seconds in (3, 15, 22):
        options = {"max_time": seconds, "eos_token_id": 1000}  # which never comes, and nobody knows
        result = generator.generate(PROMPTS, max_new_tokens=24, progress=False, **options)
        assert_cut_short(result, PROMPTS, 24)
        assert "time" in [generation.finish_reason for generation in result] or seconds > 15
        preemptions += result.report.preemptions
    assert preemptions > 0 or pages is None
    assert_cut_short(generator.generate(PROMPTS, max_new_tokens=24, progress=False), PROMPTS, 24)
    generator.close()


def test_each_prompt_has_its_own_time(clock: Clock, watched: list[Any]) -> None:
    made = [GenerationConfig(max_new_tokens=12, max_time=seconds) for seconds in (3, 6, None, 1000)]
    configs = [made[index % 4] for index in range(len(PROMPTS))]
    result = BatchGenerator(build(FAMILY), page_size=4).generate(PROMPTS, configs, progress=False)
    assert_cut_short(result, PROMPTS, 12)
    reasons = [generation.finish_reason for generation in result]
    assert [reason == "time" for reason in reasons] == [index % 4 < 2 for index in range(len(PROMPTS))]
    assert all(cache.free_pages == cache.num_pages for cache in watched)


def test_the_users_own_clock_began_when_it_did(clock: Clock) -> None:
    prompts = PROMPTS[:3]
    with BatchGenerator(build(FAMILY)) as generator:
        for criteria in ([MaxTimeCriteria(7)], [MaxTimeCriteria(107, initial_timestamp=clock.now - 100)]):
            # In the place of `max_time`, as in ``generate``.
            result = generator.generate(prompts, max_new_tokens=20, max_time=2, stopping_criteria=criteria)
            assert {generation.finish_reason for generation in result} == {"time"}
            assert max(map(len, result.token_ids)) >= 6
            clock.now = 1000.0


def test_rows_of_a_tensor_that_have_not_begun_are_padding(clock: Clock) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7], [30, 31, 32, 33]])
    with BatchGenerator(build(FAMILY), max_batch_tokens=4) as generator:
        got = generator.generate(input_ids=ids, max_new_tokens=9, max_time=1, pad_token_id=99)
        assert got[:, :4].tolist() == ids.tolist()
        assert (got[:, 4:] == 99).any() and (got[:, 4:] != 99).any()
        nothing = generator.generate(input_ids=ids, max_new_tokens=9, max_time=-1, pad_token_id=99)
        assert nothing.tolist() == ids.tolist()


def test_under_accelerated(clock: Clock) -> None:
    model, ids = build(FAMILY), torch.tensor([[5, 6, 7, 8]])
    with accelerated(model):
        got = model.generate(ids, max_new_tokens=30, max_time=5.5)
        assert model.generate.last_report.steps == 6
    assert got[0, 4:].tolist() == reference(FAMILY, (5, 6, 7, 8), 30)[0][:6]


@pytest.mark.parametrize("plain_one", [FifoScheduler, GroupScheduler])
def test_a_scheduler_that_cannot_end_who_waits(plain_one: type[Any], clock: Clock, watched: list[Any]) -> None:
    """Each gets a token then, as in ``generate``; and whoever wrote the scheduler is told so."""

    class Own(plain_one):  # type: ignore[misc]
        ends_waiting = False

    generator = BatchGenerator(build(FAMILY), scheduler=Own(), page_size=4, max_batch_tokens=40)
    with pytest.warns(UserWarning, match="Own cannot end requests that wait, so when the time is over each prompt"):
        result = generator.generate(PROMPTS, max_new_tokens=8, max_time=6, progress=False)
    assert_cut_short(result, PROMPTS, 8)
    lengths = list(map(len, result.token_ids))
    assert min(lengths) == 1 < max(lengths)
    assert all(cache.free_pages == cache.num_pages for cache in watched)


def test_a_stream_hands_out_all_of_them(clock: Clock) -> None:
    generator = BatchGenerator(build(FAMILY), max_batch_tokens=16)
    found = list(generator.stream(PROMPTS, max_new_tokens=30, max_time=8))
    assert sorted(generation.index for generation in found) == list(range(len(PROMPTS)))
    assert {generation.finish_reason for generation in found} == {"time"}
    assert generator.last_report is not None and generator.last_report.finished == len(PROMPTS)


def test_the_bar_ends_full(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    generator = BatchGenerator(build(FAMILY), max_batch_tokens=16)
    generator.generate(PROMPTS, max_new_tokens=30, max_time=8, progress=True)
    last = re.split(r"[\r\n]+", capsys.readouterr().err.strip())[-1]
    assert last.startswith("100%") and f"{len(PROMPTS)} / {len(PROMPTS)} done" in last


# -- schedulers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GroupScheduler, FifoScheduler])
@pytest.mark.parametrize("seed", range(6))
def test_schedulers_let_go_of_whoever_they_are_told_to(kind: type[Any], seed: int) -> None:
    dice, cache, scheduler = random.Random(seed), PagedCache(12, 4), kind()
    requests = [Request(index, torch.arange(9).numpy(), 20, rank=index) for index in range(9)]
    scheduler.start(requests, cache, 24)
    left = list(requests)
    while (step := scheduler.next()) is not None:
        for request in step.sampling():
            request.expect()
            request.take(1)
            if request.done:
                scheduler.finish(request)
        left = [request for request in left if not request.done]
        for request in dice.sample(left, min(len(left), dice.choice([0, 0, 1, 2]))):
            request.end(FinishReason.TIME)
            scheduler.finish(request)
            left.remove(request)
        cache.check_integrity(left)
    assert all(request.done for request in requests)
    assert cache.free_pages == cache.num_pages and not scheduler.waiting and not scheduler.running
