"""What keeps a part of a layer from being fused: it runs as ever, the rest is fused, and the reason is named."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from support_fused import (
    FORWARDS,
    Fusing,
    HalfParameter,
    OwnLayer,
    a_layer,
    as_class,
    logits_of_steps,
    new_model,
    own_forward,
    reasons,
    run,
    some_prompts,
    wrap,
)
from support_fused import fusing as fusing  # a fixture
from support_kernels import INTERPRETED
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_batchllm.patches.gated_norms import gated_norms

pytestmark = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")
Change = Callable[[Any], Any]


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


def at(name: str, change: Callable[..., Any], *given: Any) -> Change:
    """The change, made to a part of layer 1."""
    return lambda model: change(a_layer(model).get_submodule(name), *given)


def both(*changes: Change) -> Change:
    return lambda model: [change(model) for change in changes]


def adapter(name: str) -> Change:
    return lambda model: wrap(model, name)


def halved(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: output * 0.5)


def _tie(model: Any) -> None:
    model.model.layers[2].mlp.gate_proj.weight = a_layer(model).mlp.gate_proj.weight


def _share_memory(model: Any) -> None:
    model.model.layers[2].mlp.gate_proj.weight.data = a_layer(model).mlp.gate_proj.weight.data


def _from_a_larger_tensor(linear: Any) -> None:
    linear.weight.data = torch.cat([linear.weight.data] * 2)[: len(linear.weight)]


def _no_v_bias(attention: Any) -> None:
    for linear in (attention.q_proj, attention.k_proj):
        linear.bias = nn.Parameter(torch.ones(linear.out_features))


def _in_inference_mode(linear: Any) -> None:
    with torch.inference_mode():
        linear.weight = nn.Parameter(linear.weight.clone())


def _strides(linear: Any) -> None:
    linear.weight.data = linear.weight.data.t().contiguous().t()


def _special(linear: Any) -> None:
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(HalfParameter))


HERE = "of test_patches_fused_obstacles"
NOT_PLAIN = "`q_proj` is a Adapter of support_fused, not a plain Linear"
OWN_NORM = f"`input_layernorm` is a OwnNorm {HERE}, not a plain LlamaRMSNorm"
LARGER = "the weights of `q_proj`, `k_proj` and `v_proj` are views of a larger tensor"
TIED = "MLP of 2 of 3 layers: the weights of `gate_proj` and `up_proj` are tied to others"
HOOKED = "norms of 1 of 3 layers: the layer has hooks"
# What is done to layer 1 of three, how many forwards are not put in place then, and what is said.
OBSTACLES: dict[str, tuple[Change, int, str]] = {
    "adapter in attention": (adapter("self_attn.q_proj"), 1, f"attention of 1 of 3 layers: {NOT_PLAIN}"),
    "adapter in the MLP": (adapter("mlp.up_proj"), 1, "MLP of 1 of 3 layers: `up_proj`"),
    "adapters elsewhere": (both(adapter("self_attn.o_proj"), adapter("mlp.down_proj")), 0, ""),
    "hook on a layer": (at("", halved), 1, HOOKED),
    "hook before a layer": (at("", nn.Module.register_forward_pre_hook, lambda _, args: (args[0] * 0.5,)), 1, HOOKED),
    "hook on a projection": (at("self_attn.v_proj", halved), 1, "`v_proj` has hooks"),
    "hook on the activation": (at("mlp.act_fn", halved), 1, "`act_fn` has hooks"),
    "hook on a norm": (at("post_attention_layernorm", halved), 1, "`post_attention_layernorm` has hooks"),
    "hook on the last norm": (lambda model: halved(model.model.norm), 1, "the last norm: it has hooks"),
    "backward hook": (
        at("mlp.gate_proj", nn.Module.register_full_backward_hook, lambda *given: None),
        *(1, "`gate_proj` has hooks"),
    ),
    "hooks on what is called": (both(at("mlp", halved), at("self_attn.o_proj", halved)), 0, ""),
    "accelerate's hook": (
        at("mlp.gate_proj", add_hook_to_module, ModelHook()),
        *(1, "`gate_proj` has a hook of accelerate's"),
    ),
    "own forward of a projection": (at("self_attn.k_proj", own_forward), 1, "`k_proj` has a forward of its own"),
    "own forward of attention": (at("self_attn", own_forward), 1, "`self_attn` has a forward of its own"),
    "own forward of a layer": (at("", own_forward), 1, "the layer has a forward of its own"),
    "own class of norm": (at("input_layernorm", as_class, OwnNorm), 1, OWN_NORM),
    "own class of layer": (at("", as_class, OwnLayer), 1, "the layer is a OwnLayer"),
    "own class of model": (
        lambda model: as_class(model.model, Steered),
        *(1, f"the residual between layers: the model is a Steered {HERE}"),
    ),
    "compiled": (lambda model: a_layer(model).mlp.compile(backend="eager"), 1, "`mlp` is compiled"),
    "parametrized": (
        at("mlp.gate_proj", parametrizations.weight_norm),
        *(1, "`gate_proj` is a ParametrizedLinear of torch, not a plain Linear"),
    ),
    "pruned": (at("mlp.gate_proj", prune.l1_unstructured, "weight", 0.2), 1, "`gate_proj` has hooks"),
    "activation": (at("mlp", setattr, "act_fn", nn.GELU()), 1, "there is no kernel for the activation GELU"),
    "tied": (_tie, 2, TIED),
    "sharing memory": (_share_memory, 2, "share their memory with something else"),
    "part of a larger tensor": (at("self_attn.k_proj", _from_a_larger_tensor), 1, LARGER),
    "some biases": (at("self_attn", _no_v_bias), 1, "only some of its projections have a bias"),
    "inference mode": (at("mlp.up_proj", _in_inference_mode), 1, "were made in inference mode"),
    "strides": (at("mlp.up_proj", _strides), 1, "are views of a larger tensor"),
    "special tensors": (at("mlp.up_proj", _special), 1, "are sharded or quantised"),
    "wrapped layer": (
        lambda model: model.model.layers.__setitem__(1, Wrapper(a_layer(model))),
        *(3, f"norms of 1 of 3 layers: the layer is a Wrapper {HERE}"),
    ),
}


@pytest.mark.some_cases
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_is_in_the_way_stays_in_the_way(obstacle: str, fusing: Fusing) -> None:
    change, lost, said = OBSTACLES[obstacle]
    change(model := new_model())
    before = {name: list(vars(module)) for name, module in model.named_modules()}
    fusing.assert_nothing_changes(model)
    assert set(fusing) == {FORWARDS - lost}
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


def test_what_fused_layers_would_not_call(fusing: Fusing, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = new_model("gemma2"), Gemma2RMSNorm._norm
    before = own_logits(monkeypatch, model)
    norm = a_layer(model).input_layernorm
    norm._norm = types.MethodType(lambda self, x: own(self, x) * -3, norm)
    found = fusing.assert_nothing_changes(model, some_prompts(3))
    assert fusing and not torch.allclose(found[-1], before, atol=1e-4)
    assert reasons(model) == "norms of 1 of 3 layers: `input_layernorm` has a `_norm` of its own"
    del norm._norm, fusing[:]
    monkeypatch.setattr(Gemma2RMSNorm, "_norm", lambda self, x: own(self, x) * -3)
    found = fusing.assert_nothing_changes(model, some_prompts(3))
    assert not fusing and not torch.allclose(found[-1], before, atol=1e-4)
    assert run(model).report.fused == f"nothing: {Gemma2RMSNorm.__module__}.Gemma2RMSNorm._norm has been replaced"


def test_norms_of_queries_and_keys_that_differ() -> None:
    model = new_model("qwen3")
    a_layer(model).self_attn.q_norm.variance_epsilon *= 2
    assert "the norms of q and k differ" in reasons(model)


# -- experts and their routers, and the norms of mixers --------------------------------------------------------


def _edited_between(block: Any) -> None:
    def forward(states: torch.Tensor) -> torch.Tensor:
        flat = states.view(-1, states.shape[-1])
        _, shares, indices = block.gate(flat)
        indices[indices == 1] = 0
        chosen = nn.functional.one_hot(indices, 4)  # of int64 alone
        assert chosen.shape[-1] == 4
        return block.experts(flat, indices, shares).view(states.shape)

    block.forward = forward


def _ablated(experts: nn.Module, args: Any) -> Any:
    """Expert 1 does the work of expert 0: a token may then have one expert twice."""
    return args[0], args[1].masked_fill(args[1] == 1, 0), args[2]


def _shift_in_place(indices: torch.Tensor) -> None:
    indices.copy_((indices + 1) % 4)


class Own(nn.Module):
    def forward(self, states: torch.Tensor, indices: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return states * 0.1


class Mine(Qwen3MoeExperts):
    def forward(self, *given: Any) -> torch.Tensor:
        return super().forward(*given) * 0.5


class MyGatedNorm(MambaRMSNormGated):
    def forward(self, *given: Any) -> torch.Tensor:
        return super().forward(*given) * 0.5


EXPERTS, PRE_HOOK, HOOK = "mlp.experts", nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook
LEFT = "experts of 1 of 3 layers"
# What is done to a layer's experts, and what is said of it.
OF_EXPERTS: dict[str, tuple[Change, str]] = {
    "an expert twice": (at(EXPERTS, PRE_HOOK, _ablated), ""),
    "indices edited in place": (at(EXPERTS, PRE_HOOK, lambda _, args: _shift_in_place(args[1])), ""),
    "indices edited by a hook on the router": (at("mlp.gate", HOOK, lambda _, __, out: _shift_in_place(out[2])), ""),
    "indices edited between the two": (at("mlp", _edited_between), ""),
    "a gate of its own": (
        at(EXPERTS, setattr, "_apply_gate", lambda both: both.chunk(2, dim=-1)[1] * 0.5),
        f"{LEFT}: `experts` has a `_apply_gate` of its own",
    ),
    "experts of the user's": (at("mlp", setattr, "experts", Own()), f"{LEFT}: the experts are a Own {HERE}"),
    "a subclass": (at(EXPERTS, as_class, Mine), f"{LEFT}: the experts are a Mine {HERE}"),
}


def own_logits(monkeypatch: pytest.MonkeyPatch, model: Any) -> torch.Tensor:
    """Of the last step."""
    return logits_of_steps(monkeypatch, model, some_prompts(3), fuse=False)[-1]


@pytest.mark.some_cases
@pytest.mark.parametrize("change", OF_EXPERTS)
def test_what_a_user_does_to_experts(change: str, fusing: Fusing, monkeypatch: pytest.MonkeyPatch) -> None:
    change_it, said = OF_EXPERTS[change]
    model = new_model("qwen3_moe")
    before = own_logits(monkeypatch, model)
    change_it(model)
    own = fusing.assert_nothing_changes(model, some_prompts(3), near=True)
    assert not torch.allclose(own[-1], before, atol=1e-4)
    assert fusing and reasons(model) == said
    summary = run(model).report.fused
    assert summary.startswith("3 of 3 layers, with " + ("the experts of 2 of 3; left" if said else "their experts"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (halved, "`norm` has hooks"),
        (lambda norm: as_class(norm, MyGatedNorm), f"`norm` is a MyGatedNorm {HERE}, not a plain MambaRMSNormGated"),
    ],
    ids=["a hook", "a subclass"],
)
def test_what_a_user_does_to_the_norm_of_a_mixer(
    change: Change, said: str, fusing: Fusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model("mamba2")
    before = own_logits(monkeypatch, model)
    first, *others = (found.module for found in gated_norms(model))
    change(first)
    own = fusing.assert_nothing_changes(model, some_prompts(3))
    assert not torch.allclose(own[-1], before, atol=1e-4)
    assert set(fusing) == {len(others)}
    whole = 1 + len(others)
    assert f"norms of 1 of {whole} mixers: {said}" in reasons(model)
    left = f"the norms of {len(others)} of {whole} mixers; left as they are: "
    assert run(model).report.fused.startswith(left)


def test_experts_of_another_library(fusing: Fusing, monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(module: Any, *given: Any) -> torch.Tensor:
        return grouped_mm_experts_forward(module, *given) * 0.5

    model = new_model("qwen3_moe")
    model.config._experts_implementation = "grouped_mm"
    before = own_logits(monkeypatch, model)
    with monkeypatch.context() as patched:
        patched.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", mine)
        own = fusing.assert_nothing_changes(model, some_prompts(3), near=True)
        assert not torch.allclose(own[-1], before, atol=1e-4)
        assert "the `experts_implementation` 'grouped_mm' has been replaced" in reasons(model)


def test_a_router_that_its_kernel_does_not_know(fusing: Fusing) -> None:
    """Its own code runs, errors included."""
    model = new_model("qwen3_moe")
    run(model)  # looked at before: whether this architecture has been does not decide which error it is
    a_layer(model).mlp.gate.top_k = 5
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        run(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_weights_of_experts(family: str, fusing: Fusing) -> None:
    peft = pytest.importorskip("peft")
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
    model = peft.get_peft_model(new_model(family), config).eval()
    fusing.assert_nothing_changes(model, some_prompts(3), near=True)
    assert fusing
