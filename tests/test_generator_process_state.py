"""What a process is set to around a call (default types and devices, modes, flags) changes nothing in its results.

Nor does what the caller enters or leaves between two results, or between two calls.
"""

from __future__ import annotations

import ast
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support_families import build
from support_process_states import (
    CALLS,
    IDS,
    MASK,
    PROMPTS,
    STATES,
    State,
    assert_same,
    facts,
    made,
    threads,
)
from support_untouched import fingerprint
from transformers import GenerationConfig, LogitsProcessor, SynthIDTextWatermarkingConfig

import hf_batchllm
from hf_batchllm import BatchGenerator
from hf_batchllm.model.inspection import architecture

WINDOWED = "gemma3"


@cache
def expected(family: str, call: str) -> list[Any]:
    return CALLS[call](build(family))


@pytest.fixture(autouse=True)
def no_random_numbers() -> Iterator[None]:
    """With a seed, or where nothing is drawn, nobody's generator moves."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


# All calls where tensors are made; of each other state, those that would show it.
_EVERYWHERE = ("bfloat16", "meta", "inference mode", "numpy raises", "matmul precision, newer")
_ELSEWHERE = ("greedy", "tensors of beams")


_CASES = [(state, call) for state in STATES for call in (CALLS if state in _EVERYWHERE else _ELSEWHERE)]


@pytest.mark.some_cases
@pytest.mark.parametrize(("state", "call"), _CASES)
def test_a_state_changes_nothing(state: str, call: str) -> None:
    family = WINDOWED if call in ("greedy", "kept prefixes") else "llama"
    known = expected(family, call)
    with STATES[state]():
        before = _modes()
        ours = CALLS[call](build(family))
        assert _modes() == before
    assert_same(ours, known)


@pytest.mark.parametrize("state", ["bfloat16", "meta", "inference mode"])
def test_a_model_can_be_inspected_under_a_state(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "_SEEN", {})
    with STATES[state]():
        (row,) = made(build(WINDOWED)).generate(PROMPTS[:1], max_new_tokens=1)
    assert row.token_ids == expected(WINDOWED, "greedy")[0][2][:1]


def _modes() -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    modes = *autocast, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("state", ["bfloat16", "float64", "inference mode"])
@pytest.mark.parametrize("beams", [1, 3])
def test_tensors_are_those_of_generate(state: str, beams: int) -> None:
    model = build("llama")
    given: dict[str, Any] = {
        "attention_mask": MASK, "max_new_tokens": 4, "num_beams": beams, "eos_token_id": [5, 17], "pad_token_id": 0,
        "do_sample": False, "return_dict_in_generate": True, "output_scores": True,
    }  # fmt: skip
    with STATES[state]():
        theirs, ours = model.generate(IDS, **given), made(model).generate(IDS, **given)
        assert_same([ours.sequences], [theirs.sequences])
        assert [each.dtype for each in ours.scores] == [each.dtype for each in theirs.scores]
        if beams > 1:
            assert_same([ours.sequences_scores, ours.beam_indices], [theirs.sequences_scores, theirs.beam_indices])


def test_the_number_of_threads_changes_nothing() -> None:
    given: dict[str, Any] = {"max_new_tokens": 2, "do_sample": True, "seed": 3}
    known = made(build(WINDOWED)).generate(PROMPTS[:2], **given).token_ids
    with threads(2):
        assert made(build(WINDOWED)).generate(PROMPTS[:2], **given).token_ids == known


def _heard(generator: BatchGenerator) -> list[int]:
    """What a streamer gets, and -1 at the end."""
    heard: list[int] = []
    streamer = SimpleNamespace(put=lambda value: heard.extend(value.flatten().tolist()), end=lambda: heard.append(-1))
    generator.generate([PROMPTS[0]], max_new_tokens=4, streamer=streamer)
    return heard


_BY_ONE_GENERATOR: dict[str, Callable[[BatchGenerator], Any]] = {
    "numpy tensors": lambda generator: generator.generate(
        IDS.numpy(), attention_mask=MASK.numpy(), max_new_tokens=4, pad_token_id=0
    ),
    "stop strings": lambda generator: generator.generate(PROMPTS, max_new_tokens=4, stop_strings=["e", "bc"]).token_ids,
    "a streamer": _heard,
}


@pytest.mark.parametrize("call", _BY_ONE_GENERATOR)
def test_another_default_device_and_without_it_again(call: str) -> None:
    """What was prepared under it is good afterwards."""
    run, generator = _BY_ONE_GENERATOR[call], made(build("llama"))
    with torch.device("meta"):
        inside = run(generator)
    known = run(made(build("llama")))
    assert_same(inside, known)
    assert_same(run(generator), known)
    assert call != "a streamer" or known[: len(PROMPTS[0])] == PROMPTS[0]


def test_a_seed_is_drawn_from_the_generator_of_the_cpu() -> None:
    drawn = []
    before = torch.get_rng_state()
    for state in ("no grad", "meta", "bfloat16"):
        torch.manual_seed(3)
        with STATES[state]():
            drawn.append(made(build("llama")).generate(PROMPTS, max_new_tokens=4, do_sample=True).token_ids)
    torch.set_rng_state(before)
    assert drawn[1:] == drawn[:-1]


# -- between two results, and between two calls ---------------------------------------------------------------

_AUTOCAST: dict[str, State] = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "autocast, float16": partial(torch.autocast, "cpu", torch.float16),
    "autocast, nothing cached": partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False),
    "no autocast": partial(torch.autocast, "cpu", enabled=False),
}
_ENTERED = {name: STATES[name] for name in ("inference mode", "bfloat16", "meta", "deterministic")} | _AUTOCAST
_SEED = 4
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_p": 0.9},
    "beams": {"num_beams": 2, "eos_token_id": [5, 17]},
    "watermark": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
    "guidance": {"guidance_scale": 1.5},
}


def _configs(kind: str) -> list[GenerationConfig]:
    """Each prompt ends in another step."""
    return [GenerationConfig(max_new_tokens=2 + 2 * number, **_KINDS[kind]) for number in range(len(PROMPTS))]


def _all_at_once(kind: str, state: State = nullcontext) -> list[Any]:
    with state():
        rows = made(build("llama")).generate(PROMPTS, _configs(kind), seed=_SEED, progress=False)
    return [facts(row) for row in rows]


def _one_by_one(kind: str, state_of: Callable[[int], AbstractContextManager[Any]]) -> list[Any]:
    """``state_of``: the state in which the caller asks for the result so numbered."""
    stream = made(build("llama")).stream(PROMPTS, _configs(kind), seed=_SEED)
    rows = []
    for number in range(len(PROMPTS)):
        with state_of(number):
            before = _modes()
            rows.append(next(stream))
            assert _modes() == before
    assert next(stream, None) is None
    return sorted((facts(row) for row in rows), key=lambda row: row[0])


@pytest.mark.some_cases
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["greedy", "beams"])
@pytest.mark.parametrize("state", _ENTERED)
def test_entered_between_two_results(state: str, kind: str) -> None:
    ours = _one_by_one(kind, lambda number: _ENTERED[state]() if number % 2 else nullcontext())
    assert_same(ours, _all_at_once(kind))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", _KINDS)
def test_inference_mode_is_left_after_the_first_result(kind: str) -> None:
    ours = _one_by_one(kind, lambda number: torch.inference_mode() if number == 0 else nullcontext())
    assert_same(ours, _all_at_once(kind))


@pytest.mark.some_cases
@pytest.mark.parametrize("others", [nullcontext, *_AUTOCAST.values()])
@pytest.mark.parametrize("kind", ["greedy", "beams"])
def test_a_call_keeps_the_autocast_that_it_began_under(kind: str, others: State) -> None:
    ours = _one_by_one(kind, lambda number: _AUTOCAST["autocast"]() if number == 0 else others())
    assert_same(ours, _all_at_once(kind, _AUTOCAST["autocast"]))


def test_an_error_in_a_step_gives_the_callers_autocast_back() -> None:
    model = build("llama")
    stream = made(model).stream(PROMPTS, _configs("greedy"))
    next(stream)
    hook = model.model.norm.register_forward_hook(lambda *_: 1 // 0)
    try:
        with _AUTOCAST["autocast"]():
            before = _modes()
            with pytest.raises(ZeroDivisionError):
                next(stream)
            assert _modes() == before
    finally:
        hook.remove()


@pytest.mark.some_cases
@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("state", ["inference mode", "bfloat16", "meta"])
def test_calls_in_and_out_of_a_state(state: str, keep: int) -> None:
    """One generator, which keeps prefixes or does not."""
    model = build("gemma3")
    given: dict[str, Any] = {"max_new_tokens": 3, "logprobs": 1, "progress": False}
    known = [facts(row) for row in made(model).generate(PROMPTS, **given)]
    with made(model, keep_prefixes=keep) as generator:
        for inside in (True, False, True, False):
            with STATES[state]() if inside else nullcontext():
                result = generator.generate(PROMPTS, **given)
            assert_same([facts(row) for row in result], known)


def test_results_hold_no_graph_and_the_callers_grad_mode_stays() -> None:
    model = build("llama")
    ids = torch.tensor([PROMPTS[0]])
    with torch.enable_grad():
        out = made(model).generate(
            ids, max_new_tokens=2, return_dict_in_generate=True, output_scores=True, output_logits=True
        )
        assert not any(each.requires_grad for each in (*out.scores, *out.logits))
        stream = made(model).stream(PROMPTS, _configs("greedy"))
        for mode in (True, False, True, False):
            with torch.set_grad_enabled(mode):
                next(stream)
                assert torch.is_grad_enabled() is mode
        assert model(ids).logits.requires_grad


# -- every tensor that is made here ----------------------------------------------------------------------------

_MADE = {"zeros", "ones", "empty", "full", "tensor", "as_tensor", "asarray", "eye", "scalar_tensor", "empty_strided"}
_MADE |= {"rand", "randn", "randint", "randperm", "arange", "linspace"}
_FLOATS = {"zeros", "ones", "empty", "full", "eye", "rand", "randn", "linspace", "empty_strided"}


def test_every_tensor_names_its_device_and_type() -> None:
    """Also on paths that need a GPU: what is left out is taken from defaults that a user may set."""
    root = Path(hf_batchllm.__file__).parent
    folders = [root, *(folder for folder in (root.parent / "patches", root.parent / "kernels") if folder.is_dir())]
    files = [file for folder in folders for file in folder.rglob("*.py") if "bench" not in file.parts]
    assert len(files) > 100
    lacking = []
    for file in files:
        text = file.read_text()
        for call in ast.walk(ast.parse(text)) if "torch." in text else ():
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if not isinstance(call, ast.Call) or not name.startswith("torch.") or name[6:] not in _MADE:
                continue
            given = {keyword.arg for keyword in call.keywords}
            whole = None in given  # ``**fields``, which name both
            if not whole and ("device" not in given or (name[6:] in _FLOATS and "dtype" not in given)):
                lacking.append(f"{file.name}:{call.lineno}: {ast.unparse(call)}")
    assert not lacking


# -- warnings that are errors ----------------------------------------------------------------------------------


class _Counts(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores


_WARNED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no length": ({}, {"max_new_tokens": None}),
    "in the midst of a step": ({}, {"logits_processor": [_Counts()]}),
    "while it is wired": ({"scheduler": "fifo"}, {"num_beams": 2}),
    "guidance": ({}, {"guidance_scale": 1.5}),
}


@pytest.mark.parametrize("case", _WARNED)
def test_our_warnings_as_errors_leave_everything_as_it_was(case: str) -> None:
    fields, options = _WARNED[case]
    given = {name: value for name, value in ({"max_new_tokens": 4} | options).items() if value is not None}
    model = build("gemma2")
    known = made(model).generate(PROMPTS, max_new_tokens=4).token_ids
    before, generator = fingerprint(model), made(model, keep_prefixes=4, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning):
                generator.generate(PROMPTS, **given)
            assert fingerprint(model) == before
        assert generator.generate(PROMPTS, max_new_tokens=4).token_ids == known


def test_a_low_limit_of_recursion() -> None:
    nested = [[1 + index % 90 for index in range(length)] for length in range(1, 200, 2)]
    generator = made(build("llama"))
    known = generator.generate(nested, max_new_tokens=1).token_ids
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        assert generator.generate(nested, max_new_tokens=1).token_ids == known
    finally:
        sys.setrecursionlimit(limit)
