"""accelerate's forward around a model's: its autocast is kept, and the model runs as fast as without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, AutocastKwargs
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils.operations import convert_outputs_to_fp32
from support_device_loop import device as device  # a fixture
from support_families import FAMILIES
from support_parity import mixed_prompts

from hf_batchllm import BatchGenerator
from hf_batchllm.model.inspection.user_state import not_in_graphs
from hf_batchllm.patches.autocast_around import autocasts_within, dtype_within, past_autocast
from hf_batchllm.patches.uncompiled import own_forward

PROMPTS = mixed_prompts(2)[:6]
GREEDY: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}


@pytest.fixture
def accelerator(device: str) -> Iterator[Accelerator]:
    states = AcceleratorState, GradientState, PartialState
    before = [dict(state._shared_state) for state in states]
    for state in states:
        state._shared_state.clear()
    yield Accelerator(mixed_precision="bf16", cpu=device == "cpu")
    for state, held in zip(states, before, strict=True):
        state._shared_state.clear()
        state._shared_state.update(held)


def alone(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=model.device)
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, len(prompt) :].tolist())
    return found


def mostly(one: list[list[int]], other: list[list[int]]) -> bool:
    """In bfloat16 a near tie may go either way."""
    return sum(first == second for first, second in zip(one, other, strict=True)) >= len(one) - 1


def test_what_is_inside_is_found(accelerator: Accelerator) -> None:
    model: Any = FAMILIES["llama"]()
    assert not autocasts_within(model)
    accelerator.prepare_model(model)
    assert own_forward(model) is None and not_in_graphs(model) is None
    assert past_autocast(model.forward).__func__ is type(model).forward
    assert len(autocasts_within(model)) == 1
    assert dtype_within(model, model.device) == torch.bfloat16
    assert dtype_within(model, torch.device("meta")) is None
    theirs = model.forward

    def mine(*args: Any, **named: Any) -> Any:
        return theirs(*args, **named)

    model.forward = mine
    assert own_forward(model) is mine and not autocasts_within(model)


def test_an_autocast_that_is_switched_off_gives_no_type(accelerator: Accelerator) -> None:
    model: Any = FAMILIES["llama"]()
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    accelerator.prepare_model(model)
    assert len(autocasts_within(model)) == 1 and dtype_within(model, model.device) is None
    on = torch.autocast(model.device.type, dtype=torch.bfloat16)
    model.forward = convert_outputs_to_fp32(on(model.forward))
    assert len(autocasts_within(model)) == 2 and dtype_within(model, model.device) is None  # the innermost counts


def test_a_forward_of_the_user_inside_is_not_passed_over(accelerator: Accelerator) -> None:
    model: Any = FAMILIES["llama"]()
    theirs = model.forward
    model.forward = mine = lambda *args, **named: theirs(*args, **named)
    accelerator.prepare_model(model)
    assert own_forward(model) is mine
    assert dtype_within(model, model.device) == torch.bfloat16


def test_tokens_are_those_of_generate_and_steps_are_replays(accelerator: Accelerator) -> None:
    model: Any = accelerator.prepare_model(FAMILIES["llama"]())
    with BatchGenerator(model, page_size=16) as generator:
        result = generator.generate(PROMPTS, progress=False, **GREEDY)
        assert mostly(result.token_ids, alone(model))
        assert "replayed" in result.report.graphs and "autocast is on" in result.report.fused
        # A trainer's step in between, which leaves copies of weights in the autocast's cache if anything does.
        ids = torch.tensor([PROMPTS[0]], device=model.device)
        model(ids, labels=ids).loss.backward()
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
        trained = generator.generate(PROMPTS, progress=False, **GREEDY)
        assert trained.token_ids != result.token_ids and mostly(trained.token_ids, alone(model))
        # What accelerate put around the model is taken off.
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert not autocasts_within(model)
        plain = generator.generate(PROMPTS, progress=False, **GREEDY)
        assert plain.token_ids == alone(model)
        assert "replayed" in plain.report.graphs and "autocast" not in plain.report.fused
