"""What a process is set to around a call (default types and devices, modes, flags) changes nothing in its results."""

from __future__ import annotations

import ast
import inspect
import random
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_families import build
from support_process_states import CALLS, IDS, MASK, PROMPTS, STATES, assert_same, made, threads
from support_untouched import fingerprint
from transformers import LogitsProcessor

import hf_batchllm
from hf_batchllm.model import architecture

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
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
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


def test_numpy_tensors_on_another_default_device() -> None:
    given: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0}
    known = made(build("llama")).generate(IDS.numpy(), attention_mask=MASK.numpy(), **given)
    with torch.device("meta"):
        ours = made(build("llama")).generate(IDS.numpy(), attention_mask=MASK.numpy(), **given)
    assert_same(ours, known)


def test_stop_strings_prepared_under_another_default_device_are_good_without_it() -> None:
    known = expected("llama", "stop strings")
    generator = made(build("llama"))
    given: dict[str, Any] = {"max_new_tokens": 4, "stop_strings": ["e", "bc"]}
    with torch.device("meta"):
        generator.generate(PROMPTS, **given)
    assert [row.token_ids for row in generator.generate(PROMPTS, **given)] == [row[2] for row in known]


def test_a_streamer_gets_real_tokens_under_another_default_device() -> None:
    class Heard:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    heard, generator = Heard(), made(build("llama"))
    with torch.device("meta"):
        (row,) = generator.generate([PROMPTS[0]], max_new_tokens=4, streamer=heard)
    assert heard.tokens == [*PROMPTS[0], *row.token_ids, -1]


def test_a_seed_is_drawn_from_the_generator_of_the_cpu() -> None:
    drawn = []
    before = torch.get_rng_state()
    for state in ("no grad", "meta", "bfloat16"):
        torch.manual_seed(3)
        with STATES[state]():
            drawn.append(made(build("llama")).generate(PROMPTS, max_new_tokens=4, do_sample=True).token_ids)
    torch.set_rng_state(before)
    assert drawn[1:] == drawn[:-1]


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
    def __init__(self) -> None:
        self.calls = 0

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
