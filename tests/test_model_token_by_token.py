"""Code of a user's inside a model: served where it treats every token by itself, refused by name elsewhere.

It is tried in long rows, alone and with a cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_families import FAMILIES
from support_users import (
    PROMPTS,
    Around,
    Before,
    Change,
    around_mlp,
    around_rotary,
    assert_refused,
    before_mlp,
    of_class,
    tokens,
    tokens_alone,
)
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from transformers import LlamaForCausalLM, MambaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from hf_batchllm import BatchGenerator, UnsupportedModelError
from hf_batchllm.patches.attention_interface import CACHE_NAME

WIDTH = 48  # of the tiny Llama
BESIDE, LENGTH, CACHE = "which other tokens stand beside", "how many other tokens there are", "whether there is a cache"
PLACE = "its place in the row"


def seen_in(cache: Any, *layer: int) -> int:
    return 0 if cache is None else int(cache.get_seq_length(*layer))


class Interpolated(Around):
    """Beyond some length, positions lie closer together."""

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.inner(hidden, position_ids / max(1.0, (int(position_ids.max()) + 1) / 24))


class CountsFromTheFirst(Around):
    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.inner(hidden, position_ids[:, :1] + torch.arange(hidden.shape[1])[None])


class OwnPositions(Around):
    """A table that is shorter than what the config says."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.places = nn.Embedding(64, WIDTH)

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        self.places(position_ids)
        return self.inner(hidden, position_ids)


class InDecodeSteps(LlamaDecoderLayer):
    def forward(self, hidden_states: Any, **more: Any) -> Any:
        if seen_in(more.get(CACHE_NAME), self.self_attn.layer_idx):
            hidden_states = hidden_states * 2
        return super().forward(hidden_states, **more)


class ScaledByLength(LlamaAttention):
    def forward(self, hidden_states: Any, position_embeddings: Any, **more: Any) -> Any:
        self.scaling = self.head_dim**-0.5 * (2 if seen_in(more.get(CACHE_NAME), self.layer_idx) > 24 else 1)
        return super().forward(hidden_states, position_embeddings, **more)


class InTraining(LlamaForCausalLM):
    def forward(self, *args: Any, use_cache: Any = None, **more: Any) -> Any:
        output: Any = super().forward(*args, use_cache=use_cache, **more)
        output.logits = output.logits if use_cache else output.logits.roll(5, -1)
        return output


class WithoutPositions(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        return super().forward(input_ids=input_ids, **more)


class EveryRow(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **more: Any) -> Any:
        return super().forward(input_ids=input_ids, **more)


class LastRows(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **more: Any) -> Any:
        output: Any = super().forward(input_ids=input_ids, **more)
        output.logits = output.logits[:, -logits_to_keep:]  # a number, in older code that comes with checkpoints
        return output


class HidesPlaces(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        mask = torch.ones(1, seen_in(more.get(CACHE_NAME)) + input_ids.shape[1], dtype=torch.long)
        mask[:, 2:4] = 0
        return super().forward(input_ids, mask, **more)


class JustAround(LlamaForCausalLM):
    def forward(self, *args: Any, **more: Any) -> Any:
        output: Any = super().forward(*args, **more)
        output.logits = output.logits.double() * 2
        return output


class After(Around):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.before is not None
        return self.before(self.inner(hidden))


def after_mlp(function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return around_mlp(lambda mlp: After(mlp, function))


def module_after_mlp(module: Callable[[], nn.Module]) -> Change:
    def around(mlp: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(mlp, module().eval())

    return around_mlp(around)


class CountsPasses(Around):
    passes = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.inner(hidden) * self.passes


def shifted(hidden: torch.Tensor, places: int = 1) -> torch.Tensor:  # as in RWKV
    return hidden + nn.functional.pad(hidden, (0, 0, places, 0))[:, : hidden.shape[1]]


def chunks(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + (torch.arange(hidden.shape[1]) // 16)[None, :, None]


def best_half(hidden: torch.Tensor) -> torch.Tensor:
    if hidden.shape[1] < 16:
        return hidden
    norms = hidden.norm(dim=-1)
    return hidden * (norms >= norms.median())[..., None]


def normed(hidden: torch.Tensor) -> torch.Tensor:  # which torch refuses for a single token
    return nn.functional.batch_norm(hidden[0], None, None, training=True)[None]


def never_alone(hidden: torch.Tensor) -> torch.Tensor:
    if hidden.shape[1] == 1:
        raise ValueError("one is not enough")
    return hidden


def sparse(hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(hidden) * (hidden.abs() > hidden.abs().median())


def activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(model: Any) -> None:
        del model.model.layers[1].mlp.act_fn
        model.model.layers[1].mlp.act_fn = function

    return change


def by_the_largest(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden / hidden.abs().max())


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


def little_mixed(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + 0.1 * hidden.mean(1, keepdim=True)


REFUSED: dict[str, tuple[Change, str]] = {
    "shift": (before_mlp(shifted), BESIDE),
    "shift by ten": (before_mlp(lambda hidden: shifted(hidden, 10)), BESIDE),
    "by the largest number of a step": (by_the_largest, BESIDE),
    "chunks of sixteen": (before_mlp(chunks), BESIDE),
    "the best half of a long row": (before_mlp(best_half), BESIDE),
    "an error on a single token, and mixing": (before_mlp(normed), BESIDE),
    "an error on a single token": (before_mlp(never_alone), "a single token .one is not enough"),
    "positions from the first": (around_rotary(CountsFromTheFirst), PLACE),
    "no positions": (of_class(WithoutPositions), PLACE),
    "hidden places": (of_class(HidesPlaces), "hides tokens"),
    "every row": (of_class(EveryRow), "logits_to_keep"),
    "the last rows": (of_class(LastRows), "logits_to_keep"),
    "interpolation by the longest": (around_rotary(Interpolated), LENGTH),
    "another layer in decode steps": (of_class(InDecodeSteps, lambda model: model.model.layers[1]), CACHE),
    "another result without a cache": (of_class(InTraining), CACHE),
    "scale by the length": (of_class(ScaledByLength, lambda model: model.model.layers[1].self_attn), CACHE),
    "attention of torch's": (
        module_after_mlp(lambda: nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)),
        BESIDE,
    ),
    "a recurrent layer of transformers'": (
        module_after_mlp(mamba),
        "carry a state from token to token in a way that is not supported: OtherMixer",
    ),
    "softmax over the row": (module_after_mlp(lambda: nn.Softmax(dim=1)), BESIDE),
    "fake quantisation": (module_after_mlp(observing), BESIDE),
    "an activation function": (activation(sparse), BESIDE),
    "more words than rows": (more_words_than_rows, BESIDE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_tokens_is_refused_before_and_after_the_first_call(name: str) -> None:
    change, why = REFUSED[name]
    model = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    tokens(generator)
    change(model)
    assert_refused(model, generator, why if "carry a state" in why else f"not transformers' own.*{why}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (after_mlp(little_mixed), BESIDE),
        (around_mlp(CountsPasses), "other logits for the same tokens from pass to pass"),
    ],
)
def test_a_little_is_seen_in_half_precision_too(change: Change, why: str, dtype: torch.dtype) -> None:
    model = FAMILIES["llama"]().to(dtype)
    change(model)
    with pytest.raises(UnsupportedModelError, match=why):
        BatchGenerator(model)


SERVED: dict[str, Change] = {
    "louder": after_mlp(lambda hidden: 3 * hidden),
    "a forward around": of_class(JustAround),
    "a norm in front": before_mlp(lambda hidden: nn.functional.layer_norm(hidden, hidden.shape[-1:])),
    "an activation function": activation(nn.functional.relu),
    "a layer norm behind": module_after_mlp(lambda: nn.LayerNorm(WIDTH)),
    "an MLP of another model": of_class(Qwen2MLP, lambda model: model.model.layers[0].mlp),
    "a table of its own": around_rotary(OwnPositions),
    "random numbers": before_mlp(lambda hidden: nn.functional.dropout(hidden, 0.3)),
}


@pytest.mark.filterwarnings("error")  # nothing that transformers will take away is called, and the trial runs
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_treats_each_token_by_itself_is_served_without_a_word(name: str, dtype: torch.dtype) -> None:
    model = FAMILIES["llama"]()
    SERVED[name](model)
    model.to(dtype)
    state = torch.get_rng_state()
    generator = BatchGenerator(model)
    assert torch.equal(state, torch.get_rng_state())
    found = tokens(generator)
    assert len(found) == len(PROMPTS)
    assert dtype == torch.bfloat16 or name == "random numbers" or found == tokens_alone(model)


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


def test_dynamic_quantisation_is_warned_of() -> None:
    class Linear(nn.Linear):  # quantised ones do not run on every CPU
        __module__ = "torch.ao.nn.quantized.dynamic.modules.linear"

    model: Any = FAMILIES["llama"]()
    model.model.layers[0].mlp.up_proj.__class__ = Linear
    with pytest.warns(UserWarning, match="dynamic quantisation"):
        tokens(BatchGenerator(model))


def test_random_numbers_of_training_hide_no_mixing() -> None:
    model: Any = FAMILIES["gpt2"]()  # with dropout of its own
    model.transformer.h[1].mlp = Before(model.transformer.h[1].mlp, shifted)
    with pytest.raises(UnsupportedModelError, match=BESIDE):
        BatchGenerator(model.train())
    assert model.transformer.h[1].mlp.training
