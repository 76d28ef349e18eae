"""What trainers leave on a model (hooks for gradients, a forward around its own) is known, and costs nothing."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from support_families import FAMILIES
from torch import nn

from hf_batchllm import BatchGenerator, UnsupportedModelError
from hf_batchllm.model.inspection.user_state import not_in_graphs, stamp_of
from hf_batchllm.patches.uncompiled import own_forward

PROMPTS = [[5, 6, 7, 8], [5, 6, 9]]


def own_code_of(model: Any) -> Any:
    return BatchGenerator(model).architecture.own_code.found


def as_trl_does(model: Any, called: Any = None) -> None:
    """As ``add_fused_lm_head`` of TRL 1.16 puts a forward around a model's."""
    original_forward = model.forward if called is None else called

    @functools.wraps(type(model).forward)
    def _fused_forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original_forward(*args, **kwargs)
        raise AssertionError("nobody asks for a loss")

    there = {**globals(), "__name__": "trl.trainer.utils"}
    made = types.FunctionType(_fused_forward.__code__, there, closure=_fused_forward.__closure__)
    made.__kwdefaults__ = _fused_forward.__kwdefaults__
    model.forward = types.MethodType(functools.wraps(type(model).forward)(made), model)


def test_gradient_checkpointing_switched_off_and_on_again_is_no_change() -> None:
    model = FAMILIES["llama"]()
    expected = [each.token_ids for each in BatchGenerator(model).generate(PROMPTS, max_new_tokens=3)]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    stamp = stamp_of(model, torch.device("cpu"))
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    assert stamp_of(model, torch.device("cpu")) == stamp
    assert not own_code_of(model)
    assert not_in_graphs(model) is None
    assert [each.token_ids for each in BatchGenerator(model).generate(PROMPTS, max_new_tokens=3)] == expected


def test_a_trainers_forward_around_the_models_is_the_models() -> None:
    model = FAMILIES["llama"]()
    expected = [each.token_ids for each in BatchGenerator(model).generate(PROMPTS, max_new_tokens=3)]
    as_trl_does(model)
    as_trl_does(model)  # a second trainer
    assert own_forward(model) is None and not own_code_of(model) and not_in_graphs(model) is None
    assert [each.token_ids for each in BatchGenerator(model).generate(PROMPTS, max_new_tokens=3)] == expected


def test_the_same_beneath_the_autocast_of_accelerate() -> None:
    operations = pytest.importorskip("accelerate.utils.operations")
    model = FAMILIES["llama"]()
    as_trl_does(model)
    in_half = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward.__func__)
    model.forward = types.MethodType(operations.convert_outputs_to_fp32(in_half), model)
    assert not own_code_of(model)


def test_what_a_trainers_forward_calls_is_looked_at() -> None:
    model = FAMILIES["llama"]()
    theirs = model.forward

    def backwards(*args: Any, **kwargs: Any) -> Any:
        output = theirs(*args, **kwargs)
        output.logits = output.logits.flip(1)
        return output

    as_trl_does(model, backwards)
    assert own_forward(model) is backwards and not_in_graphs(model) is not None
    with pytest.raises(UnsupportedModelError, match="runs code that is not transformers' own"):
        BatchGenerator(model).generate(PROMPTS, max_new_tokens=3)


def test_other_hooks_on_embeddings_are_hooks() -> None:
    def make_inputs_require_grads(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 0

    model = FAMILIES["llama"]()
    model.get_input_embeddings().register_forward_hook(make_inputs_require_grads)
    assert "hooks" in str(not_in_graphs(model))
