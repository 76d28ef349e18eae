"""What keeps a part of a layer from being fused: it runs as ever, the rest is fused, and the reason is named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from support_fused import (
    FORWARDS,
    HalfParameter,
    OwnLayer,
    a_layer,
    as_class,
    assert_same_logits,
    logits_of_steps,
    new_model,
    own_forward,
    reasons,
    wrap,
)
from support_fused import fusing as fusing  # a fixture
from support_kernels import INTERPRETED
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

pytestmark = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")


class Steered(modeling_llama.LlamaModel):
    pass


class OwnNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * 1.5


class Wrapper(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: output * 0.5)


def _tie(model: Any) -> None:
    model.model.layers[2].mlp.gate_proj.weight = a_layer(model).mlp.gate_proj.weight


def _share_memory(model: Any) -> None:
    model.model.layers[2].mlp.gate_proj.weight.data = a_layer(model).mlp.gate_proj.weight.data


def _from_a_larger_tensor(model: Any) -> None:
    weight = a_layer(model).self_attn.k_proj.weight
    weight.data = torch.cat([weight.data, weight.data])[: len(weight)]


def _no_v_bias(model: Any) -> None:
    attention = a_layer(model).self_attn
    for linear in (attention.q_proj, attention.k_proj):
        linear.bias = nn.Parameter(torch.ones(linear.out_features))


def _in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        a_layer(model).mlp.up_proj.weight = nn.Parameter(a_layer(model).mlp.up_proj.weight.clone())


# What is done to layer 1 of three, how many forwards are put in place all the same, and what is said.
OBSTACLES: dict[str, tuple[Callable[[Any], Any], int, str]] = {
    "adapter in attention": (
        lambda model: wrap(model, "self_attn.q_proj"),
        FORWARDS - 1,
        "attention of 1 of 3 layers: `q_proj` is a Adapter of support_fused, not a plain Linear",
    ),
    "adapter in the MLP": (lambda model: wrap(model, "mlp.up_proj"), FORWARDS - 1, "MLP of 1 of 3 layers: `up_proj`"),
    "adapters elsewhere": (
        lambda model: (wrap(model, "self_attn.o_proj"), wrap(model, "mlp.down_proj")),
        FORWARDS,
        "",
    ),
    "hook on a layer": (
        lambda model: _hook(a_layer(model)),
        FORWARDS - 1,
        "norms of 1 of 3 layers: the layer has hooks",
    ),
    "hook before a layer": (
        lambda model: a_layer(model).register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
        FORWARDS - 1,
        "the layer has hooks",
    ),
    "hook on a projection": (
        lambda model: _hook(a_layer(model).self_attn.v_proj),
        FORWARDS - 1,
        "`v_proj` has hooks",
    ),
    "hook on the activation": (lambda model: _hook(a_layer(model).mlp.act_fn), FORWARDS - 1, "`act_fn` has hooks"),
    "hook on a norm": (
        lambda model: _hook(a_layer(model).post_attention_layernorm),
        FORWARDS - 1,
        "`post_attention_layernorm` has hooks",
    ),
    "hook on the last norm": (lambda model: _hook(model.model.norm), FORWARDS - 1, "the last norm: it has hooks"),
    "backward hook": (
        lambda model: a_layer(model).mlp.gate_proj.register_full_backward_hook(lambda *given: None),
        FORWARDS - 1,
        "`gate_proj` has hooks",
    ),
    "hooks on what is called": (
        lambda model: (_hook(a_layer(model).mlp), _hook(a_layer(model).self_attn.o_proj)),
        FORWARDS,
        "",
    ),
    "accelerate's hook": (
        lambda model: add_hook_to_module(a_layer(model).mlp.gate_proj, ModelHook()),
        FORWARDS - 1,
        "`gate_proj` has a hook of accelerate's",
    ),
    "own forward of a projection": (
        lambda model: own_forward(a_layer(model).self_attn.k_proj),
        FORWARDS - 1,
        "`k_proj` has a forward of its own",
    ),
    "own forward of attention": (
        lambda model: own_forward(a_layer(model).self_attn),
        FORWARDS - 1,
        "`self_attn` has a forward of its own",
    ),
    "own forward of a layer": (
        lambda model: own_forward(a_layer(model)),
        FORWARDS - 1,
        "the layer has a forward of its own",
    ),
    "own class of norm": (
        lambda model: as_class(a_layer(model).input_layernorm, OwnNorm),
        FORWARDS - 1,
        "`input_layernorm` is a OwnNorm of test_patches_fused_obstacles, not a plain LlamaRMSNorm",
    ),
    "own class of layer": (
        lambda model: as_class(a_layer(model), OwnLayer),
        FORWARDS - 1,
        "the layer is a OwnLayer",
    ),
    "own class of model": (
        lambda model: as_class(model.model, Steered),
        FORWARDS - 1,
        "the residual between layers: the model is a Steered of test_patches_fused_obstacles",
    ),
    "compiled": (
        lambda model: a_layer(model).mlp.compile(backend="eager"),
        FORWARDS - 1,
        "`mlp` is compiled",
    ),
    "parametrized": (
        lambda model: parametrizations.weight_norm(a_layer(model).mlp.gate_proj),
        FORWARDS - 1,
        "`gate_proj` is a ParametrizedLinear of torch, not a plain Linear",
    ),
    "pruned": (
        lambda model: prune.l1_unstructured(a_layer(model).mlp.gate_proj, "weight", 0.2),
        FORWARDS - 1,
        "`gate_proj` has hooks",
    ),
    "activation": (
        lambda model: setattr(a_layer(model).mlp, "act_fn", nn.GELU()),
        FORWARDS - 1,
        "there is no kernel for the activation GELU",
    ),
    "tied": (_tie, FORWARDS - 2, "MLP of 2 of 3 layers: the weights of `gate_proj` and `up_proj` are tied to others"),
    "sharing memory": (_share_memory, FORWARDS - 2, "share their memory with something else"),
    "part of a larger tensor": (
        _from_a_larger_tensor,
        FORWARDS - 1,
        "the weights of `q_proj`, `k_proj` and `v_proj` are views of a larger tensor",
    ),
    "some biases": (_no_v_bias, FORWARDS - 1, "only some of its projections have a bias"),
    "inference mode": (_in_inference_mode, FORWARDS - 1, "were made in inference mode"),
    "strides": (
        lambda model: setattr(
            a_layer(model).mlp.up_proj.weight,
            "data",
            a_layer(model).mlp.up_proj.weight.data.t().contiguous().t(),
        ),
        FORWARDS - 1,
        "are views of a larger tensor",
    ),
    "special tensors": (
        lambda model: setattr(
            a_layer(model).mlp.up_proj,
            "weight",
            nn.Parameter(a_layer(model).mlp.up_proj.weight.data.as_subclass(HalfParameter)),
        ),
        FORWARDS - 1,
        "are sharded or quantised",
    ),
    "wrapped layer": (
        lambda model: model.model.layers.__setitem__(1, Wrapper(a_layer(model))),
        FORWARDS - 3,
        "norms of 1 of 3 layers: the layer is a Wrapper of test_patches_fused_obstacles",
    ),
}


@pytest.mark.some_cases
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_is_in_the_way_stays_in_the_way(obstacle: str, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    change, forwards, said = OBSTACLES[obstacle]
    model = new_model()
    change(model)
    own = logits_of_steps(monkeypatch, model, fuse=False)
    before = {name: list(vars(module)) for name, module in model.named_modules()}
    fused = logits_of_steps(monkeypatch, model)
    assert_same_logits(fused, own, torch.float32)
    assert set(fusing) == {forwards}
    assert {name: list(vars(module)) for name, module in model.named_modules()} == before
    assert said in reasons(model) and bool(said) == bool(reasons(model))


def test_code_that_other_libraries_replace_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reasons(new_model())
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: x)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert reasons(new_model()).splitlines() == [
        "attention of 3 of 3 layers: its rotary embedding has been replaced",
        "MLP of 3 of 3 layers: `mlp` is a LlamaMLP whose forward has been replaced",
    ]


def test_a_wrapper_that_has_taken_over_the_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        *((cls, "forward") for cls in (LlamaMLP, LlamaDecoderLayer, modeling_llama.LlamaRMSNorm, nn.Linear)),
        (modeling_llama.LlamaAttention, "forward"),
        (modeling_llama, "apply_rotary_pos_emb"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, functools.wraps(inner := getattr(owner, name))(lambda *given: inner(*given)))
            assert "has been replaced" in reasons(new_model()), (owner, name)
    assert not reasons(new_model())


def test_norms_of_queries_and_keys_that_differ() -> None:
    model = new_model("qwen3")
    a_layer(model).self_attn.q_norm.variance_epsilon *= 2
    assert "the norms of q and k differ" in reasons(model)
