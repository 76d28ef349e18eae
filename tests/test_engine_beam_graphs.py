"""Beams run as graphs, and their answers are those of ``generate``."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support_beam_cases import PROMPTS, STOPS, Case, expected, run, without_filling
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on

from hf_batchllm import BatchGenerator

SEARCH: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 16, "num_return_sequences": 2}


def replayed(result: Any) -> int:
    found = re.match(r"(\d+) steps? replayed", result.report.graphs)
    return int(found[1]) if found else 0


@pytest.mark.some_cases
@pytest.mark.parametrize("options", [{}, {"eos_token_id": STOPS, "early_stopping": True, "repetition_penalty": 1.2}])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_next", "falcon_h1"])
def test_steps_of_beams_are_replays(family: str, options: dict[str, Any], device: str) -> None:
    case = Case(family, PROMPTS, SEARCH | options | {"pad_token_id": 0}, {"page_size": 16})
    result, near = run(case, model_on(device, family))
    assert near <= 2
    assert replayed(result) > 5


def test_with_little_memory(device: str) -> None:
    pages = 4 + 3 * 2
    case = Case("llama", PROMPTS, SEARCH | {"max_new_tokens": 24}, {"page_size": 16}, pages=pages)
    result, near = run(case, model_on(device, "llama"))
    assert near <= 2
    assert replayed(result) > 5


@pytest.mark.parametrize("option", ["logits_processor", "stopping_criteria"])
def test_code_that_changes_the_model_is_heard(option: str, device: str) -> None:
    model = model_on(device, "llama")
    head, prompt = model.lm_head.weight, PROMPTS[0]

    def flips(ids: torch.Tensor, scores: Any) -> Any:
        if ids.shape[1] == len(prompt) + 11:
            model.lm_head.weight = torch.nn.Parameter(head.data.flip(0).contiguous(), requires_grad=False)
        return scores if option == "logits_processor" else torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    given = SEARCH | {option: [flips], "num_return_sequences": 1, "eos_token_id": None}
    try:
        out = expected(model, prompt, **given)
        model.lm_head.weight = head
        with BatchGenerator(model, fuse=False) as generator:
            result = generator.generate([prompt], progress=False, **given)
    finally:
        model.lm_head.weight = head
    assert result.token_ids[0] == without_filling(
        out.sequences[0, len(prompt) :].tolist(), out.beam_indices[0].tolist()
    )
    assert 5 < replayed(result) < 11  # too few steps were left for another capture


def test_without_graphs_where_they_are_not_wanted(device: str) -> None:
    case = Case("llama", PROMPTS, SEARCH, {"page_size": 16, "cuda_graphs": False})
    result, near = run(case, model_on(device, "llama"))
    assert near <= 2
    assert not replayed(result)
