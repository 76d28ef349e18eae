"""A ``forward`` of an owner's around that of transformers: its signature need not say what it passes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from support_families import FAMILIES
from support_owners import tokens, tokens_alone

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
