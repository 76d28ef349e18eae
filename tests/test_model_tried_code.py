"""Custom code is tried once, and again once it computes something else; what it reads may change between calls."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from support_families import FAMILIES, build, family_params
from support_users import PROMPTS, Around, around_mlp, assert_refused, before_mlp, tokens, tokens_alone
from torch import nn
from torch.ao.quantization import MinMaxObserver
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.llama import modeling_llama

from hf_batchllm import BatchGenerator, UnsupportedModelError

BESIDE = "stand beside it"
SCALED = "scaled_dot_product_attention"


def by_the_largest(linear: Callable[..., torch.Tensor], hidden: torch.Tensor, *args: Any) -> torch.Tensor:
    step = hidden.abs().max() / 7
    return linear((hidden / step).round() * step, *args)


def test_a_function_of_torchs_that_was_replaced_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model, linear = FAMILIES["llama"](), nn.functional.linear
    generator = BatchGenerator(model)
    monkeypatch.setattr(nn.functional, "linear", lambda *args: by_the_largest(linear, *args))
    assert_refused(model, generator, f"torch.nn.functional.linear.*{BESIDE}")
    monkeypatch.setattr(nn.functional, "linear", lambda *args: linear(*args) * 0.9)
    assert tokens(generator) == tokens_alone(model)


def test_a_replaced_attention_of_torchs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    before, attend = tokens(generator), getattr(nn.functional, SCALED)
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, SCALED, lambda *args, **more: attend(*args, **more) / 2)
        assert_refused(model, generator, f"{SCALED}` has been replaced")
        model.set_attn_implementation("eager")
        assert tokens(generator) == before
    assert tokens(generator) == before


@pytest.mark.some_cases
@pytest.mark.parametrize("name", family_params())
def test_no_family_has_custom_code(name: str) -> None:
    assert not BatchGenerator(build(name)).architecture.own_code.found


Function = Callable[[torch.Tensor], torch.Tensor]
ROTATE, NORM = modeling_llama.apply_rotary_pos_emb, modeling_gemma2.Gemma2RMSNorm._norm
# In transformers, by family: whose attribute is replaced, and what by, given what is to be done to a tensor of a layer.
IN_TRANSFORMERS: dict[str, tuple[str, Any, str, Callable[[Function], Any]]] = {
    "function of a module": (
        "llama", modeling_llama, "apply_rotary_pos_emb",
        lambda change: lambda q, k, *rest: ROTATE(change(q.transpose(1, 2)).transpose(1, 2), k, *rest),
    ),
    "wrapped function": (
        "llama", modeling_llama, "rotate_half",
        lambda change: functools.wraps(modeling_llama.rotate_half)(lambda x: change(x.transpose(1, 2)).transpose(1, 2)),
    ),
    "method": (
        "gemma2", modeling_gemma2.Gemma2RMSNorm, "_norm", lambda change: lambda self, hidden: change(NORM(self, hidden))
    ),
    "static method": (
        "gemma2", modeling_gemma2.Gemma2RMSNorm, "_norm",
        lambda change: staticmethod(lambda hidden: change(torch.nn.functional.normalize(hidden, dim=-1))),
    ),
    "property": (
        "llama", modeling_llama.LlamaMLP, "act_fn",
        lambda change: property(lambda self: change, lambda self, value: None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_TRANSFORMERS)
def test_what_is_put_into_transformers_is_tried_and_followed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, owner, name, instead = IN_TRANSFORMERS[what]
    model, factor = FAMILIES[family](), [1.0]
    generator = BatchGenerator(model)
    before = tokens(generator)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, instead(lambda hidden: hidden + hidden.roll(1, 1)), raising=False)
        assert_refused(model, generator, f"{owner.__name__.rpartition('.')[2]}.{name}.*{BESIDE}")
        patch.setattr(owner, name, instead(lambda hidden: hidden * factor[0]))
        assert_followed(model, lambda: factor.__setitem__(0, -3.0))
    assert tokens(generator) == tokens(BatchGenerator(model)) == before


def test_a_method_put_on_one_module_is_tried_and_followed() -> None:
    model, factor = FAMILIES["gemma2"](), [1.0]
    norm, generator = model.model.layers[1].input_layernorm, BatchGenerator(model)
    norm._norm = MethodType(lambda self, hidden: NORM(self, hidden + hidden.roll(1, 1)), norm)
    assert_refused(model, generator, f"layers.1.input_layernorm`.*{BESIDE}")
    norm._norm = MethodType(lambda self, hidden: NORM(self, hidden) * factor[0], norm)
    assert_followed(model, lambda: factor.__setitem__(0, -3.0))


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "causal_conv1d_update"])
def test_a_function_that_mixers_call_is_refused_where_it_is_replaced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrapped or not, and where ``generate`` alone calls it."""
    model, own = FAMILIES["lfm2"](), getattr(modeling_lfm2, name)
    generator = BatchGenerator(model)
    for around in (functools.wraps(own), lambda function: function):
        monkeypatch.setattr(modeling_lfm2, name, around(lambda *args, **more: own(*args, **more) * 2))
        assert_refused(model, generator, "should carry a state through 2 layers .* 0 were found")


def test_a_function_for_experts_that_was_registered_is_tried_and_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, factor = FAMILIES["mixtral"](), [1.0]

    def mixes(experts: Any, hidden: torch.Tensor, *chosen: torch.Tensor) -> torch.Tensor:
        return batched_mm_experts_forward(experts, hidden + hidden.roll(1, 0), *chosen)

    def scales(experts: Any, hidden: torch.Tensor, *chosen: torch.Tensor) -> torch.Tensor:
        return batched_mm_experts_forward(experts, hidden, *chosen) * factor[0]

    generator = BatchGenerator(model)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "mine", mixes)
    tokens(generator)
    model.set_experts_implementation("mine")
    assert_refused(model, generator, f"the experts function `mine`.*{BESIDE}")
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "mine", scales)
    assert_followed(model, lambda: factor.__setitem__(0, -3.0))


class Reads(Around):
    """Brings tokens together once something that it reads says so."""

    by_class = 0.0

    def __init__(self, inner: nn.Module, of_closure: list[float]) -> None:
        super().__init__(inner, lambda hidden: hidden * of_closure[0])
        self.amount = 0.0
        self.gate = nn.Parameter(torch.zeros(1))
        self.held = SimpleNamespace(listed=[torch.zeros(1)], number=0.0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.before is not None
        amount = self.amount + self.gate + self.by_class + self.held.listed[0] + self.held.number + self.by_method()
        amount = amount + self.before(torch.ones(1))
        return self.inner(hidden + amount * hidden.roll(1, 1))

    def by_method(self) -> float:
        return 0.0


CHANGES: dict[str, Callable[[Reads, list[float], pytest.MonkeyPatch], object]] = {
    "attribute": lambda module, closure, patch: setattr(module, "amount", 1.0),
    "number that it holds": lambda module, closure, patch: setattr(module.held, "number", 1.0),
    "class": lambda module, closure, patch: patch.setattr(Reads, "by_class", 1.0),
    "method": lambda module, closure, patch: patch.setattr(Reads, "by_method", lambda self: 1.0),
    "weight": lambda module, closure, patch: module.gate.data.fill_(1.0),
    "tensor in a list": lambda module, closure, patch: module.held.listed[0].data.fill_(1.0),
    "closure": lambda module, closure, patch: closure.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_code_is_tried_again_once_what_it_reads_has_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = FAMILIES["llama"]()
    closure = [0.0]
    around_mlp(lambda mlp: Reads(mlp, closure))(model)
    generator = BatchGenerator(model)
    assert tokens(generator) == tokens_alone(model)
    CHANGES[name](model.model.layers[1].mlp, closure, monkeypatch)
    with pytest.raises(UnsupportedModelError, match=BESIDE):
        tokens(generator)


# -- whatever was kept ----------------------------------------------------------------------------------------------


def assert_followed(model: Any, change: Callable[[], object]) -> None:
    """A change of what a model computes is seen by the next call, whatever was kept from the one before."""
    generator = BatchGenerator(model, keep_prefixes=64, page_size=4)
    before = kept_tokens(generator)
    assert kept_tokens(generator) == before
    change()
    assert before != kept_tokens(generator) == tokens_alone(model)


def kept_tokens(generator: BatchGenerator) -> list[list[int]]:
    """A call whose prompts share enough for a prefix to be kept."""
    more = [[*PROMPTS[0][:25], 60 + each] for each in range(3)]
    found = generator.generate([*PROMPTS, *more], max_new_tokens=6, do_sample=False)
    return [each.token_ids for each in found][: len(PROMPTS)]


def by_hook(layer: Any, factor: list[float]) -> None:
    layer.mlp.register_forward_hook(lambda module, args, output: output * factor[0])


def by_forward(layer: Any, factor: list[float]) -> None:
    forward = layer.mlp.forward
    layer.mlp.forward = lambda hidden: forward(hidden) * factor[0]


def by_activation(layer: Any, factor: list[float]) -> None:
    del layer.mlp.act_fn
    layer.mlp.act_fn = lambda hidden: nn.functional.silu(hidden) * factor[0]


def at_later_positions(layer: Any, factor: list[float]) -> None:
    inner = layer.self_attn.forward

    def later(**given: Any) -> Any:
        is_late = (given["position_ids"] > 16)[..., None]
        out, weights = inner(**given)
        return torch.where(is_late, out * factor[0], out), weights

    layer.self_attn.forward = later


@pytest.mark.parametrize("put", [by_hook, by_forward, by_activation, at_later_positions])
def test_the_next_call_knows_what_a_closure_reads(put: Callable[[Any, list[float]], None]) -> None:
    model: Any = FAMILIES["llama"]()
    factor = [1.0]
    put(model.model.layers[0], factor)
    assert_followed(model, lambda: factor.__setitem__(0, 0.2))


@pytest.mark.parametrize(("home", "name"), [(nn.functional, "silu"), (nn.functional, "linear"), (torch, "rsqrt")])
def test_the_next_call_knows_torchs_functions(home: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(home, name)
    assert_followed(
        FAMILIES["llama"](),
        lambda: monkeypatch.setattr(home, name, lambda *args, **more: function(*args, **more) * 0.7),
    )


# -- what a trial does -----------------------------------------------------------------------------------------------


class Dropped(Around):
    """Random in any mode, and it mixes."""

    random = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(hidden, 0.3, training=self.random)
        return self.inner(hidden + hidden.roll(1, 1))


def test_a_trial_that_random_numbers_spoil_does_not_count() -> None:
    model: Any = FAMILIES["llama"]()
    around_mlp(Dropped)(model)
    generator = BatchGenerator(model)
    tokens(generator)
    model.model.layers[1].mlp.random = False
    with pytest.raises(UnsupportedModelError, match=BESIDE):
        tokens(generator)


def fails_on_three(hidden: torch.Tensor) -> torch.Tensor:
    if hidden.shape[1] == 300:
        raise ValueError("not so many")
    return hidden


def test_code_that_cannot_be_tried_is_warned_of_once() -> None:
    model = FAMILIES["llama"]()
    before_mlp(fails_on_three)(model)
    with pytest.warns(UserWarning, match=r"layers.1.mlp.*could not be tried .* \(ValueError: not so many\)"):
        generator = BatchGenerator(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(generator) == tokens_alone(model)


def test_an_observer_notes_nothing_of_a_trial() -> None:
    model: Any = FAMILIES["llama"]()
    observer = MinMaxObserver()
    around_mlp(lambda mlp: nn.Sequential(observer, mlp))(model)
    generator = BatchGenerator(model)
    assert observer.min_val == torch.inf and observer.max_val == -torch.inf
    assert tokens(generator) == tokens_alone(model)


def test_transformers_code_alone_is_not_run() -> None:
    model: Any = FAMILIES["llama"]()
    passes: list[int] = []
    embed = model.model.embed_tokens
    embed.register_forward_hook(lambda *args: passes.append(1))
    BatchGenerator(model)
    assert not passes


class Records(Around):
    """Notes each pass in three ways."""

    def __init__(self, inner: nn.Module, seen: list[int]) -> None:
        super().__init__(inner, lambda hidden: seen.append(hidden.shape[1]) or hidden)  # type: ignore[func-returns-value]
        self.passes, self.amount = [0], torch.zeros(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.before is not None
        self.passes[0] += 1
        return self.inner(self.before(hidden) + self.amount * hidden.roll(1, 1))


def test_code_is_tried_once_and_again_if_the_user_changes_it() -> None:
    model: Any = FAMILIES["llama"]()
    seen, hooked = list[int](), list[int]()
    around_mlp(lambda mlp: Records(mlp, seen))(model)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: hooked.append(len(output[0])))
    generator = BatchGenerator(model)
    tokens(generator)
    for _ in range(2):
        seen.clear()
        hooked.clear()
        tokens(generator)
        steps = generator.last_report.steps  # type: ignore[union-attr]
        assert len(seen) == len(hooked) == steps + 1, "a row that tells whether it is the code that was tried"
    model.model.layers[1].mlp.amount = torch.ones(1)
    with pytest.raises(UnsupportedModelError, match=BESIDE):
        tokens(generator)
