"""What is particular to a family's layers: its own obstacles, and what is read off its modules in each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support_families import FAMILIES
from support_fused import (
    REFERENCES,
    WITH_EXPERTS,
    Adapter,
    HalfParameter,
    a_layer,
    assert_same_logits,
    forwards_of,
    logits_of_steps,
    new_model,
    reasons,
    run,
    some_prompts,
)
from support_fused import fusing as fusing  # a fixture
from support_kernels import INTERPRETED
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.activations import GELUTanh

from hf_batchllm import BatchGenerator
from hf_batchllm.patches.fusion import Fusion

pytestmark = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")


def _hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: output * 0.5)


def _adapt(owner: nn.Module, name: str) -> None:
    setattr(owner, name, Adapter(getattr(owner, name)))


def _special(owner: nn.Module) -> None:
    """As a part of a weight that several devices share, or a quantised one."""
    owner.weight = nn.Parameter(owner.weight.data.as_subclass(HalfParameter))


def _python_gelu(model: Any) -> None:
    a_layer(model).mlp.act_fn = GELUTanh(use_gelu_tanh_python=True)


# A family, what is done to layer 1, how many forwards are not put in place, and what is said.
OBSTACLES: dict[str, tuple[str, Callable[[Any], Any], int, str]] = {
    "hook before the MLP": (
        "gemma3",
        lambda model: _hook(a_layer(model).pre_feedforward_layernorm),
        1,
        "norms of 1 of 3 layers: `pre_feedforward_layernorm` has hooks",
    ),
    "hook behind the MLP": (
        "gemma2",
        lambda model: _hook(a_layer(model).post_feedforward_layernorm),
        1,
        "norms of 1 of 3 layers: `post_feedforward_layernorm` has hooks",
    ),
    "hook on the norm of queries": (
        "gemma3",
        lambda model: _hook(a_layer(model).self_attn.q_norm),
        1,
        "attention of 1 of 3 layers: `q_norm` has hooks",
    ),
    "hook on the norm of all keys": (
        "olmo2",
        lambda model: _hook(a_layer(model).self_attn.k_norm),
        1,
        "attention of 1 of 3 layers: `k_norm` has hooks",
    ),
    "hook on a layer of parallel parts": (
        "cohere2",
        lambda model: _hook(a_layer(model)),
        1,
        "norms of 1 of 4 layers: the layer has hooks",
    ),
    "hook on a layer with a multiplier": (
        "granite",
        lambda model: _hook(a_layer(model)),
        1,
        "norms of 1 of 3 layers: the layer has hooks",
    ),
    "hook on a layer with norms behind": ("olmo2", lambda model: _hook(a_layer(model)), 1, "the layer has hooks"),
    "hook on experts": ("gpt_oss", lambda model: _hook(a_layer(model).mlp.experts), 0, ""),
    "hook on a dropout": (
        "phi3",
        lambda model: _hook(a_layer(model).resid_attn_dropout),
        1,
        "norms of 1 of 3 layers: `resid_attn_dropout` has hooks",
    ),
    "adapter on a projection of three": (
        "phi3",
        lambda model: _adapt(a_layer(model).self_attn, "qkv_proj"),
        1,
        "attention of 1 of 3 layers: `qkv_proj` is a Adapter of support_fused, not a plain Linear",
    ),
    "adapter on a projection of two": (
        "phi3",
        lambda model: _adapt(a_layer(model).mlp, "gate_up_proj"),
        1,
        "MLP of 1 of 3 layers: `gate_up_proj` is a Adapter",
    ),
    "special weight of a projection of three": (
        "phi3",
        lambda model: _special(a_layer(model).self_attn.qkv_proj),
        1,
        "attention of 1 of 3 layers: the weight of `qkv_proj` is sharded or quantised",
    ),
    "special weight of a norm": (
        "gemma3",
        lambda model: _special(a_layer(model).post_attention_layernorm),
        1,
        "norms of 1 of 3 layers: `post_attention_layernorm` has a weight that is sharded or quantised",
    ),
    "GELU step by step": ("gemma3", _python_gelu, 1, "MLP of 1 of 3 layers: there is no kernel for the activation"),
}


@pytest.mark.some_cases
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_is_in_the_way_stays_in_the_way(obstacle: str, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    family, change, less, said = OBSTACLES[obstacle]
    model = new_model(family)
    change(model)
    own = logits_of_steps(monkeypatch, model, fuse=False)
    assert_same_logits(logits_of_steps(monkeypatch, model), own, torch.float32, family in WITH_EXPERTS)
    assert set(fusing) == {forwards_of(family) - less}
    assert said in reasons(model) and bool(said) == bool(reasons(model))
    # What is said first is what a report has room for.
    assert run(model).report.fused.startswith("3 of" if not less else f"{forwards_of(family) // 3 - 1} of")


BROADCAST: dict[str, Callable[[Any], Any]] = {
    "the mean of all tokens": lambda states: states.mean(1, keepdim=True),
    "a number": lambda states: states.new_ones(()),
    "without the batch": lambda states: states[0],
}


@pytest.mark.some_cases
@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "cohere2"])
@pytest.mark.parametrize("shape", BROADCAST)
def test_hooks_may_give_what_is_broadcast(
    shape: str, family: str, fusing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those do that take a part out of a model to see what it does."""
    model = new_model(family)
    for layer in (a_layer(model), model.model.layers[-1]):
        layer.mlp.register_forward_hook(lambda module, args, output: BROADCAST[shape](output))
    hook = lambda module, args, output: (BROADCAST["the mean of all tokens"](output[0]), None)  # noqa: E731
    a_layer(model).self_attn.register_forward_hook(hook)
    own = logits_of_steps(monkeypatch, model, some_prompts(3), fuse=False)
    assert_same_logits(logits_of_steps(monkeypatch, model, some_prompts(3)), own, torch.float32)
    assert set(fusing) == {forwards_of(family)}


COMPILED: dict[str, Callable[[Any], Any]] = {
    "by its method": lambda model: model.compile(backend="eager"),
    "in a wrapper": lambda model: torch.compile(model, backend="eager"),
    "within": lambda model: model.model.compile(backend="eager"),
    "one layer": lambda model: a_layer(model).compile(backend="eager"),
}


@pytest.mark.parametrize("how", COMPILED)
def test_what_is_compiled_is_left_as_it_is(how: str) -> None:
    model = new_model("gemma3")
    layers = 1 if how == "one layer" else 3
    wrapper = COMPILED[how](model)
    model = model if wrapper is None else wrapper
    said = reasons(model).splitlines()
    why = "the layer, or the model around it, is compiled"
    assert said[:3] == [f"{part} of {layers} of 3 layers: {why}" for part in ("norms", "attention", "MLP")]
    if how == "one layer":
        assert not said[3:] and Fusion(model).merge(REFERENCES)._forwards
        return
    fused = Fusion(model).merge(REFERENCES)
    assert not fused._forwards and fused._fusion.summary.startswith(f"nothing: norms of 3 of 3 layers: {why}")


READ: dict[str, Callable[[Any], Any]] = {
    "granite": lambda model: setattr(a_layer(model), "residual_multiplier", 1.3),
    "gemma2": lambda model: setattr(a_layer(model).self_attn, "attn_logit_softcapping", 0.5),
    "smollm3": lambda model: setattr(a_layer(model).self_attn, "use_rope", 1),
    "cohere2": lambda model: setattr(a_layer(model).self_attn, "scaling", 1.0),
    "gemma3": lambda model: setattr(a_layer(model).post_attention_layernorm, "eps", 0.5),
}


@pytest.mark.some_cases
@pytest.mark.parametrize("family", READ)
def test_what_is_read_in_each_step(family: str, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Users may change it between two calls."""
    model = new_model(family)
    before = logits_of_steps(monkeypatch, model)
    with BatchGenerator(model, page_size=16, min_shared_tokens=1) as generator:
        generator.generate(some_prompts(), max_new_tokens=4, progress=False)
        READ[family](model)
        tokens = generator.generate(some_prompts(), max_new_tokens=4, progress=False).token_ids
    own = logits_of_steps(monkeypatch, model, fuse=False)
    assert_same_logits(logits_of_steps(monkeypatch, model), own, torch.float32)
    assert tokens == run(model, fuse=False).token_ids and not torch.equal(own[0], before[0])
    assert set(fusing) == {forwards_of(family)}


@pytest.mark.filterwarnings("ignore:.*dropout")
def test_dropouts_drop_in_training_mode(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("phi3").train()
    for layer in model.model.layers:
        layer.resid_attn_dropout.p = layer.resid_mlp_dropout.p = 0.3
    logits = {}
    for fuse in (False, True):
        torch.manual_seed(0)
        logits[fuse] = logits_of_steps(monkeypatch, model, fuse=fuse)
    assert_same_logits(logits[True], logits[False], torch.float32)
    assert set(fusing) == {forwards_of("phi3")}
    plain = logits_of_steps(monkeypatch, model.eval())
    assert not torch.equal(plain[0], logits[True][0])


def test_a_layer_without_experts_among_others(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    config = FAMILIES["qwen3_moe"]().config
    config.mlp_only_layers = [1]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    own = logits_of_steps(monkeypatch, model, fuse=False)
    assert_same_logits(logits_of_steps(monkeypatch, model), own, torch.float32, near=True)
    assert set(fusing) == {forwards_of("qwen3_moe") - 1}
    assert run(model).report.fused == "3 of 3 layers, with their experts"


_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a part of each head is turned": ("phi3", {"rope_parameters": _PARTIAL}),
    "scaled tables": ("olmo2", {"rope_parameters": _YARN}),
    "scaled tables that hold each angle once": ("gpt_oss", {"rope_parameters": _YARN}),
    "heads of their own width": ("granite", {"head_dim": 24}),
    "no layer turns": ("smollm3", {"no_rope_layers": [0, 0, 0]}),
    "windows": ("smollm3", FAMILIES["smollm3_window"].config),
    "windows, with experts": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    "no soft cap": ("gemma2", {"attn_logit_softcapping": None}),
}


@pytest.mark.some_cases
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    family, changed = VARIANTS[variant]
    model = replace(FAMILIES[family], config=FAMILIES[family].config | changed)()
    own = logits_of_steps(monkeypatch, model, some_prompts(4), fuse=False)
    assert not torch.equal(own[0], logits_of_steps(monkeypatch, new_model(family), some_prompts(4), fuse=False)[0])
    experts = family in WITH_EXPERTS
    assert_same_logits(logits_of_steps(monkeypatch, model, some_prompts(4)), own, torch.float32, experts)
    model.bfloat16()
    own = logits_of_steps(monkeypatch, model, some_prompts(4), fuse=False)
    assert_same_logits(logits_of_steps(monkeypatch, model, some_prompts(4)), own, torch.bfloat16, experts)
    assert set(fusing) == {forwards_of(family)}


def test_biases_are_merged_too(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("gemma3", "cohere2", "olmo2", "granite", "smollm3"):
        config = FAMILIES[family]().config
        config.attention_bias = config.mlp_bias = True
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        biases = [each for name, each in model.named_parameters() if name.endswith("_proj.bias")]
        assert biases
        with torch.no_grad():
            for each in biases:
                each.normal_()
        own = logits_of_steps(monkeypatch, model, fuse=False)
        assert_same_logits(logits_of_steps(monkeypatch, model), own, torch.float32)
        assert set(fusing) == {forwards_of(family)}
        fusing.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_grow_with_their_positions(
    dtype: torch.dtype, fusing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model("ministral3").to(dtype)
    before = logits_of_steps(monkeypatch, model, fuse=False)
    model.config.rope_parameters |= {"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 8}
    own = logits_of_steps(monkeypatch, model, fuse=False)
    assert not torch.equal(own[-1], before[-1])
    assert_same_logits(logits_of_steps(monkeypatch, model), own, dtype)


def test_what_is_clipped(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.patches.fusion.mixtures", lambda model: [])
    model = new_model("olmoe")
    before = logits_of_steps(monkeypatch, model, fuse=False)
    model.config.clip_qkv = 0.5
    own = logits_of_steps(monkeypatch, model, fuse=False)
    assert not torch.equal(own[-1], before[-1])
    assert_same_logits(logits_of_steps(monkeypatch, model), own, torch.float32)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", ["glm4_moe", "qwen2_moe", "deepseek_v3", "ernie4_5_moe"])
def test_an_adapter_in_the_mlp_beside_the_experts(
    family: str, fusing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(family)
    block = model.model.layers[-1].mlp
    name = "shared_expert" if hasattr(block, "shared_expert") else "shared_experts"
    _adapt(getattr(block, name), "up_proj")
    own = logits_of_steps(monkeypatch, model, fuse=False)
    assert_same_logits(logits_of_steps(monkeypatch, model), own, torch.float32, near=True)
    assert set(fusing) == {forwards_of(family) - 1}
    assert "MLP of 1 of 3 layers: `up_proj` is a Adapter" in reasons(model)


def test_heads_without_norms(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM-4-MoE is published with them and without."""
    config = new_model("glm4_moe").config
    for use in (True, False):
        config.use_qk_norm = use
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).eval()
        assert hasattr(model.model.layers[0].self_attn, "q_norm") == use
        own = logits_of_steps(monkeypatch, model, fuse=False)
        assert_same_logits(logits_of_steps(monkeypatch, model), own, torch.float32, near=True)
        assert set(fusing) == {forwards_of("glm4_moe")}


def test_what_training_drops(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("seed_oss").train()
    for module in model.modules():
        if hasattr(module, "residual_dropout"):
            module.residual_dropout = 0.5
    logits = []
    for fuse in (False, True):
        torch.manual_seed(1)
        logits.append(logits_of_steps(monkeypatch, model, some_prompts(2), fuse=fuse))
    assert_same_logits(*logits, torch.float32)


@pytest.mark.some_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe", "gemma4_shared"])
def test_layers_of_gemma4(family: str, dtype: torch.dtype, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are scaled, and layers that share their keys and values, whose attention runs its own code."""
    monkeypatch.setattr("hf_batchllm.patches.fusion.mixtures", lambda model: [])
    model = new_model(family).to(dtype)
    for number, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.6 + 0.1 * number)
    own = logits_of_steps(monkeypatch, model, fuse=False)
    assert_same_logits(logits_of_steps(monkeypatch, model), own, dtype)
    shares = "attention of 4 of 5 layers: it shares its keys and values with other layers"
    assert reasons(model) == (shares if family == "gemma4_shared" else "")


def test_what_watchers_of_gemma4_have_kept_is_never_written_to(fusing: list[int]) -> None:
    for family, names in (("gemma4", ("per_layer_input_gate",)), ("gemma4_moe", ("router", "experts"))):
        model, kept = new_model(family), []

        def keep(module: nn.Module, args: Any, output: Any, kept: list[Any] = kept) -> None:
            kept.extend((each, each.clone()) for each in args)

        for name in (*names, "mlp", "self_attn.o_proj"):
            a_layer(model).get_submodule(name).register_forward_hook(keep)
        run(model)
        assert kept and all(torch.equal(given, copy) for given, copy in kept)
