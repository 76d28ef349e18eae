"""Steps launched before the tokens of earlier ones have been seen: the same tokens, whatever ends and whenever.

And where something odd happens: errors, refused prompts, users who change their model.
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
from support_families import build, family_params, random_prompts, reference_generate
from support_kernels import plain
from support_parity import each_config_with_some, mixed_prompts, pages_of_memory
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.loop import Engine
from hf_batchllm.engine.progress import Progress
from hf_batchllm.planning.requests_and_prefixes import FinishReason, Request
from hf_batchllm.planning.scheduler import FifoScheduler, GroupScheduler

pytestmark = plain
NEW_TOKENS = 8
STOPS = list(range(0, 97, 2))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Every engine that ran."""
    return noted(monkeypatch, Engine, "run", lambda self, *_: self)


DEPTHS_AND_CONFIGS: list[tuple[int, dict[str, Any]]] = [
    (2, {}), (5, {}), (5, {"scheduler": "fifo"}), (2, {"max_batch_tokens": 7, "page_size": 4}),
]  # fmt: skip


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "depth_and_config"), each_config_with_some(DEPTHS_AND_CONFIGS, 2))
def test_tokens_are_those_of_generate(
    family: str, depth_and_config: Any, watched: list[Any], engines: list[Engine]
) -> None:
    depth, config = depth_and_config
    prompts = mixed_prompts(3)
    result = as_generate(family, prompts, NEW_TOKENS, {"steps_per_sync": depth, **config})
    assert engines[0].depth == depth
    assert result.report.computed_tokens == BatchGenerator(build(family), **config).plan(prompts).computed_tokens
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.some_cases
@pytest.mark.parametrize("depth", [2, 3, 8])
@pytest.mark.parametrize("family", family_params(["llama", "gemma2"]))
def test_requests_that_end_at_any_step(family: str, depth: int, watched: list[Any], engines: list[Engine]) -> None:
    """Half of all tokens end an answer. What runs beyond the end is counted, and belongs to no answer."""
    prompts, config = mixed_prompts(4), {"steps_per_sync": depth, "page_size": 8}
    result = answers(family, prompts, config, max_new_tokens=30, eos_token_id=STOPS)
    assert_best("cpu", family, prompts, result, 30, STOPS)
    assert engines[0].collector.idle_tokens > 0
    assert result.report.computed_tokens == BatchGenerator(build(family), **config).plan(prompts).computed_tokens


@pytest.mark.some_cases
@pytest.mark.parametrize(("family", "depth"), [("llama", 2), ("gemma2", 6), ("gpt_oss", 6)])
def test_preempted_requests_are_computed_again_from_tokens_that_were_seen(
    family: str, depth: int, watched: list[Any]
) -> None:
    rng = random.Random(2)
    prompts = [prompt for kind in ("nested", "distinct") for prompt in random_prompts(rng, 97, kind, 8)]
    config = {"kv_memory": pages_of_memory(build(family), 20, 8), "page_size": 8, "min_shared_tokens": 1}
    result = as_generate(family, prompts, 40, config | {"steps_per_sync": depth}, eos_token_id=1000)
    assert result.report.preemptions > 0
    assert watched[0].free_pages == watched[0].num_pages


def test_what_needs_the_host_is_not_run_ahead(engines: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.sampling.device_options._KEPT_BYTES", 10)
    for options in ({"repetition_penalty": 1.2}, {}):
        answers("llama", mixed_prompts(1), {"steps_per_sync": 4}, max_new_tokens=3, **options)
    assert [engine.depth for engine in engines] == [1, 4]


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma2", {"repetition_penalty": 1.7}),
        ("llama", {"repetition_penalty": 0.8, "min_new_tokens": 6}),
        ("llama", {"min_length": 12}),
    ],
)
def test_what_looks_back_looks_at_tokens_that_nobody_has_seen(
    family: str, options: dict[str, Any], watched: list[Any], engines: list[Engine]
) -> None:
    """Penalties and minimum lengths, with preemption; the oracle is ``generate`` itself."""
    model, prompts = build(family), mixed_prompts(2)
    options |= {"max_new_tokens": 12, "eos_token_id": list(range(0, 97, 3)), "pad_token_id": 0}
    memory = pages_of_memory(model, 20, 8)
    alone = [reference_generate(model, prompt, **options) for prompt in prompts]
    for config in ({"steps_per_sync": 4}, {"steps_per_sync": 3, "kv_memory": memory, "page_size": 8}):
        assert answers(model, prompts, config, **options).token_ids == alone
    assert all(engine.depth > 1 for engine in engines)


class Plain(FifoScheduler):
    """One that does not know of tokens yet to be seen."""

    runs_ahead = False


class Forgetful:
    """One that cannot say what it must know."""

    runs_ahead = True

    def __init__(self) -> None:
        inner = GroupScheduler()
        self.start, self.next, self.finish = inner.start, inner.next, inner.finish


@pytest.mark.parametrize(("scheduler", "depth"), [(Plain, 1), (Forgetful, 1), (GroupScheduler, 4)])
def test_a_scheduler_says_whether_it_can_do_without_tokens(
    scheduler: type[Any], depth: int, engines: list[Engine]
) -> None:
    as_generate("llama", mixed_prompts(2), 5, {"steps_per_sync": 4, "scheduler": scheduler()})
    assert engines[0].depth == depth


# -- where something odd happens -------------------------------------------------------------------------------


def some(count: int, seed: int = 3, longest: int = 6) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 97) for _ in range(rng.randint(3, longest))] for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_error_in_a_step_leaves_the_grad_mode(depth: int) -> None:
    model = build("llama")
    try:
        with model.lm_head.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
            answers(model, [[1, 2, 3]], {"steps_per_sync": depth}, max_new_tokens=3)
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.7}])
def test_prompts_that_are_refused_leave_the_seats_of_the_others(options: dict[str, Any]) -> None:
    model = build("llama")
    prompts = [list(range(begin, 90)) for begin in (1, 2, 3)] + [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
    config = {"kv_memory": pages_of_memory(model, 4, 8), "page_size": 8}
    one, two = (
        answers(model, prompts, config | {"steps_per_sync": depth}, max_new_tokens=6, on_error="record", **options)
        for depth in (1, 2)
    )
    assert one.token_ids == two.token_ids


@pytest.mark.some_cases
@pytest.mark.parametrize("seed", [22, 23, 32, 38])
def test_nothing_is_preempted_unseen_beside_kept_prefixes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept prefix on which only waiting requests stand is no page that a running one could have."""
    preempted = noted(monkeypatch, GroupScheduler, "_preempt", lambda self, request: request.pending)
    rng, model = random.Random(seed), build("llama")
    groups = [[rng.randrange(1, 97) for _ in range(24)] for _ in range(3)]
    prompts = [group + [rng.randrange(1, 97) for _ in range(3)] for group in groups for _ in range(4)]
    config = {"page_size": 8, "kv_memory": pages_of_memory(model, 18, 8), "min_shared_tokens": 4, "keep_prefixes": 4}
    results = []
    for depth in (1, 6):
        generator = BatchGenerator(model, steps_per_sync=depth, **config)
        generator.generate(prompts, max_new_tokens=2)
        options = {"max_new_tokens": 40, "eos_token_id": list(range(0, 97, 20))}
        results.append(generator.generate(prompts, **options).token_ids)
    assert results[0] == results[1] and not any(preempted)


def test_the_report_of_a_stream_that_was_left_counts_no_step_ahead_as_computed_prompt() -> None:
    generator = BatchGenerator(build("llama"), steps_per_sync=50)
    stream: Any = generator.stream(some(16), max_new_tokens=100, eos_token_id=[0, 1000])
    next(stream)
    stream.close()
    report = generator.last_report
    assert report.computed_tokens <= report.prompt_tokens
    assert report.saving >= 0


def test_the_bar_ends_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = noted(
        monkeypatch,
        Progress,
        "step",
        lambda self, *_: (self._bar._bar.n, self._bar._bar.total, self._written),
        after=True,
    )
    result = answers("llama", some(16), {"steps_per_sync": 8}, max_new_tokens=60, eos_token_id=STOPS, progress=True)
    assert seen[-1][2] == result.report.new_tokens
    assert all(n <= total for n, total, _ in seen)


def test_a_request_that_has_stopped_waits_for_nothing() -> None:
    request = Request(0, np.arange(4), 9)
    request.computed = 4
    request.expect()
    request.computed = 5
    request.expect()
    request.take(7, FinishReason.STOP)
    assert request.done and request.pending == 0 and request.length == 5
