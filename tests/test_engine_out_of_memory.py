"""Out of memory in the middle of a call: the step runs again in smaller parts, and every token is as it would be."""

from __future__ import annotations

import functools
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_calls import answers, failing
from support_cases import up_to
from support_device_loop import DEVICES, model_on, run_over_references
from support_families import build

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.smaller_steps import parts_of
from hf_batchllm.planning.requests_and_prefixes import Prefix
from hf_batchllm.planning.scheduler import FifoScheduler
from hf_batchllm.planning.step import Chunk, Step

FAMILY = "llama"
PROMPTS = [[5, 6, 7, 8, 9, 10] + [11 + index] * (2 + index % 4) for index in range(6)]
NOTICE = "ignore:a step of .* ran out of memory"
OUT = "CUDA out of memory. Tried to allocate more than there is"


class Fails:
    """A hook that runs out of memory: for steps of more than ``most`` tokens, and in the calls numbered ``at``."""

    def __init__(self, most: int | None = None, at: frozenset[int] = frozenset()) -> None:
        self.most, self.at, self.calls, self.failures = most, at, 0, 0

    def __call__(self, module: Any, args: Any) -> None:
        self.calls += 1
        if self.calls in self.at or (self.most is not None and args[0].shape[1] > self.most):
            self.failures += 1
            raise torch.OutOfMemoryError(OUT)


@contextmanager
def failing_in(hook: Fails, layer: int = 0) -> Iterator[Fails]:
    """In the midst of a layer: it has written its K and V, and the layers behind it have not."""
    handle = build(FAMILY).model.layers[layer].self_attn.o_proj.register_forward_pre_hook(hook)
    try:
        yield hook
    finally:
        handle.remove()


WAYS: dict[str, Callable[[BatchGenerator], Any]] = {
    "greedy": lambda gen: gen.generate(PROMPTS, max_new_tokens=5).token_ids,
    "sampled": lambda gen: (
        gen.generate(PROMPTS, max_new_tokens=4, do_sample=True, seed=3, num_return_sequences=2).token_ids
    ),
    "beams": lambda gen: gen.generate(PROMPTS, max_new_tokens=4, num_beams=2, num_return_sequences=2).token_ids,
    "scores": lambda gen: [score.logprobs for score in gen.score(PROMPTS, [[[1, 2, 3], [4]]] * len(PROMPTS))],
    "logprobs": lambda gen: [
        (each.token_ids, [entry or {} for entry in each.prompt_logprobs], each.logprobs)
        for each in gen.generate(PROMPTS, max_new_tokens=3, logprobs=1, prompt_logprobs=1)
    ],
}


@functools.cache
def undisturbed(way: str) -> Any:
    return WAYS[way](BatchGenerator(build(FAMILY)))


def near(got: Any, expected: Any) -> bool:
    if isinstance(expected, float):
        return bool(abs(got - expected) < 1e-4)
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(near(got[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(near, got, expected))
    return bool(got == expected)


@pytest.mark.some_cases
@pytest.mark.filterwarnings(NOTICE)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("most", [7, 2])
def test_steps_that_are_too_large_run_in_parts(way: str, most: int) -> None:
    with failing_in(Fails(most), layer=1) as hook:
        got = WAYS[way](BatchGenerator(build(FAMILY), page_size=4))
    assert hook.failures and near(got, undisturbed(way))


# Never two in a row: a step of one token that fails twice ends the call.
FAILURES = st.frozensets(st.integers(0, 8).map(lambda number: 2 * number + 1), min_size=1)


@pytest.mark.filterwarnings(NOTICE, "ignore:`scheduler` has no effect")
@settings(max_examples=up_to(7), deadline=None)
@given(
    way=st.sampled_from(sorted(WAYS)),
    at=FAILURES,
    layer=st.integers(0, 1),
    fields=st.sampled_from(
        [
            {},
            {"max_batch_tokens": 11, "page_size": 4},
            {"scheduler": "fifo"},
            {"kv_memory": "30KiB", "page_size": 2, "max_batch_tokens": 9},
            {"min_shared_tokens": 1, "page_size": 3, "keep_prefixes": 4},
        ]
    ),
)
def test_failures_at_any_step_change_nothing(way: str, at: frozenset[int], layer: int, fields: dict[str, Any]) -> None:
    generator, expected = BatchGenerator(build(FAMILY), **fields), undisturbed(way)
    with failing_in(Fails(at=at), layer):
        assert near(WAYS[way](generator), expected)
    assert near(WAYS[way](generator), expected)


def test_it_is_said_once_with_what_to_lower() -> None:
    generator = BatchGenerator(build(FAMILY))
    with failing_in(Fails(7)):
        with pytest.warns(
            UserWarning, match="ran out of memory on cpu.*smaller `kv_memory`.*`max_batch_tokens`"
        ) as said:
            result = generator.generate(PROMPTS, max_new_tokens=5)
        assert len([each for each in said if "there are hooks" not in str(each.message)]) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert generator.generate(PROMPTS, max_new_tokens=5).token_ids == result.token_ids
    assert result.report.new_tokens == 30 and result.report.recomputed_tokens == 0


@pytest.mark.filterwarnings(NOTICE)
@pytest.mark.parametrize("way", ["greedy", "beams", "scores"])
def test_where_not_even_one_token_fits_the_error_says_what_was_tried(way: str) -> None:
    generator = BatchGenerator(build(FAMILY))
    with failing_in(Fails(0)), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        WAYS[way](generator)
    assert any("fewer and fewer tokens were tried (" in note and ", 1)" in note for note in caught.value.__notes__)
    assert near(WAYS[way](generator), undisturbed(way))


class Counting(FifoScheduler):
    """A scheduler that knows nothing of limits."""

    def limit_steps(self, tokens: int | None) -> None:
        pass


@pytest.mark.filterwarnings(NOTICE)
def test_steps_of_any_scheduler_are_cut() -> None:
    expected = undisturbed("greedy")  # before anything fails: it is made once
    with failing_in(Fails(5)) as hook:
        generator = BatchGenerator(build(FAMILY), scheduler=Counting())
        assert WAYS["greedy"](generator) == expected
    assert hook.failures < 6, "later steps are small enough from the start"


class Stateful:
    """Counts its calls: it must not be called twice for a step."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at, self.calls = fails_at, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise torch.OutOfMemoryError(OUT)
        return scores


@pytest.mark.filterwarnings(NOTICE, "ignore:.*seems to keep state")
@pytest.mark.parametrize("loop", ["one by one", *DEVICES])
def test_processors_that_may_keep_state_are_not_called_twice(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if loop == "cpu":
        run_over_references(monkeypatch)
    model, processor = model_on("cuda" if loop == "cuda" else "cpu", FAMILY), Stateful(9)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        answers(model, PROMPTS, max_new_tokens=5, logits_processor=[processor])
    assert any("may keep state" in note for note in caught.value.__notes__) and processor.calls == 9
    if loop == "one by one":
        processor = Stateful(0)
        with failing_in(Fails(7)) as hook:
            got = answers(model, PROMPTS, max_new_tokens=5, logits_processor=[processor])
        assert got.token_ids == undisturbed("greedy") and hook.failures and processor.calls == 30


# -- steps launched ahead --------------------------------------------------------------------------------------

PLACES = [
    "model.runner.ModelRunner.forward",
    "model.attention.triton_attention.KernelAttention._attend_rows",
    "sampling.seated_sampler.SeatedSampler.__call__",
    "engine.device_loop.seats.Seats.store",
    "engine.device_loop.decode_rows.DecodeRows.settle",
    "engine.device_loop.run_ahead.start_copy_to_host",
]
RUNS_AHEAD = {
    "max_new_tokens": 11,
    "do_sample": True,
    "seed": 5,
    "repetition_penalty": 1.7,
    "eos_token_id": [3, 9, 27, 40, 55],
    "pad_token_id": 0,
}


@pytest.mark.some_cases
@pytest.mark.filterwarnings(NOTICE)
@pytest.mark.parametrize("place", PLACES)
def test_steps_launched_ahead_are_taken_back(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_over_references(monkeypatch)
    fields: dict[str, Any] = {"steps_per_sync": 4, "page_size": 4, "max_batch_tokens": 12}
    expected = answers(FAMILY, PROMPTS, fields, **RUNS_AHEAD).token_ids
    assert len({len(row) for row in expected}) > 1
    where, _, name = place.rpartition(".")
    calls = failing(  # what it does has been done
        monkeypatch, pkgutil.resolve_name(f"hf_batchllm.{where}"), name, {2, 5}, torch.OutOfMemoryError(OUT), after=True
    )
    assert answers(FAMILY, PROMPTS, fields, **RUNS_AHEAD).token_ids == expected and calls[0] > 2


# -- parts -----------------------------------------------------------------------------------------------------


def test_parts_have_all_tokens_of_a_step_in_its_order() -> None:
    ids = np.arange(40, dtype=np.int32)
    units = [Prefix(ids, 0, 20), Prefix(ids, 20, 31), Prefix(ids, 31, 40)]
    step = Step(chunks=[Chunk(units[0], 3, 20), Chunk(units[1], 20, 31), Chunk(units[2], 31, 33)])
    for most in range(1, 32):
        parts = parts_of(step, most)
        assert all(0 < part.tokens <= most for part in parts) and len(parts) == -(-step.tokens // most)
        tokens = [(chunk.unit, at) for part in parts for chunk in part.chunks for at in range(chunk.begin, chunk.end)]
        assert tokens == [(chunk.unit, at) for chunk in step.chunks for at in range(chunk.begin, chunk.end)]
