"""Models whose layers carry a state, in calls beside plain text: scores, adapters, tensors."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from support_families import CARRYING, build, family_params, random_prompts
from support_parity import watched as watched  # a fixture
from support_score import assert_right, questions

from hf_batchllm import BatchGenerator

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EVERYWHERE = pytest.mark.parametrize("device", DEVICES)
pytestmark = pytest.mark.filterwarnings("ignore:attention on cuda")


def on(device: str, model: Any) -> Any:
    return model if device == "cpu" else copy.deepcopy(model).to(device)


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(CARRYING))
@EVERYWHERE
def test_scores_are_those_of_a_plain_forward(family: str, device: str, watched: list[Any]) -> None:
    """Several continuations of a context begin with its state; so do contexts with that of their prefix."""
    contexts, several = questions()
    for config in ({}, {"page_size": 4, "max_batch_tokens": 17, "keep_prefixes": 4}):
        with BatchGenerator(on(device, build(family)), min_shared_tokens=1, **config) as generator:
            for _ in range(1 + bool(config)):  # kept prefixes, the second time
                assert_right(family, contexts, several, generator.score(contexts, several, progress=False))


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(CARRYING))
@EVERYWHERE
def test_each_adapter_has_states_of_its_own(family: str, device: str, watched: list[Any]) -> None:
    adapters = pytest.importorskip("support_adapters")
    given, names = adapters.thrice(adapters.prompts())
    with BatchGenerator(on(device, adapters.build(family)), **adapters.PAGES) as generator:
        result = generator.generate(given, adapter=names, max_new_tokens=adapters.NEW_TOKENS, progress=False)
    adapters.assert_each(family, given, names, result)
    if device == "cpu":
        adapters.assert_adapters_matter(family, adapters.prompts())


@pytest.mark.some_cases
@pytest.mark.parametrize("family", family_params(CARRYING))
@EVERYWHERE
def test_tensors_in_and_out_are_those_of_generate(family: str, device: str) -> None:
    """Padding is no token: no state remembers it."""
    rows = [prompt[:24] for prompt in random_prompts(random.Random(3), 97, "mixed", 6)]
    ids, mask = torch.zeros(len(rows), 24, dtype=torch.long), torch.zeros(len(rows), 24, dtype=torch.long)
    for row, prompt in enumerate(rows):
        ids[row, 24 - len(prompt) :], mask[row, 24 - len(prompt) :] = torch.tensor(prompt), 1
    wanted = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 6}
    stock: Any = build(family)
    expected = stock.generate(ids, attention_mask=mask, **wanted)
    with BatchGenerator(on(device, build(family)), min_shared_tokens=4, page_size=8) as generator:
        got = generator.generate(input_ids=ids.to(device), attention_mask=mask.to(device), **wanted)
    assert got.sequences.device.type == device
    assert torch.equal(got.sequences.cpu(), expected.sequences)
    near = 1e-2 if family == "nemotron_h" else 2e-3  # `generate` differs from itself there: see docs/hybrids.md
    for ours, theirs in zip(got.logits, expected.logits, strict=True):  # [rows, vocabulary] of each step
        torch.testing.assert_close(ours.cpu(), theirs, atol=near, rtol=1e-3)
