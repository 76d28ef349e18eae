"""Fused layers give what the model's own code gives, and leave alone what is not theirs to replace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_attention_references import references as references
from support_cases import up_to
from support_families import CARRYING, build, family_params, reference_generate
from support_fused import (
    FAMILIES_OF_EXPERTS,
    FORWARDS,
    FUSED_FAMILIES,
    REFERENCES,
    WITH_EXPERTS,
    WITH_GATED_NORMS,
    Fusing,
    OwnLayer,
    a_layer,
    as_class,
    assert_same_logits,
    forwards_of,
    new_model,
    own_forward,
    reasons,
    run,
    said_of,
    some_prompts,
    without_addresses,
    wrap,
)
from support_fused import fusing as fusing  # a fixture
from support_image_text_families import FUSED_IMAGE_TEXT
from support_interrupts import Stop, interrupted_or_whole
from support_kernels import INTERPRETED
from support_parity import assert_parity
from support_parity import watched as watched
from support_untouched import fingerprint
from torch import nn

from hf_batchllm import BatchGenerator
from hf_batchllm.patches.fusable_experts import mixtures
from hf_batchllm.patches.fusion import Fusion
from hf_batchllm.patches.gated_norms import gated_norms

pytestmark = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")
NEW_TOKENS = 6
PROMPTS = some_prompts(14, "mixed")


def with_one(family: Any, *more: Any) -> Any:
    """A case of a family that this transformers may lack."""
    name, marks = (family, ()) if isinstance(family, str) else (*family.values, family.marks)
    return pytest.param(name, *more, marks=marks, id="-".join([name, *map(str, more)]))


@pytest.mark.parametrize("family", family_params(FUSED_FAMILIES))
class TestEveryFamily:
    @pytest.mark.some_cases
    def test_tokens_over_plain_attention(self, family: str, fusing: Fusing, watched: list[Any]) -> None:
        result = run(build(family), PROMPTS, NEW_TOKENS, max_batch_tokens=40)
        assert_parity(family, PROMPTS, result, NEW_TOKENS)
        assert set(fusing) == {forwards_of(family)}
        assert f"fused      {said_of(family)}" in str(result.report).splitlines()
        assert f"<td>{said_of(family)}</td>" in result.report._repr_html_()

    @pytest.mark.some_cases
    def test_tokens_over_the_kernels(
        self, family: str, fusing: Fusing, watched: list[Any], references: dict[str, Any]
    ) -> None:
        result = run(build(family), PROMPTS, NEW_TOKENS)
        assert_parity(family, PROMPTS, result, NEW_TOKENS)
        assert set(fusing) == {forwards_of(family)} and references["lists"]


# Parts of a model by which it is known here that they are fused. All else of these families is as ever.
PARTS = {
    "experts": [family for family in FAMILIES_OF_EXPERTS if family not in WITH_EXPERTS],
    "norms of mixers": [family for family in WITH_GATED_NORMS if family not in ("qwen3_5", "qwen3_5_moe")],
    "layers beside a tower": FUSED_IMAGE_TEXT,
}


def in_each(part: str) -> list[Any]:
    return PARTS[part] if PARTS[part] is FUSED_IMAGE_TEXT else family_params(PARTS[part])


@pytest.mark.some_cases("part")
@pytest.mark.parametrize(("family", "part"), [with_one(each, part) for part in PARTS for each in in_each(part)])
def test_tokens_where_a_part_is_fused(family: str, part: str, fusing: Fusing, watched: list[Any]) -> None:
    """Models that read images are given text alone. Nothing is left in a model."""
    model: Any = new_model(family) if part == "layers beside a tower" else build(family)
    before, prompts = without_addresses(model), PROMPTS[:12]
    result = run(model, prompts, 5, max_batch_tokens=40)
    assert without_addresses(model) == before
    fused, count = str(result.report.fused), len(list(mixtures(model)))
    if part == "layers beside a tower":
        of_each = 4 if count else 3  # two layers; and the last norm
        assert set(fusing) == {2 * of_each + 1}
        assert fused.startswith("2 of 2 layers") and "left as" not in fused
        assert result.token_ids == [reference_generate(model, prompt, max_new_tokens=5) for prompt in prompts]
    else:
        assert_parity(family, prompts, result, 5)
        assert min(fusing) >= (count if part == "experts" else len(list(gated_norms(model))))
        assert part != "experts" or fused.startswith(f"the experts of {count} of {count} layers")


FLOATS = (torch.float32, torch.bfloat16)
# What is fused, in which families and types.
BITS: list[tuple[str, list[Any], tuple[torch.dtype, ...]]] = [
    ("everything", family_params(FUSED_FAMILIES), FLOATS),
    ("everything", family_params(["llama", "gemma3", "cohere2"]), (torch.float16,)),
    ("all but experts", [*family_params(WITH_EXPERTS), *FUSED_IMAGE_TEXT], FLOATS),
    ("norms of mixers", in_each("norms of mixers"), FLOATS),
]
# Experts add up in another order; and layers are beside the point.
LEFT_OUT = {"everything": [], "all but experts": ["mixtures"], "norms of mixers": ["mixtures", "stacks"]}


@pytest.mark.some_cases("what")
@pytest.mark.parametrize(
    ("family", "what", "dtype"),
    [with_one(each, what, dtype) for what, families, dtypes in BITS for each in families for dtype in dtypes],
)
def test_bits(family: str, what: str, dtype: torch.dtype, fusing: Fusing, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LEFT_OUT[what]:
        monkeypatch.setattr(f"hf_batchllm.patches.fusion.{name}", lambda model: [])
    model = new_model(family).to(dtype)
    prompts = None if dtype == torch.float16 else some_prompts(4)
    if what == "norms of mixers":
        fusing.assert_nothing_changes(model, prompts, exact=True)
        assert set(fusing) == {len(list(gated_norms(model)))}
        return
    near = family in CARRYING or (family in WITH_EXPERTS and what == "everything")
    fusing.assert_nothing_changes(model, prompts, dtype, near)
    assert set(fusing) == {forwards_of(family)} if what == "everything" else fusing


@pytest.mark.parametrize("family", family_params(["starcoder2", "gpt2"]))
def test_other_families_run_as_ever_and_that_is_said(family: str, fusing: Fusing) -> None:
    result = run(build(family), PROMPTS[:6], NEW_TOKENS)
    assert_parity(family, PROMPTS[:6], result, NEW_TOKENS)
    name = type(build(family)).__name__
    assert result.report.fused == f"nothing: there are no fused layers for {name}"


def test_on_a_cpu_nothing_is_fused_and_nothing_is_said_of_it() -> None:
    model = new_model()
    where = {name: each.data_ptr() for name, each in model.named_parameters()}
    assert "fused" not in str(run(model).report)
    assert where == {name: each.data_ptr() for name, each in model.named_parameters()}


WATCHED = ["llama", "olmo2", "cohere2", "gpt_oss", "gemma4", "gemma4_moe", "glm4_moe", "deepseek_v3", "exaone4"]


@pytest.mark.some_cases
@pytest.mark.parametrize("family", WATCHED)
def test_watchers_see_what_they_always_saw(family: str, fusing: Fusing) -> None:
    """Of modules that are called: the same tensors in, the same out, the same keywords."""
    seen: dict[bool, list[Any]] = {}
    for fuse in (False, True):
        model, notes = new_model(family), []

        def note(module: Any, args: Any, kwargs: Any, output: Any, notes: list[Any] = notes) -> None:
            output = output[0] if isinstance(output, tuple) else output
            notes.append((type(module).__name__, len(args), sorted(kwargs), output.clone()))

        layer = a_layer(model)
        for module in (layer.self_attn, layer.mlp, layer.self_attn.o_proj, layer):
            module.register_forward_hook(note, with_kwargs=True)
        run(model, fuse=fuse)
        seen[fuse] = notes
    assert [note[:3] for note in seen[True]] == [note[:3] for note in seen[False]]
    seen_twice = [note[3] for note in seen[True]], [note[3] for note in seen[False]]
    assert_same_logits(*seen_twice, torch.float32, family in WITH_EXPERTS)


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "cohere2"])
def test_what_others_may_have_kept_is_never_written_to(family: str, fusing: Fusing) -> None:
    """What modules that are called gave, and what they got."""
    model, kept = new_model(family), []

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for each in (*args, *kwargs.values(), output):
            if isinstance(each, torch.Tensor):
                kept.append((each, each.clone()))

    layer = a_layer(model)
    for module in (model.model.embed_tokens, layer.self_attn, layer.self_attn.o_proj, layer.mlp, layer.mlp.down_proj):
        module.register_forward_hook(keep, with_kwargs=True)
    run(model)
    assert kept and all(torch.equal(output, copy) for output, copy in kept)


def test_hooks_by_which_transformers_collects_hidden_states_are_none(fusing: Fusing) -> None:
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


def test_under_autocast_nothing_is_fused(fusing: Fusing) -> None:
    model = new_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fusing.assert_nothing_changes(model, exact=True)
        assert run(model).report.fused == "nothing: autocast is on"
    assert not fusing


def test_hooks_on_all_modules_see_all_of_them(fusing: Fusing) -> None:
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *rest: calls.append(type(module).__name__))
    try:
        assert run(new_model()).report.fused == "nothing: there are hooks on all modules"
    finally:
        handle.remove()
    assert not fusing and "LlamaRMSNorm" in calls


@pytest.mark.some_cases
@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "granite"])
def test_adapters_may_give_another_type(family: str, fusing: Fusing) -> None:
    """The norm then goes the long way."""
    model = new_model(family)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: output.double())
        layer.self_attn.register_forward_pre_hook(_states_in_float32, with_kwargs=True)
        layer.mlp.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    fusing.assert_nothing_changes(model)
    assert set(fusing) == {FORWARDS}


def _states_in_float32(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"hidden_states": kwargs["hidden_states"].float()}


@pytest.mark.parametrize("reentrant", [True, False])
def test_training_with_checkpoints_goes_on(reentrant: bool, fusing: Fusing) -> None:
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


def test_interrupts_at_any_line(fusing: Fusing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support_interrupts.GIVEN", some_prompts())
    model = new_model()
    files = ("contextlib.py", "runner.py", "fusion.py", "fused_forwards.py", "merged_weights.py", "fusable_parts.py")
    with BatchGenerator(model, page_size=8, max_batch_tokens=40) as generator:
        expected = generator.generate(some_prompts(), max_new_tokens=8, progress=False).token_ids
        before = fingerprint(model)
        every = Stop(0, files)
        every.during(lambda: interrupted_or_whole(generator))
        for at in random.Random(5).sample(range(1, every.count), up_to(12)):
            stop = Stop(at, files)
            stop.during(lambda: interrupted_or_whole(generator))
            assert stop.place
            assert fingerprint(model) == before, stop.place
        assert generator.generate(some_prompts(), max_new_tokens=8, progress=False).token_ids == expected


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda model: a_layer(model).register_forward_hook(lambda module, args, output: output + 0.0),
    "adapter": lambda model: wrap(model, "self_attn.q_proj"),
    "weights moved": lambda model: [setattr(each, "data", each.data.clone()) for each in model.parameters()],
    "new parameters": lambda model: model.load_state_dict(
        {name: each * 1.01 for name, each in model.state_dict().items()}, assign=True
    ),
    "a bias": lambda model: setattr(a_layer(model).mlp.gate_proj, "bias", nn.Parameter(torch.full([64], 3.0))),
    "own forward": lambda model: own_forward(a_layer(model).mlp),
    "another MLP": lambda model: setattr(a_layer(model), "mlp", new_model().model.layers[2].mlp),
    "layer left out": lambda model: as_class(a_layer(model), OwnLayer),
}


@pytest.mark.some_cases
@pytest.mark.parametrize("change", CHANGES)
def test_changes_while_a_stream_is_open(change: str, fusing: Fusing) -> None:
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
    fused = Fusion(model).merge(REFERENCES)
    with fused.applied(), pytest.raises(RuntimeError, match=r"came between two layers.*fuse=False"):
        model.model.layers[1](torch.zeros(1, 3, 48))
    assert all("forward" not in vars(module) for module in model.modules())


def test_used_outside_a_step_it_refuses_as_ever(fusing: Fusing) -> None:
    model = new_model()
    with Fusion(model).merge(REFERENCES).applied():
        model.config._attn_implementation = "hf_batchllm"
        with pytest.raises(RuntimeError, match=r"only runs inside BatchGenerator\.generate"):
            model(torch.tensor([[1, 2]]))
