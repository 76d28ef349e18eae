"""Fused layers give what the model's own code gives, and leave alone what is not theirs to replace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from families import build, family_params
from fused import (
    FORWARDS,
    FUSED_FAMILIES,
    TWINS,
    Adapter,
    assert_same_logits,
    logits_of_steps,
    new_model,
    reasons,
    run,
    some_prompts,
)
from fused import fusing as fusing  # a fixture
from harness import assert_parity
from harness import watched as watched
from interpreted import INTERPRETED
from test_interrupts import Stop, interrupted_or_whole
from test_kernel_attention import twins as twins
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP
from untouched import fingerprint

from hf_batchllm import BatchGenerator
from hf_batchllm.patches.fused import Fusion

pytestmark = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")
NEW_TOKENS = 6
PROMPTS = some_prompts(14, "mixed")


@pytest.mark.parametrize("family", family_params(FUSED_FAMILIES))
class TestEveryFamily:
    def test_tokens_over_plain_attention(self, family: str, fusing: list[int], watched: list[Any]) -> None:
        result = run(build(family), PROMPTS, NEW_TOKENS, max_batch_tokens=40)
        assert_parity(family, PROMPTS, result, NEW_TOKENS)
        assert set(fusing) == {FORWARDS}
        assert "fused      3 of 3 layers" in str(result.report).splitlines()
        assert "<td>3 of 3 layers</td>" in result.report._repr_html_()

    def test_tokens_over_the_kernels(
        self, family: str, fusing: list[int], watched: list[Any], twins: dict[str, Any]
    ) -> None:
        result = run(build(family), PROMPTS, NEW_TOKENS)
        assert_parity(family, PROMPTS, result, NEW_TOKENS)
        assert set(fusing) == {FORWARDS} and twins["lists"]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_bits(self, family: str, dtype: torch.dtype, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        model = new_model(family).to(dtype)
        own = logits_of_steps(monkeypatch, model, fuse=False)
        assert not fusing
        assert_same_logits(logits_of_steps(monkeypatch, model), own, dtype)
        assert set(fusing) == {FORWARDS}


@pytest.mark.parametrize("family", family_params(["gemma2", "phi3", "gpt2", "mixtral"]))
def test_other_families_run_as_ever_and_that_is_said(family: str, fusing: list[int]) -> None:
    result = run(build(family), PROMPTS[:6], NEW_TOKENS)
    assert_parity(family, PROMPTS[:6], result, NEW_TOKENS)
    name = type(build(family)).__name__
    assert result.report.fused == f"nothing: {name} is not of the shape of Llama, Mistral, Qwen2 or Qwen3"


def test_on_a_cpu_nothing_is_fused_and_nothing_is_said_of_it() -> None:
    model = new_model()
    where = {name: each.data_ptr() for name, each in model.named_parameters()}
    assert "fused" not in str(run(model).report)
    assert where == {name: each.data_ptr() for name, each in model.named_parameters()}


# -- what is not fused -----------------------------------------------------------------------------------------


class Steered(modeling_llama.LlamaModel):
    pass


class OwnNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * 1.5


class OwnLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states, **kwargs) * 0.9


class Wrapper(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class HalfParameter(torch.Tensor):
    """As quantised and sharded weights come."""


def _layer(model: Any) -> Any:
    return model.model.layers[1]


def _wrap(model: Any, name: str) -> None:
    *path, last = name.split(".")
    owner = _layer(model).get_submodule(".".join(path))
    setattr(owner, last, Adapter(getattr(owner, last)))


def _own_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def _as_class(module: nn.Module, cls: type) -> None:
    module.__class__ = cls


def _hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: output * 0.5)


def _tie(model: Any) -> None:
    model.model.layers[2].mlp.gate_proj.weight = _layer(model).mlp.gate_proj.weight


def _share_memory(model: Any) -> None:
    model.model.layers[2].mlp.gate_proj.weight.data = _layer(model).mlp.gate_proj.weight.data


def _from_a_larger_tensor(model: Any) -> None:
    weight = _layer(model).self_attn.k_proj.weight
    weight.data = torch.cat([weight.data, weight.data])[: len(weight)]


def _no_v_bias(model: Any) -> None:
    attention = _layer(model).self_attn
    for linear in (attention.q_proj, attention.k_proj):
        linear.bias = nn.Parameter(torch.ones(linear.out_features))


def _in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        _layer(model).mlp.up_proj.weight = nn.Parameter(_layer(model).mlp.up_proj.weight.clone())


# What is done to layer 1 of three, how many forwards are put in place all the same, and what is said.
OBSTACLES: dict[str, tuple[Callable[[Any], Any], int, str]] = {
    "adapter in attention": (
        lambda model: _wrap(model, "self_attn.q_proj"),
        FORWARDS - 1,
        "attention of 1 of 3 layers: `q_proj` is a Adapter of fused, not a plain Linear",
    ),
    "adapter in the MLP": (lambda model: _wrap(model, "mlp.up_proj"), FORWARDS - 1, "MLP of 1 of 3 layers: `up_proj`"),
    "adapters elsewhere": (
        lambda model: (_wrap(model, "self_attn.o_proj"), _wrap(model, "mlp.down_proj")),
        FORWARDS,
        "",
    ),
    "hook on a layer": (
        lambda model: _hook(_layer(model)),
        FORWARDS - 1,
        "norms of 1 of 3 layers: the layer has hooks",
    ),
    "hook before a layer": (
        lambda model: _layer(model).register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
        FORWARDS - 1,
        "the layer has hooks",
    ),
    "hook on a projection": (lambda model: _hook(_layer(model).self_attn.v_proj), FORWARDS - 1, "`v_proj` has hooks"),
    "hook on the activation": (lambda model: _hook(_layer(model).mlp.act_fn), FORWARDS - 1, "`act_fn` has hooks"),
    "hook on a norm": (
        lambda model: _hook(_layer(model).post_attention_layernorm),
        FORWARDS - 1,
        "`post_attention_layernorm` has hooks",
    ),
    "hook on the last norm": (lambda model: _hook(model.model.norm), FORWARDS - 1, "the last norm: it has hooks"),
    "backward hook": (
        lambda model: _layer(model).mlp.gate_proj.register_full_backward_hook(lambda *given: None),
        FORWARDS - 1,
        "`gate_proj` has hooks",
    ),
    "hooks on what is called": (
        lambda model: (_hook(_layer(model).mlp), _hook(_layer(model).self_attn.o_proj)),
        FORWARDS,
        "",
    ),
    "accelerate's hook": (
        lambda model: add_hook_to_module(_layer(model).mlp.gate_proj, ModelHook()),
        FORWARDS - 1,
        "`gate_proj` has a hook of accelerate's",
    ),
    "own forward of a projection": (
        lambda model: _own_forward(_layer(model).self_attn.k_proj),
        FORWARDS - 1,
        "`k_proj` has a forward of its own",
    ),
    "own forward of attention": (
        lambda model: _own_forward(_layer(model).self_attn),
        FORWARDS - 1,
        "`self_attn` has a forward of its own",
    ),
    "own forward of a layer": (
        lambda model: _own_forward(_layer(model)),
        FORWARDS - 1,
        "the layer has a forward of its own",
    ),
    "own class of norm": (
        lambda model: _as_class(_layer(model).input_layernorm, OwnNorm),
        FORWARDS - 1,
        "`input_layernorm` is a OwnNorm of test_fused, not a plain LlamaRMSNorm",
    ),
    "own class of layer": (lambda model: _as_class(_layer(model), OwnLayer), FORWARDS - 1, "the layer is a OwnLayer"),
    "own class of model": (
        lambda model: _as_class(model.model, Steered),
        FORWARDS - 1,
        "the residual between layers: the model is a Steered of test_fused",
    ),
    "compiled": (
        lambda model: _layer(model).mlp.compile(backend="eager"),
        FORWARDS - 1,
        "`mlp` is compiled",
    ),
    "parametrized": (
        lambda model: parametrizations.weight_norm(_layer(model).mlp.gate_proj),
        FORWARDS - 1,
        "`gate_proj` is a ParametrizedLinear of torch, not a plain Linear",
    ),
    "pruned": (
        lambda model: prune.l1_unstructured(_layer(model).mlp.gate_proj, "weight", 0.2),
        FORWARDS - 1,
        "`gate_proj` has hooks",
    ),
    "activation": (
        lambda model: setattr(_layer(model).mlp, "act_fn", nn.GELU()),
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
            _layer(model).mlp.up_proj.weight, "data", _layer(model).mlp.up_proj.weight.data.t().contiguous().t()
        ),
        FORWARDS - 1,
        "are views of a larger tensor",
    ),
    "special tensors": (
        lambda model: setattr(
            _layer(model).mlp.up_proj,
            "weight",
            nn.Parameter(_layer(model).mlp.up_proj.weight.data.as_subclass(HalfParameter)),
        ),
        FORWARDS - 1,
        "are sharded or quantised",
    ),
    "wrapped layer": (
        lambda model: model.model.layers.__setitem__(1, Wrapper(_layer(model))),
        FORWARDS - 3,
        "norms of 1 of 3 layers: the layer is a Wrapper of test_fused",
    ),
}


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


def test_norms_of_queries_and_keys_that_differ() -> None:
    model = new_model("qwen3")
    _layer(model).self_attn.q_norm.variance_epsilon *= 2
    assert "the norms of q and k differ" in reasons(model)


def test_watchers_see_what_they_always_saw(fusing: list[int]) -> None:
    """Of modules that are called: the same tensors in, the same out, the same keywords."""
    seen: dict[bool, list[Any]] = {}
    for fuse in (False, True):
        model, notes = new_model(), []

        def note(module: Any, args: Any, kwargs: Any, output: Any, notes: list[Any] = notes) -> None:
            output = output[0] if isinstance(output, tuple) else output
            notes.append((type(module).__name__, len(args), sorted(kwargs), output.clone()))

        for module in (_layer(model).self_attn, _layer(model).mlp, _layer(model).self_attn.o_proj, _layer(model)):
            module.register_forward_hook(note, with_kwargs=True)
        run(model, fuse=fuse)
        seen[fuse] = notes
    assert [note[:3] for note in seen[True]] == [note[:3] for note in seen[False]]
    assert_same_logits([note[3] for note in seen[True]], [note[3] for note in seen[False]], torch.float32)


def test_what_embeddings_and_projections_gave_is_never_written_to(fusing: list[int]) -> None:
    model, kept = new_model(), []
    for module in (model.model.embed_tokens, _layer(model).self_attn.o_proj, _layer(model).mlp.down_proj):
        module.register_forward_hook(lambda module, args, output: kept.append((output, output.clone())))
    run(model)
    assert kept and all(torch.equal(output, copy) for output, copy in kept)


def test_hooks_by_which_transformers_collects_hidden_states_are_none(fusing: list[int]) -> None:
    model = new_model()
    states = model(torch.tensor([[1, 2, 3]]), output_hidden_states=True, output_attentions=True).hidden_states
    assert len(states) == 4 and any(layer._forward_hooks for layer in model.model.layers)
    states = [state.detach() for state in states]
    run(model)
    assert set(fusing) == {FORWARDS}
    again = model(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    assert all(torch.equal(state, other) for state, other in zip(states, again, strict=True))
    model.config.output_hidden_states = True
    assert "norms of 3 of 3 layers: the model's config asks for hidden states or attentions" in reasons(model)


def test_under_autocast_nothing_is_fused(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = logits_of_steps(monkeypatch, model, fuse=False)
        fused = logits_of_steps(monkeypatch, model)
        assert run(model).report.fused == "nothing: autocast is on"
    assert not fusing and all(torch.equal(one, other) for one, other in zip(own, fused, strict=True))


def test_hooks_on_all_modules_see_all_of_them(fusing: list[int]) -> None:
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *rest: calls.append(type(module).__name__))
    try:
        assert run(new_model()).report.fused == "nothing: there are hooks on all modules"
    finally:
        handle.remove()
    assert not fusing and "LlamaRMSNorm" in calls


def test_adapters_may_give_another_type(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm then goes the long way."""
    model = new_model()
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: output.double())
        layer.self_attn.register_forward_pre_hook(_states_in_float32, with_kwargs=True)
        layer.mlp.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    own = logits_of_steps(monkeypatch, model, fuse=False)
    assert_same_logits(logits_of_steps(monkeypatch, model), own, torch.float32)
    assert set(fusing) == {FORWARDS}


def _states_in_float32(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].float()}


@pytest.mark.parametrize("reentrant", [True, False])
def test_training_with_checkpoints_goes_on(reentrant: bool, fusing: list[int]) -> None:
    model = new_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    expected = run(new_model()).token_ids
    ids = torch.tensor([[1, 2, 3, 4]])
    with BatchGenerator(model, page_size=16) as generator:
        for _ in range(2):
            assert generator.generate(some_prompts(), max_new_tokens=4, progress=False).token_ids == expected
            loss = model(ids, labels=ids).loss
            loss.backward()
    plain = new_model().train()
    plain(ids, labels=ids).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, 2 * theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


# -- lifecycle -------------------------------------------------------------------------------------------------


def test_an_exception_in_a_step_leaves_nothing_behind(fusing: list[int]) -> None:
    model = new_model()
    with BatchGenerator(model, page_size=16) as generator:
        generator.generate(some_prompts(), max_new_tokens=4, progress=False)
        before = fingerprint(model)
        handle = _layer(model).mlp.down_proj.register_forward_hook(lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generator.generate(some_prompts(), max_new_tokens=4, progress=False)
        handle.remove()
        assert fingerprint(model) == before
        assert_parity("llama", some_prompts(), generator.generate(some_prompts(), max_new_tokens=4), 4)


def test_interrupts_at_any_line(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_interrupts.GIVEN", some_prompts())
    model = new_model()
    files = ("contextlib.py", "runner.py", "fused.py", "fused_layers.py", "merged_weights.py", "llama_shape.py")
    with BatchGenerator(model, page_size=8, max_batch_tokens=40) as generator:
        expected = generator.generate(some_prompts(), max_new_tokens=8, progress=False).token_ids
        before = fingerprint(model)
        every = Stop(0, files)
        every.during(lambda: interrupted_or_whole(generator))
        for at in random.Random(5).sample(range(1, every.count), 25):
            stop = Stop(at, files)
            stop.during(lambda: interrupted_or_whole(generator))
            assert stop.place
            assert fingerprint(model) == before, stop.place
        assert generator.generate(some_prompts(), max_new_tokens=8, progress=False).token_ids == expected


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda model: _layer(model).register_forward_hook(lambda module, args, output: output + 0.0),
    "adapter": lambda model: _wrap(model, "self_attn.q_proj"),
    "weights moved": lambda model: [setattr(each, "data", each.data.clone()) for each in model.parameters()],
    "new parameters": lambda model: model.load_state_dict(
        {name: each * 1.01 for name, each in model.state_dict().items()}, assign=True
    ),
    "own forward": lambda model: _own_forward(_layer(model).mlp),
    "another MLP": lambda model: setattr(_layer(model), "mlp", new_model().model.layers[2].mlp),
    "layer left out": lambda model: _as_class(_layer(model), OwnLayer),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_while_a_stream_is_open(change: str, fusing: list[int]) -> None:
    """What comes after is computed as it would be without fusing."""
    tokens = {}
    for fuse in (False, True):
        model, prompts = new_model(), some_prompts(6, "distinct")
        with BatchGenerator(model, page_size=16, max_batch_tokens=64, fuse=fuse) as generator:
            stream = generator.stream(prompts, max_new_tokens=12, stop_strings=None)
            first = next(stream)
            CHANGES[change](model)
            tokens[fuse] = {each.index: each.token_ids for each in [first, *stream]}
    assert tokens[True] == tokens[False]


def test_something_between_two_layers_is_no_silent_error() -> None:
    model = new_model()
    fused = Fusion(model).merge(TWINS)
    with fused.applied(), pytest.raises(RuntimeError, match=r"came between two layers.*fuse=False"):
        model.model.layers[1](torch.zeros(1, 3, 48))
    assert all("forward" not in vars(module) for module in model.modules())


def test_used_outside_a_step_it_refuses_as_ever(fusing: list[int]) -> None:
    model = new_model()
    with Fusion(model).merge(TWINS).applied():
        model.config._attn_implementation = "hf_batchllm"
        with pytest.raises(RuntimeError, match=r"only runs inside BatchGenerator\.generate"):
            model(torch.tensor([[1, 2]]))
