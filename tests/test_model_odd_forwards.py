"""A ``forward`` of a user's around that of transformers: its signature need not say what it passes on."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_families import FAMILIES, build
from support_users import assert_refused, tokens, tokens_alone
from torch import nn

from hf_batchllm import BatchGenerator, UnsupportedModelError

# Gemma 4 with layers that share K and V hands its last layers copies of the masks, unless it selects rows.
SHARED = "gemma4_shared"


def of_subclass(family: str, forward: Callable[..., Any]) -> Any:
    model: Any = FAMILIES[family]()
    base = type(model)
    model.__class__ = type("Mine", (base,), {"forward": lambda *args, **more: forward(base.forward, *args, **more)})
    return model


def on_the_model(family: str, forward: Callable[..., Any]) -> Any:
    model: Any = FAMILIES[family]()
    original = model.forward
    model.forward = lambda *args, **more: forward(original, *args, **more)
    return model


def passes_on(forward: Any, *args: Any, **more: Any) -> Any:
    return forward(*args, **more)


def keeps_every_row(forward: Any, *args: Any, logits_to_keep: Any = 0, **more: Any) -> Any:
    return forward(*args, **more)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", ["llama", SHARED])
@pytest.mark.parametrize("made", [of_subclass, on_the_model])
def test_a_forward_that_passes_everything_on_is_served(made: Any, family: str) -> None:
    model = made(family, passes_on)
    generator = BatchGenerator(model)
    assert generator.architecture.selects_rows
    assert tokens(generator) == tokens_alone(model) == tokens(generator)


@pytest.mark.parametrize("made", [of_subclass, on_the_model])
def test_a_forward_that_drops_the_rows_asked_for_gives_all(made: Any) -> None:
    model = made("llama", keeps_every_row)
    generator = BatchGenerator(model)
    assert not generator.architecture.selects_rows
    assert tokens(generator) == tokens_alone(model)


def test_where_the_rows_matter_to_attention_the_reason_says_so() -> None:
    model, why = of_subclass(SHARED, keeps_every_row), ""
    try:
        generator = BatchGenerator(model)
    except UnsupportedModelError as error:
        why = str(error)
    else:  # an older transformers hands all layers the same masks
        assert tokens(generator) == tokens_alone(model)
    assert not why or re.search(r"Mine has a `forward` .* does not pass `logits_to_keep` on", why)


class LastPlaceOnly(nn.Module):
    """A head that computes no more than ``generate`` needs of one prompt."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, states: torch.Tensor) -> Any:
        return self.head(states[:, -1:])


def drops_the_rows_asked_for(module: nn.Module, args: Any, more: dict[str, Any]) -> Any:
    return args, {name: value for name, value in more.items() if name != "logits_to_keep"}


ROWS_LEFT_OUT: dict[str, Callable[[Any], object]] = {
    "by a head": lambda model: setattr(model, "lm_head", LastPlaceOnly(model.lm_head)),
    "by a hook on it": lambda model: model.lm_head.register_forward_pre_hook(lambda _, args: (args[0][:, -1:],)),
    "by a hook": lambda model: model.register_forward_pre_hook(drops_the_rows_asked_for, with_kwargs=True),
}


@pytest.mark.filterwarnings("ignore:there are hooks")
@pytest.mark.parametrize("how", ROWS_LEFT_OUT)
def test_rows_of_logits_that_were_not_asked_for_are_refused(how: str) -> None:
    model = FAMILIES["llama"]()
    ROWS_LEFT_OUT[how](model)
    says = r"rows of logits for|rows of logits where \d were asked for|does not give the logits of those places"
    with pytest.raises(UnsupportedModelError, match=says):
        tokens(BatchGenerator(model))
    with pytest.raises(UnsupportedModelError, match=says):
        BatchGenerator(model).score([[5, 6, 7]], [[[8, 9, 10]]])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_torch_jit_are_refused_by_name() -> None:
    model = FAMILIES["llama"]()
    generator = BatchGenerator(model)
    mlp = model.model.layers[0].mlp
    model.model.layers[0].mlp = torch.jit.trace(mlp, torch.randn(1, 3, model.config.hidden_size))
    assert_refused(model, generator, "torch.jit traced or scripted")
    model.model.layers[0].mlp = mlp
    assert tokens(generator) == tokens_alone(model)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_generator_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"make one of the copied model"):
        copied(BatchGenerator(build("llama")))
