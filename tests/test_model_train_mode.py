"""A model in train mode does some things that no call can repeat: refused, or warned of once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from support_families import FAMILIES
from support_family_models import Family

from hf_batchllm import BatchGenerator, UnsupportedModelError

PROMPTS = [[5, 6, 7], [8, 9]]


def made(name: str, **edits: Any) -> Any:
    family = FAMILIES[name]
    return Family(name, family.model_type, {**family.config, **edits})()


def said(generator: BatchGenerator) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        generator.generate(PROMPTS, max_new_tokens=2, do_sample=False)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("name", ["opt", "biogpt"])
def test_layers_that_are_dropped_at_random_are_refused_in_train_mode(name: str) -> None:
    model = made(name, layerdrop=0.5)
    generator = BatchGenerator(model.train())
    with pytest.raises(UnsupportedModelError, match=r"drops layers at random .*`layerdrop` is 0\.5.*call model\.eval"):
        generator.generate(PROMPTS, max_new_tokens=2)
    model.eval()
    generator.generate(PROMPTS, max_new_tokens=2)


@pytest.mark.parametrize(
    ("name", "edits"), [("mixtral", {"router_jitter_noise": 0.5}), ("phimoe", {"input_jitter_noise": 0.5})]
)
def test_noise_in_routers_is_warned_of_once(name: str, edits: dict[str, float]) -> None:
    model = made(name, **edits)
    generator = BatchGenerator(model)
    assert not [message for message in said(generator) if "noise in its routers" in message]
    model.train()
    assert len([message for message in said(generator) if "noise in its routers (`" in message]) == 1
    assert not [message for message in said(generator) if "noise in its routers" in message]


def test_gradient_checkpointing_in_train_mode_is_warned_of_once() -> None:
    model = made("llama")
    expected = [result.token_ids for result in BatchGenerator(model).generate(PROMPTS, max_new_tokens=2)]
    model.gradient_checkpointing_enable()
    generator = BatchGenerator(model)
    assert not [message for message in said(generator) if "gradient checkpointing" in message]
    model.train()
    assert len([message for message in said(generator) if "gradient checkpointing" in message]) == 1
    assert not [message for message in said(generator) if "gradient checkpointing" in message]
    assert [result.token_ids for result in generator.generate(PROMPTS, max_new_tokens=2)] == expected
