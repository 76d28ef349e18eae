"""Code of an owner's is tried in long rows and with a cache, wherever it stands, and again once anything changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_families import FAMILIES
from support_owners import tokens, tokens_alone
from torch import nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver, MovingAverageMinMaxObserver
from transformers import LlamaForCausalLM, MambaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from hf_batchllm import BatchGenerator, UnsupportedModelError
from hf_batchllm.patches.attention_interface import CACHE_NAME

WIDTH = 48  # of the tiny Llama
STATE = "carry a state from token to token in a way that is not supported: OtherMixer"
BESIDE, LENGTH, CACHE = "stand beside it", "how many other tokens there are", "whether there is a cache"


class Around(nn.Module):
    def __init__(self, inner: nn.Module, function: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.before = function


class Before(Around):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden if self.before is None else self.before(hidden))


class Interpolated(Around):
    """Beyond some length, positions lie closer together."""

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.inner(hidden, position_ids / max(1.0, (int(position_ids.max()) + 1) / 24))


class InDecodeSteps(LlamaDecoderLayer):
    def forward(self, hidden_states: Any, **more: Any) -> Any:
        cache = more.get(CACHE_NAME)
        if cache is not None and cache.get_seq_length(self.self_attn.layer_idx):
            hidden_states = hidden_states * 2
        return super().forward(hidden_states, **more)


class InTraining(LlamaForCausalLM):
    def forward(self, *args: Any, use_cache: Any = None, **more: Any) -> Any:
        output: Any = super().forward(*args, use_cache=use_cache, **more)
        output.logits = output.logits if use_cache else output.logits.roll(5, -1)
        return output


class ScaledByLength(LlamaAttention):
    def forward(self, hidden_states: Any, position_embeddings: Any, **more: Any) -> Any:
        cache = more.get(CACHE_NAME)
        seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        self.scaling = self.head_dim**-0.5 * (2 if seen > 24 else 1)
        return super().forward(hidden_states, position_embeddings, **more)


def shifted(hidden: torch.Tensor, places: int = 1) -> torch.Tensor:
    return hidden + nn.functional.pad(hidden, (0, 0, places, 0))[:, : hidden.shape[1]]


def chunks(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + (torch.arange(hidden.shape[1]) // 16)[None, :, None]


def best_half(hidden: torch.Tensor) -> torch.Tensor:
    if hidden.shape[1] < 16:
        return hidden
    norms = hidden.norm(dim=-1)
    return hidden * (norms >= norms.median())[..., None]


def sparse(hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(hidden) * (hidden.abs() > hidden.abs().median())


def before_mlp(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.layers[1].mlp = Before(model.model.layers[1].mlp, function)

    return change


def after_mlp(module: Callable[[], nn.Module]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        torch.manual_seed(0)
        model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, module().eval())

    return change


def into(pick: Callable[[Any], nn.Module], kind: type) -> Callable[[Any], None]:
    return lambda model: setattr(pick(model), "__class__", kind)


def rotary(model: Any) -> None:
    model.model.rotary_emb = Interpolated(model.model.rotary_emb)


def activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        del model.model.layers[1].mlp.act_fn
        model.model.layers[1].mlp.act_fn = function

    return change


def more_words_than_rows(model: Any) -> None:
    before_mlp(shifted)(model)
    model.config.vocab_size = 100_000


class OtherMixer(MambaMixer):
    """By its class none of those that are proved."""


def mamba() -> nn.Module:
    return OtherMixer(MambaConfig(hidden_size=WIDTH, state_size=4, num_hidden_layers=1), 0)


def observing() -> nn.Module:
    observer: Any = MovingAverageMinMaxObserver
    return FakeQuantize(observer=observer, quant_min=0, quant_max=15, averaging_constant=1.0)


REFUSED = {
    "shift by ten": (before_mlp(lambda hidden: shifted(hidden, 10)), BESIDE),
    "chunks of sixteen": (before_mlp(chunks), BESIDE),
    "the best half of a long row": (before_mlp(best_half), BESIDE),
    "interpolation by the longest": (rotary, LENGTH),
    "another layer in decode steps": (into(lambda model: model.model.layers[1], InDecodeSteps), CACHE),
    "another result without a cache": (into(lambda model: model, InTraining), CACHE),
    "scale by the length": (into(lambda model: model.model.layers[1].self_attn, ScaledByLength), CACHE),
    "attention of torch's": (after_mlp(lambda: nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)), BESIDE),
    "a recurrent layer of transformers'": (after_mlp(mamba), STATE),
    "softmax over the row": (after_mlp(lambda: nn.Softmax(dim=1)), BESIDE),
    "fake quantisation": (after_mlp(observing), BESIDE),
    "an activation function": (activation(sparse), BESIDE),
    "more words than rows": (more_words_than_rows, BESIDE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_short_rows_or_modules_alone_do_not_show_is_refused(name: str) -> None:
    change, why = REFUSED[name]
    model = FAMILIES["llama"]()
    change(model)
    with pytest.raises(UnsupportedModelError, match=why if why is STATE else f"not transformers' own.*{why}"):
        BatchGenerator(model)


def test_a_function_of_torchs_that_was_replaced_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model, linear = FAMILIES["llama"](), nn.functional.linear
    generator = BatchGenerator(model)

    def by_the_largest(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        step = hidden.abs().max() / 7
        return linear((hidden / step).round() * step, *args)

    monkeypatch.setattr(nn.functional, "linear", by_the_largest)
    for call in (lambda: BatchGenerator(model), lambda: tokens(generator)):
        with pytest.raises(UnsupportedModelError, match=f"torch.nn.functional.linear.*{BESIDE}"):
            call()
    monkeypatch.setattr(nn.functional, "linear", lambda *args: linear(*args) * 0.9)
    assert tokens(generator) == tokens_alone(model)


class Gated(Around):
    """Brings tokens together once something that it reads says so."""

    by_class = False

    def __init__(self, inner: nn.Module, of_closure: list[float]) -> None:
        super().__init__(inner, lambda hidden: hidden + of_closure[0] * hidden.roll(1, 1))
        self.amount = 0.0
        self.gate = nn.Parameter(torch.zeros(1))
        self.held = SimpleNamespace(listed=[torch.zeros(1)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        amount = self.amount + self.gate + self.by_class + self.held.listed[0]
        return self.inner(self.before(hidden + amount * hidden.roll(1, 1)))


CHANGES: dict[str, Callable[[Any, list[float], pytest.MonkeyPatch], None]] = {
    "attribute": lambda module, closure, patch: setattr(module, "amount", 1.0),
    "class": lambda module, closure, patch: patch.setattr(Gated, "by_class", True),
    "weight": lambda module, closure, patch: module.gate.data.fill_(1.0),
    "tensor in a list": lambda module, closure, patch: module.held.listed[0].data.fill_(1.0),
    "closure": lambda module, closure, patch: closure.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_code_is_tried_again_once_what_it_reads_has_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = FAMILIES["llama"]()
    closure = [0.0]
    model.model.layers[1].mlp = Gated(model.model.layers[1].mlp, closure)
    generator = BatchGenerator(model)
    assert tokens(generator) == tokens_alone(model)
    CHANGES[name](model.model.layers[1].mlp, closure, monkeypatch)
    with pytest.raises(UnsupportedModelError, match=BESIDE):
        tokens(generator)


class Dropped(Around):
    """Random in any mode; it mixes once told to."""

    mixes = random = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(hidden, 0.3, training=self.random)
        return self.inner(shifted(hidden) if self.mixes else hidden)


def test_random_numbers_of_training_hide_no_mixing() -> None:
    model: Any = FAMILIES["gpt2"]()  # with dropout of its own
    model.transformer.h[1].mlp = Before(model.transformer.h[1].mlp, shifted)
    with pytest.raises(UnsupportedModelError, match=BESIDE):
        BatchGenerator(model.train())
    assert model.transformer.h[1].mlp.training


def test_a_trial_that_random_numbers_spoil_does_not_count() -> None:
    model: Any = FAMILIES["llama"]()
    model.model.layers[1].mlp = dropped = Dropped(model.model.layers[1].mlp)
    generator = BatchGenerator(model)
    tokens(generator)
    dropped.random = False
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


def layer_norm(hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(hidden, hidden.shape[-1:])


def another_mlp(model: Any) -> None:
    model.model.layers[0].mlp.__class__ = Qwen2MLP


SERVED = {
    "a norm in front": before_mlp(layer_norm),
    "an activation function": activation(nn.functional.relu),
    "a layer norm behind": after_mlp(lambda: nn.LayerNorm(WIDTH)),
    "an MLP of another model": another_mlp,
}


@pytest.mark.parametrize("name", SERVED)
def test_what_treats_each_token_by_itself_is_served_without_a_word(name: str) -> None:
    model = FAMILIES["llama"]()
    SERVED[name](model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(BatchGenerator(model)) == tokens_alone(model)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trials_keep_to_the_positions_that_a_model_knows(family: str, dtype: torch.dtype) -> None:
    model = FAMILIES[family]().to(dtype)
    base: Any = type(model)
    model.__class__ = type("Mine", (base,), {"forward": lambda *args, **more: base.forward(*args, **more)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert BatchGenerator(model).architecture.selects_rows


class OwnPositions(Around):
    """A table that is shorter than what the config says."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.places = nn.Embedding(64, WIDTH)

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        self.places(position_ids)
        return self.inner(hidden, position_ids)


def test_trials_keep_to_the_tables_of_own_code() -> None:
    model: Any = FAMILIES["llama"]()
    model.model.rotary_emb = OwnPositions(model.model.rotary_emb)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(BatchGenerator(model)) == tokens_alone(model)


def test_an_observer_notes_nothing_of_a_trial() -> None:
    model: Any = FAMILIES["llama"]()
    observer = MinMaxObserver()
    model.model.layers[1].mlp = nn.Sequential(observer, model.model.layers[1].mlp)
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


KEPT_PROMPTS = [[*range(3, 28), 60 + each] for each in range(3)]


def kept_tokens(generator: BatchGenerator) -> list[list[int]]:
    return [each.token_ids for each in generator.generate(KEPT_PROMPTS, max_new_tokens=6, do_sample=False)]


@pytest.mark.parametrize("where", ["long rows", "activation"])
def test_kept_prefixes_know_what_acts_at_later_positions_and_in_activation_functions(where: str) -> None:
    model: Any = FAMILIES["llama"]()
    factor = SimpleNamespace(now=1.0)
    if where == "activation":
        activation(lambda hidden: nn.functional.silu(hidden) * factor.now)(model)
    else:
        inner = model.model.layers[0].self_attn.forward

        def later(**given: Any) -> Any:
            is_late = (given["position_ids"] > 16)[..., None]
            out, weights = inner(**given)
            return torch.where(is_late, out * factor.now, out), weights

        model.model.layers[0].self_attn.forward = later
    generator = BatchGenerator(model, keep_prefixes=64, page_size=4)
    before = kept_tokens(generator)
    assert kept_tokens(generator) == before and generator.last_report.cached_tokens  # type: ignore[union-attr]
    factor.now = 3.0
    assert before != kept_tokens(generator) == kept_tokens(BatchGenerator(model))


class Records(Around):
    def __init__(self, inner: nn.Module, seen: list[int]) -> None:
        super().__init__(inner, lambda hidden: seen.append(hidden.shape[1]) or hidden)  # type: ignore[func-returns-value]
        self.passes, self.amount = [0], torch.zeros(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.passes[0] += 1
        return self.inner(self.before(hidden) + self.amount * hidden.roll(1, 1))


def test_code_that_records_sees_one_trial_and_is_tried_again_if_the_owner_changes_it() -> None:
    model: Any = FAMILIES["llama"]()
    seen: list[int] = []
    model.model.layers[1].mlp = module = Records(model.model.layers[1].mlp, seen)
    generator = BatchGenerator(model)
    for _ in range(2):
        seen.clear()
        tokens(generator)
        assert len(seen) == generator.last_report.steps  # type: ignore[union-attr]
    module.amount = torch.ones(1)
    with pytest.raises(UnsupportedModelError, match=BESIDE):
        tokens(generator)
