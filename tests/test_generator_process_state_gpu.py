"""On a GPU: what a process is set to around a call changes nothing in its results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support_families import build
from support_process_states import PROMPTS, STATES, State, assert_same, default_device, deterministic, facts, made
from transformers import PreTrainedModel

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

_STATES: dict[str, State] = {name: STATES[name] for name in ("bfloat16", "float64", "meta", "inference mode")}
_STATES |= {
    "cuda": lambda: default_device("cuda"),
    "deterministic": deterministic,
    "a stream": lambda: torch.cuda.stream(torch.cuda.Stream()),
}
_CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 1},
    "sampled on the device": {"do_sample": True, "top_p": 0.9, "min_p": 0.02, "seed": 3},
    "sampled by the host": {"do_sample": True, "typical_p": 0.95, "top_p": 0.9, "seed": 3},
    "penalty": {"repetition_penalty": 1.3, "min_new_tokens": 3, "eos_token_id": 5},
    "beams": {"num_beams": 3},
    "drawn beams": {"num_beams": 2, "do_sample": True, "seed": 3},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return copy.deepcopy(build("llama")).cuda()


@pytest.fixture(autouse=True)
def workspace_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic mode asks for


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize("state", _STATES)
def test_a_state_changes_nothing(state: str, call: str, model: PreTrainedModel) -> None:
    given = {"max_new_tokens": 8, "progress": False} | _CALLS[call]
    known = [facts(row) for row in made(model).generate(PROMPTS, **given)]
    with _STATES[state]():
        ours = [facts(row) for row in made(model).generate(PROMPTS, **given)]
    assert_same(ours, known)


@pytest.mark.parametrize("state", _STATES)
def test_entered_between_two_results(state: str, model: PreTrainedModel) -> None:
    prompts = [prompt[: 1 + number] for number, prompt in enumerate(PROMPTS * 3)]
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "seed": 1, "eos_token_id": list(range(20))}
    known = made(model).generate(prompts, progress=False, **given).token_ids
    rows = []
    stream = made(model).stream(prompts, **given)
    while len(rows) < len(prompts):
        rows.append(next(stream))
        with _STATES[state]():
            rows.append(next(stream))
    assert [row.token_ids for row in sorted(rows, key=lambda row: row.index)] == known
