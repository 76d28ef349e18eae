"""What a report says of how a run went over its time, held against what was seen of the run from outside."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_device_loop import run_over_references
from support_families import build
from support_kernels import plain
from support_letter_tokenizers import letter_tokenizer
from support_parity import assert_parity, counted_tokens, mixed_prompts, pages_of_memory
from support_timekeeper import Clock, assert_in_order, rows_of
from support_word_tokenizer import word_tokenizer
from transformers.generation.streamers import BaseStreamer

from hf_batchllm import BatchGenerator, RunReport, accelerated
from hf_batchllm.engine import call
from hf_batchllm.engine.device_loop import decode_graphs, run_ahead
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.loop import Engine
from hf_batchllm.engine.progress import Progress
from hf_batchllm.engine.timekeeper import Timekeeper
from hf_batchllm.inputs import tokenizer as tokenizer_module
from hf_batchllm.model import model_in_use
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.planning import call_plan
from hf_batchllm.planning.requests_and_prefixes import Prefix
from hf_batchllm.planning.scheduler import GroupScheduler
from hf_batchllm.results.timeline import Timeline
from hf_batchllm.sampling import logprobs, stop_strings

FAMILY = "llama"
PROMPTS = mixed_prompts(2)
GIVEN = {"progress": False}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """That of all calls."""
    clock = Clock()
    monkeypatch.setattr("hf_batchllm.engine.call.Timekeeper", lambda **options: Timekeeper(clock, **options))
    return clock


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of each step that was launched: times, tokens of prompts and of answers, sequences running, pages in use."""
    seen: list[tuple[int, ...]] = []
    launch = Engine._launch

    def noted(self: Engine, step: Any) -> Any:
        made = {request: request.made for request in step.rows}
        running = launch(self, step)
        prompt = sum(chunk.end - chunk.begin for chunk in step.chunks)
        decode = sum(request.made - made[request] for request in step.rows)
        scheduler: Any = self.scheduler
        pages = scheduler.cache.num_pages - scheduler.cache.free_pages
        seen.append((step.times, prompt, decode, len(scheduler.running), pages))
        return running

    monkeypatch.setattr(Engine, "_launch", noted)
    return seen


@pytest.fixture
def device_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    run_over_references(monkeypatch)


def small(**settings: Any) -> BatchGenerator:
    return BatchGenerator(build(FAMILY), **{"max_batch_tokens": 24} | settings)


def short_of_memory(pages: int = 24, **settings: Any) -> BatchGenerator:
    memory = pages_of_memory(build(FAMILY), pages, 4)
    return small(kv_memory=memory, page_size=4, min_shared_tokens=4, **settings)


def timeline_of(report: RunReport | None) -> Timeline:
    """What holds of every run that was not interrupted at an odd moment."""
    assert report is not None
    timeline = report.timeline
    assert timeline is not None
    assert timeline.steps.sum() == report.steps
    assert timeline.prompt_tokens.sum() + timeline.decode_tokens.sum() == report.model_tokens
    assert timeline.cache_bytes.max(initial=0) <= report.peak_memory
    assert_in_order(timeline, report.seconds)
    return timeline


def test_the_line_in_the_report_and_a_report_that_is_sent() -> None:
    report = small().generate(PROMPTS[:2], max_new_tokens=3, **GIVEN).report
    assert report is not None and report.timeline is not None
    assert f"\ntime       {report.timeline.longest_phases}\n" in str(report)
    assert max(map(len, str(report).splitlines())) <= 80
    sent = pickle.loads(pickle.dumps(report))
    assert str(sent) == str(report) and sent.timeline.phases == report.timeline.phases
    assert rows_of(timeline_of(sent)) == rows_of(timeline_of(report))
    assert (sent.timeline.ends == report.timeline.ends).all()


class Slow(BaseStreamer):
    """A tokenizer, a streamer, hooks: all that a user may bring along, and the time that it takes."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.inner = clock, word_tokenizer()
        self.calls: dict[str, int] = {}

    def _take(self, what: str, seconds: float) -> None:
        self.clock.now += seconds
        self.calls[what] = self.calls.get(what, 0) + 1

    def __call__(self, texts: list[str]) -> Any:
        self._take("encode", 1)
        return self.inner(texts)

    def process(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._take("process", 10)
        return scores

    def decode(self, ids: list[int], **options: Any) -> Any:
        self._take("decode", 100)
        return self.inner.decode(ids, **options)

    def forward(self, *_: Any) -> None:
        self._take("forward", 1000)

    def put(self, *_: Any) -> None:
        self._take("put", 10_000)

    def end(self) -> None:
        self._take("end", 10_000)

    def show(self, *_: Any) -> None:
        self._take("show", 10_000)


@pytest.mark.parametrize("streamed", [False, True])
def test_each_phase_has_the_time_of_what_runs_in_it(
    streamed: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, model = Slow(clock), build(FAMILY)
    slowed = [(call_plan, "make_plan", 1e5), (call_plan, "line_up", 1e5), (model_in_use, "make_backend", 1e6)]
    slowed += [(GroupScheduler, "start", 1e7), (GroupScheduler, "next", 1e7)]
    for where, name, seconds in slowed:
        monkeypatch.setattr(where, name, clock.taking(seconds, getattr(where, name)))
    monkeypatch.setattr(Progress, "step", slow.show)
    options = {"streamer": slow} if streamed else {}
    texts = ["w5 w6"] if streamed else ["w5 w6", "w7", "w5 w6 w8"]
    handle = model.get_input_embeddings().register_forward_pre_hook(slow.forward)
    try:
        result = BatchGenerator(model, slow).generate(
            texts, max_new_tokens=4, eos_token_id=None, logits_processor=[slow.process], **options, **GIVEN
        )
    finally:
        handle.remove()
    report = result.report
    assert report is not None
    phases, calls, steps = timeline_of(report).phases, slow.calls, report.steps
    assert calls["forward"] == calls["show"] == steps and calls["process"] == 4 * len(texts)
    assert (calls.get("put", 0), calls.get("end", 0)) == ((5, 1) if streamed else (0, 0))
    assert phases == {
        "prompts": calls["encode"],
        "loading": 0,
        "planning": 2e5,
        "setup": 1e6,
        "scheduling": 1e7 * (steps + 2),
        "launching": 0,
        "capture": 0,
        "model": 1e3 * steps,
        "tokens": 10 * calls["process"],
        "results": 100 * len(texts),
        "outside": 1e4 * sum(calls.get(what, 0) for what in ("put", "end", "show")),
    }
    assert report.seconds == clock.now - 100
    assert report.planning_seconds == calls["encode"] + 1e5


def test_log_probabilities_of_prompts_are_no_part_of_the_model(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "start_log_probs", clock.taking(1, logprobs.start_log_probs))
    result = BatchGenerator(build(FAMILY)).generate(PROMPTS[:3], max_new_tokens=2, prompt_logprobs=1, **GIVEN)
    phases = timeline_of(result.report).phases
    assert phases["model"] == 0 and phases["tokens"] == clock.now - 100 > 0


# -- runs ------------------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("scheduler", ["groups", "fifo"])
@pytest.mark.parametrize("pages", [200, 24])
def test_each_step_as_it_was(scheduler: str, pages: int, facts: list[tuple[int, ...]]) -> None:
    generator = short_of_memory(pages, scheduler=scheduler)
    with counted_tokens(generator.model) as sizes:
        result = generator.generate(PROMPTS, max_new_tokens=16, eos_token_id=1000, **GIVEN)
    assert_parity(FAMILY, PROMPTS, result, 16)
    report = result.report
    timeline = timeline_of(report)
    assert (timeline.prompt_tokens + timeline.decode_tokens).tolist() == sizes
    assert rows_of(timeline, generator._resources.kv.page_bytes) == facts
    assert timeline.running.max() > 1 and timeline.cache_bytes.max() == report.peak_memory
    # Whoever was preempted runs its newest token with those that it runs again.
    newest = timeline.prompt_tokens.sum() - report.computed_tokens - report.recomputed_tokens
    assert 0 <= newest <= report.preemptions
    assert (report.preemptions > 0) == (pages == 24 and scheduler == "groups")
    assert (report.recomputed_tokens > 0) == (pages == 24)


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("pages", [300, 28])
def test_bursts(pages: int, device_loop: None, facts: list[tuple[int, ...]]) -> None:
    generator = short_of_memory(pages, steps_per_sync=16, max_batch_tokens=None)
    result = generator.generate(PROMPTS, max_new_tokens=40, eos_token_id=list(range(0, 97, 11)), **GIVEN)
    report = result.report
    timeline = timeline_of(report)
    assert rows_of(timeline, generator._resources.kv.page_bytes) == facts
    assert 4 < timeline.steps.max() <= 8 and len(timeline) < report.steps
    assert report.idle_tokens > 0


@plain
def test_on_a_gpu_waiting_is_told_from_launching(
    device_loop: None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, start, capture = [], run_ahead.start_copy_to_host, DecodeGraphs._capture

    def slow(tokens: torch.Tensor) -> Any:
        clock.now += 1
        waits.append(1)
        return clock.taking(10, start(tokens))

    def capturing(self: DecodeGraphs, graph: Any) -> None:
        clock.now += 100
        capture(self, graph)

    monkeypatch.setattr(run_ahead, "start_copy_to_host", slow)
    monkeypatch.setattr(DecodeGraphs, "_capture", capturing)
    monkeypatch.setattr(decode_graphs, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(call, "Timekeeper", lambda **_: Timekeeper(clock, ahead=True))
    result = BatchGenerator(build(FAMILY), steps_per_sync=8).generate(PROMPTS, max_new_tokens=40, **GIVEN)
    phases = timeline_of(result.report).phases
    captured = phases["capture"] // 100
    assert captured >= 1
    assert {phase: seconds for phase, seconds in phases.items() if seconds} == {
        "launching": len(waits),
        "capture": 100 * captured,
        "model": 10 * len(waits),
    }


@plain
@pytest.mark.parametrize("at", [2, 5, None])
def test_what_is_on_its_way_counts_when_a_call_ends(
    at: int | None, device_loop: None, facts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an interrupt, in the so many-th wait for tokens; or since a stream is left (None)."""
    waits, start = [], run_ahead.start_copy_to_host

    def interrupted(tokens: torch.Tensor) -> Any:
        wait = start(tokens)

        def waits_once() -> Any:
            waits.append(1)
            if len(waits) == at:
                raise KeyboardInterrupt
            return wait()

        return waits_once

    monkeypatch.setattr(run_ahead, "start_copy_to_host", interrupted)
    generator = BatchGenerator(build(FAMILY), steps_per_sync=8 if at else 16)
    stream = generator.stream(PROMPTS, max_new_tokens=60, eos_token_id=list(range(0, 97, 3 if at else 9)))
    if at is None:
        next(stream)
        stream.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert rows_of(timeline_of(generator.last_report), generator._resources.kv.page_bytes) == facts
    assert len(facts) > (at or 1) - 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 4])
def test_a_step_that_fails_is_none(error: type[BaseException], at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = ModelRunner.step, 0

    def failing(self: ModelRunner, batch: Any, *latest: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise error
        return step(self, batch, *latest)

    monkeypatch.setattr(ModelRunner, "step", failing)
    generator = small()
    with pytest.raises(error):
        generator.generate(PROMPTS, max_new_tokens=5, **GIVEN)
    timeline = timeline_of(generator.last_report)
    assert len(timeline) == at - 1
    monkeypatch.undo()
    assert timeline_of(generator.generate(PROMPTS, max_new_tokens=5, **GIVEN).report).steps.sum() > at


@pytest.mark.parametrize("seconds", [-1, 3])
def test_out_of_time(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, step = [1000.0], ModelRunner.step

    def ticking(self: ModelRunner, batch: Any, *latest: Any) -> Any:
        now[0] += 1
        return step(self, batch, *latest)

    monkeypatch.setattr(ModelRunner, "step", ticking)
    monkeypatch.setattr(time, "time", lambda: now[0])
    result = BatchGenerator(build(FAMILY)).generate(PROMPTS, max_new_tokens=9, max_time=seconds, **GIVEN)
    assert {generation.finish_reason for generation in result} == {"time"}
    assert len(timeline_of(result.report)) == result.report.steps == seconds + 1


@pytest.mark.parametrize("given", [[], [[]], [[5, 6]], [[5, 6], [], [7]]])
def test_few_prompts_and_bad_ones(given: list[list[int]]) -> None:
    result = BatchGenerator(build(FAMILY)).generate(given, max_new_tokens=3, on_error="record", **GIVEN)
    timeline = timeline_of(result.report)
    good = [prompt for prompt in given if prompt]
    assert len(timeline) == (3 if good else 0)
    assert timeline.decode_tokens.tolist() == ([0, len(good), len(good)] if good else [])
    assert str(result.report)


def test_a_prefix_kept_from_an_earlier_call_holds_memory_and_is_not_running() -> None:
    generator = BatchGenerator(build(FAMILY), keep_prefixes=1, page_size=4)
    text = [5, 9, 13, 17] * 10
    for cached in (0, 40):
        report = generator.generate([[*text, 1], [*text, 2]], max_new_tokens=2, **GIVEN).report
        timeline = timeline_of(report)
        assert report.cached_tokens == cached
        assert timeline.running.tolist() == [2, 2]
        assert timeline.cache_bytes.tolist() == [12 * generator._resources.kv.page_bytes] * 2


def test_under_accelerated() -> None:
    model, ids = build(FAMILY), torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]])
    with accelerated(model):
        model.generate(ids, max_new_tokens=5, pad_token_id=0)
        timeline = timeline_of(model.generate.last_report)
    assert timeline.decode_tokens.tolist() == [0, 2, 2, 2, 2]


# -- streams ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [False, True])
def test_who_takes_results_out_of_a_stream_is_outside(threads: bool, clock: Clock) -> None:
    generator, given = small(), [*PROMPTS[:6], []]
    stream = generator.stream(given, max_new_tokens=5, on_error="record")
    clock.now += 1000  # nothing has been asked for yet
    for _ in given:
        if threads:  # another one each time
            thread = threading.Thread(target=lambda: next(stream))
            thread.start()
            thread.join()
        else:
            next(stream)
        clock.now += 5
    assert list(stream) == []
    report = generator.last_report
    phases = timeline_of(report).phases
    assert report.seconds == phases["outside"] == 5 * len(given)


@pytest.mark.parametrize("how", ["close", "throw", "forget"])
def test_a_stream_that_is_left(how: str, clock: Clock) -> None:
    generator = small()
    stream = generator.stream(PROMPTS, max_new_tokens=5)
    for _ in range(2):
        next(stream)
        clock.now += 5
    if how == "close":
        stream.close()
    elif how == "throw":
        with pytest.raises(KeyError):
            stream.throw(KeyError())
    del stream
    report = generator.last_report
    timeline = timeline_of(report)
    assert report.finished >= 2 and timeline.phases["outside"] == report.seconds == 10
    timeline_of(generator.generate(PROMPTS, max_new_tokens=5, **GIVEN).report)


@pytest.mark.parametrize("results", [1, 6])
def test_what_a_preemption_took_counts_as_run_again_only_when_it_is(
    results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream is left while those that were preempted wait, and once they have been run again."""
    runs: Counter[tuple[Any, int]] = Counter()  # of each token: of whose it is, and its position
    launch = Engine._launch

    def noted(self: Engine, step: Any) -> Any:
        runs.update((chunk.unit, position) for chunk in step for position in range(chunk.begin, chunk.end))
        return launch(self, step)

    monkeypatch.setattr(Engine, "_launch", noted)
    generator = short_of_memory()
    stream = generator.stream(PROMPTS, max_new_tokens=16, eos_token_id=1000)
    for _ in range(results):
        next(stream)
    stream.close()
    report = generator.last_report
    again = sum(count - 1 for count in runs.values())
    assert report.preemptions > 0 and (again > 0) == (results == 6)
    assert report.recomputed_tokens == again
    assert report.computed_tokens == sum(
        isinstance(unit, Prefix) or position < len(unit.prompt_ids) for unit, position in runs
    )


def test_what_is_done_once_has_a_phase_of_its_own(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is loaded, and stop strings are looked up, in the first call alone."""
    found = letter_tokenizer()
    monkeypatch.setattr(tokenizer_module, "load_tokenizer", clock.taking(100, lambda *_, **__: found))
    monkeypatch.setattr(stop_strings, "DecodedVocabulary", clock.taking(1000, stop_strings.DecodedVocabulary))
    model = build(FAMILY)
    monkeypatch.setattr(model.config, "_name_or_path", "somewhere")
    generator = BatchGenerator(model)
    spent = []
    for _ in range(2):
        report = generator.generate(["abc"], max_new_tokens=2, stop_strings="fed", **GIVEN).report
        spent.append(timeline_of(report).phases["loading"])
        assert report is not None and report.planning_seconds == spent[-1]
    assert spent == [1100, 0]
