"""What an owner does to experts and routers: it is seen, and where it stands in the way, that is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_fused import a_layer, assert_same_logits, logits_of_steps, new_model, reasons, run, some_prompts
from support_fused import fusing as fusing  # a fixture
from support_kernels import INTERPRETED
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

pytestmark = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")


def _ablated(model: Any) -> None:
    """Expert 1 does the work of expert 0: a token may then have one expert twice."""
    a_layer(model).mlp.experts.register_forward_pre_hook(
        lambda module, args: (args[0], args[1].masked_fill(args[1] == 1, 0), args[2])
    )


def _edited_in_place(model: Any) -> None:
    a_layer(model).mlp.experts.register_forward_pre_hook(
        lambda module, args: (args[1].copy_((args[1] + 1) % 4), None)[1]
    )


def _edited_by_the_router(model: Any) -> None:
    a_layer(model).mlp.gate.register_forward_hook(
        lambda module, args, output: (output[2].copy_((output[2] + 1) % 4), None)[1]
    )


def _edited_between(model: Any) -> None:
    block = a_layer(model).mlp

    def forward(states: torch.Tensor) -> torch.Tensor:
        flat = states.view(-1, states.shape[-1])
        _, shares, indices = block.gate(flat)
        indices[indices == 1] = 0
        chosen = nn.functional.one_hot(indices, 4)  # of int64 alone
        assert chosen.shape[-1] == 4
        return block.experts(flat, indices, shares).view(states.shape)

    block.forward = forward


def _own_gate(model: Any) -> None:
    experts = a_layer(model).mlp.experts
    experts._apply_gate = lambda both: both.chunk(2, dim=-1)[1] * 0.5


class Own(nn.Module):
    def forward(self, states: torch.Tensor, indices: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return states * 0.1


class Mine(Qwen3MoeExperts):
    def forward(self, *given: Any) -> torch.Tensor:
        return super().forward(*given) * 0.5


def _replaced(model: Any) -> None:
    a_layer(model).mlp.experts = Own()


def _subclassed(model: Any) -> None:
    a_layer(model).mlp.experts.__class__ = Mine


# What is done to a layer, and what is said of it.
CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "an expert twice": (_ablated, ""),
    "indices edited in place": (_edited_in_place, ""),
    "indices edited by a hook on the router": (_edited_by_the_router, ""),
    "indices edited between the two": (_edited_between, ""),
    "a gate of its own": (_own_gate, "experts of 1 of 3 layers: its gate has been replaced"),
    "experts of the owner's": (
        _replaced,
        "experts of 1 of 3 layers: the experts are a Own of test_patches_experts_obstacles",
    ),
    "a subclass": (_subclassed, "experts of 1 of 3 layers: the experts are a Mine of test_patches_experts_obstacles"),
}


@pytest.mark.some_cases
@pytest.mark.parametrize("change", CHANGES)
def test_what_an_owner_does(change: str, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    change_it, said = CHANGES[change]
    model = new_model("qwen3_moe")
    before = logits_of_steps(monkeypatch, model, some_prompts(3), fuse=False)
    change_it(model)
    own = logits_of_steps(monkeypatch, model, some_prompts(3), fuse=False)
    assert not torch.allclose(own[0], before[0], atol=1e-4)
    assert_same_logits(logits_of_steps(monkeypatch, model, some_prompts(3)), own, torch.float32, near=True)
    assert fusing and reasons(model) == said
    summary = run(model).report.fused
    assert summary.startswith("3 of 3 layers, with " + ("the experts of 2 of 3; left" if said else "their experts"))


def test_experts_of_another_library(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(module: Any, *given: Any) -> torch.Tensor:
        return grouped_mm_experts_forward(module, *given) * 0.5

    model = new_model("qwen3_moe")
    model.config._experts_implementation = "grouped_mm"
    before = logits_of_steps(monkeypatch, model, some_prompts(3), fuse=False)
    with monkeypatch.context() as patched:
        patched.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", mine)
        own = logits_of_steps(monkeypatch, model, some_prompts(3), fuse=False)
        assert not torch.allclose(own[0], before[0], atol=1e-4)
        assert_same_logits(logits_of_steps(monkeypatch, model, some_prompts(3)), own, torch.float32, near=True)
        assert "the `experts_implementation` 'grouped_mm' has been replaced" in reasons(model)


def test_a_router_that_its_kernel_does_not_know(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code runs, errors included."""
    model = new_model("qwen3_moe")
    run(model)  # looked at before: whether this architecture has been does not decide which error it is
    a_layer(model).mlp.gate.top_k = 5
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        run(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_weights_of_experts(family: str, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
    model = peft.get_peft_model(new_model(family), config).eval()
    own = logits_of_steps(monkeypatch, model, some_prompts(3), fuse=False)
    assert_same_logits(logits_of_steps(monkeypatch, model, some_prompts(3)), own, torch.float32, near=True)
    assert fusing
