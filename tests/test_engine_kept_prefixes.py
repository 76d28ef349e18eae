"""Kept prefixes are used by the model that computed them, and by no other, whatever its user does."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from support_calls import answers
from support_families import FAMILIES
from support_kernels import plain
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from hf_batchllm import BatchGenerator
from hf_batchllm.model.inspection.weights_digest import Digest

pytestmark = plain
DOCUMENT = [5 + 7 * place % 80 for place in range(24)]
OTHER = [6 + 11 * place % 80 for place in range(24)]
GIVEN = [[*DOCUMENT, 3], [*DOCUMENT, 4, 5]]
CONFIG: dict[str, Any] = {"page_size": 8, "min_shared_tokens": 4, "max_batch_tokens": 30}
Change = Callable[[Any], object]


def attention(model: Any, layer: int = 1) -> Any:
    return model.model.layers[layer].self_attn


class OnlyValues(nn.Module):
    """Stands in for a projection, over its parameters."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(states, self.weight).flip(-1)


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def columns_exchanged(model: Any) -> None:
    weight = attention(model).v_proj.weight
    weight.data[:] = weight.data[:, [1, 0, *range(2, weight.shape[1])]]


def heads_exchanged(model: Any) -> None:
    weight = attention(model).k_proj.weight
    weight.data[:] = weight.data.roll(len(weight) // 2, 0)


def signs_changed(model: Any) -> None:
    attention(model).k_proj.weight.data[:, [1, 3]] *= -1


def forward_replaced(model: Any) -> None:
    proj = attention(model).k_proj
    proj.forward = lambda states: 2 * nn.Linear.forward(proj, states)


def class_exchanged(model: Any) -> None:
    attention(model).k_proj.__class__ = type("Flipped", (nn.Linear,), {"forward": OnlyValues.forward})


def layers_exchanged(model: Any) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index


CHANGES: dict[str, Change] = {
    "weights": lambda model: model.load_state_dict({key: 0.9 * each for key, each in model.state_dict().items()}),
    "data": lambda model: attention(model).k_proj.weight.data.mul_(1.1),
    "heads": heads_exchanged,
    "columns": columns_exchanged,
    "signs": signs_changed,
    "buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "module": lambda model: setattr(attention(model), "k_proj", OnlyValues(attention(model).k_proj)),
    "class": class_exchanged,
    "layers": layers_exchanged,
    "parametrized": lambda model: parametrize.register_parametrization(attention(model).k_proj, "weight", Twice()),
    "forward": forward_replaced,
    "hook": lambda model: model.model.layers[0].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:])),
    "number": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    "activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()),
    "config": lambda model: setattr(model.config, "hidden_act", "gelu"),
    "nested": lambda model: model.config.rope_parameters.update(rope_theta=7.0),
    "train": lambda model: model.train(),
    "dtype": lambda model: model.double(),
}


# What may compute something else in the next call, without a trace.
CUSTOM = ("module", "class", "forward", "hook", "parametrized")


def keeping(model: Any) -> BatchGenerator:
    return BatchGenerator(model, keep_prefixes=4, **CONFIG)


def fresh(model: Any, given: list[list[int]] = GIVEN) -> list[list[int]]:
    return answers(model, given, CONFIG, max_new_tokens=4).token_ids


def assert_anew(generator: BatchGenerator, given: list[list[int]] = GIVEN) -> None:
    """What was kept is not used."""
    result = generator.generate(given, max_new_tokens=4)
    assert result.report.cached_tokens == 0
    assert result.token_ids == fresh(generator.model, given)


@pytest.mark.some_cases
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_calls(change: str) -> None:
    generator = keeping(model := FAMILIES["llama"]())
    for cached in (0, 24):
        assert generator.generate(GIVEN, max_new_tokens=4).report.cached_tokens == cached
    CHANGES[change](model)
    assert_anew(generator)
    assert generator.generate(GIVEN, max_new_tokens=4).report.cached_tokens == (0 if change in CUSTOM else 24)


class Louder(ModelHook):
    def __init__(self, factor: list[float]) -> None:
        self.factor = factor

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output * self.factor[0]


@pytest.mark.parametrize("of", ["torch", "accelerate"])
def test_nothing_is_kept_of_hooks_and_that_is_said_once(of: str) -> None:
    generator = keeping(model := FAMILIES["llama"]())
    factor, mlp = [1.0], model.model.layers[0].mlp
    if of == "torch":
        take_out = mlp.register_forward_hook(lambda module, args, output: output * factor[0]).remove
    else:
        add_hook_to_module(mlp, Louder(factor))
        take_out = partial(remove_hook_from_module, mlp)
    with pytest.warns(UserWarning, match="no prefixes are kept .* runs code or hooks of your own"):
        assert_anew(generator)
    factor[0] = 0.2
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no prefixes")
        assert_anew(generator)
    take_out()
    assert [generator.generate(GIVEN, max_new_tokens=4).report.cached_tokens for _ in range(2)] == [0, 24]


def test_layers_of_quantisation_libraries_keep_prefixes() -> None:
    model = FAMILIES["llama"]()
    class_exchanged(model)
    type(attention(model).k_proj).__module__ = "hqq.core.quantize"
    generator = keeping(model)
    assert [generator.generate(GIVEN, max_new_tokens=4).report.cached_tokens for _ in range(2)] == [0, 24]
    heads_exchanged(model)
    assert_anew(generator)


@pytest.mark.some_cases
@pytest.mark.parametrize("change", ["weights", "heads", "columns", "module", "number", "hook", "train"])
def test_a_change_between_two_results(change: str) -> None:
    """The second document is computed with the changed model."""
    generator = keeping(model := FAMILIES["llama"]())
    other = [[*OTHER, 3], [*OTHER, 4]]
    stream = generator.stream([*GIVEN, *other], max_new_tokens=1)
    next(stream)
    CHANGES[change](model)
    list(stream)
    for given in (GIVEN, other):
        assert_anew(generator, given)


def test_a_stream_in_which_nothing_changes_keeps_its_prefixes() -> None:
    generator = keeping(FAMILIES["llama"]())
    list(generator.stream([*GIVEN, [*OTHER, 3], [*OTHER, 4]], max_new_tokens=2))
    assert generator.generate([GIVEN[0], [*OTHER, 9]], max_new_tokens=2).report.cached_tokens == 48


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_autocast_between_two_results(kind: torch.dtype) -> None:
    generator = keeping(model := FAMILIES["llama"]())
    stream = generator.stream([*GIVEN, [*OTHER, 3], [*OTHER, 4]], max_new_tokens=1)
    next(stream)
    with torch.autocast("cpu", dtype=kind):  # the call keeps the one that it began under
        list(stream)
    for context in (nullcontext(), torch.autocast("cpu", dtype=kind)):
        with context:
            first, second = (generator.generate(GIVEN, max_new_tokens=4) for _ in range(2))
            assert first.token_ids == second.token_ids == fresh(model)
            assert second.report.cached_tokens == 24


class LouderSilu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        return 1.5 * out if function is nn.functional.silu else out


def test_a_mode_that_changes_what_functions_give() -> None:
    generator = keeping(model := FAMILIES["llama"]())
    plain = generator.generate(GIVEN, max_new_tokens=4).token_ids
    with LouderSilu():
        louder = fresh(model)
        assert generator.generate(GIVEN, max_new_tokens=4).token_ids == louder != plain
    assert generator.generate(GIVEN, max_new_tokens=4).token_ids == plain


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        generator = keeping(model := FAMILIES["llama"]())
        assert [generator.generate(GIVEN, max_new_tokens=2).report.cached_tokens for _ in range(2)] == [0, 24]
        columns_exchanged(model)
        assert_anew(generator)


def test_a_prefix_of_training_mode_is_not_used_in_evaluation() -> None:
    model = FAMILIES["llama"]()
    attention(model).attention_dropout = 0.0
    model.model.layers[0].input_layernorm = nn.Sequential(model.model.layers[0].input_layernorm, nn.Dropout(0.5))
    generator = keeping(model.train())
    with pytest.warns(UserWarning, match="training mode"):
        generator.generate(GIVEN, max_new_tokens=4)
    model.eval()
    assert_anew(generator)


def test_what_changes_nothing_drops_nothing() -> None:
    generator = keeping(model := FAMILIES["llama"]())
    generator.generate(GIVEN, max_new_tokens=2)
    model.requires_grad_(False)
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.temperature = 0.7
    model.set_attn_implementation("eager")
    ids = torch.tensor([GIVEN[0]])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, pad_token_id=0)
    with torch.inference_mode():
        assert generator.generate(GIVEN, max_new_tokens=2).report.cached_tokens == 24


def test_a_module_taken_out_of_the_model_is_freed() -> None:
    generator = keeping(model := FAMILIES["llama"]())
    generator.generate(GIVEN, max_new_tokens=2)
    before = weakref.ref(attention(model).k_proj.weight)
    attention(model).k_proj = nn.Linear(48, len(attention(model).k_proj.weight), bias=False)
    gc.collect()
    assert before() is None


def test_where_the_weights_cannot_be_looked_at_for_want_of_memory_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator, looks = BatchGenerator(FAMILIES["llama"](), keep_prefixes=2, **CONFIG), iter(range(1, 9))
    expected = generator.generate(GIVEN, max_new_tokens=4).token_ids
    generator.forget_prefixes()

    def fails(tensors: Any) -> Digest:
        if next(looks) == 1:
            raise torch.OutOfMemoryError
        return Digest(tensors)

    monkeypatch.setattr("hf_batchllm.engine.computed_with.Digest", fails)
    with pytest.warns(UserWarning, match="no prefixes are kept for the next call"):
        assert generator.generate(GIVEN, max_new_tokens=4).token_ids == expected
    for cached in (0, len(DOCUMENT)):
        result = generator.generate(GIVEN, max_new_tokens=4)
        assert result.token_ids == expected and result.report.cached_tokens == cached
