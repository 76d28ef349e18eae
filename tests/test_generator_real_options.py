"""Each option of ``generate`` on a real language model: every row is what ``generate`` makes of its prompt alone.

The values are made of what the model would say without them, so that each of them changes something.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_options import DRAWN
from support_oracle import check_row
from support_real_model import NEEDS_REAL_MODEL
from support_real_options import GREEDY, NEW, SEED, Real
from support_real_options import real as real  # a fixture
from transformers import GenerationConfig

from hf_batchllm import Generation

pytestmark = NEEDS_REAL_MODEL


ARGUMENTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")  # of a call, not of a config
CHANGES_NOTHING = ("renormalize_logits", "remove_invalid_values", "max_time")


def _options(name: str, real: Real) -> dict[str, Any]:
    if name in DRAWN:
        return {"max_new_tokens": NEW, "do_sample": True, name: DRAWN[name][-1]}
    value = GREEDY[name](real)
    options = value if isinstance(value, dict) and name in value else {name: value}
    return options if name == "max_length" else {"max_new_tokens": NEW, **options}


def _prompts(name: str, real: Real) -> list[list[int]]:
    """One of those there are, by turns: the second is longer. A BOS that is forced is for the second token."""
    return [[2]] if name == "forced_bos_token_id" else [real.prompts[name in SECOND]]


IN_A_CONFIG = [name for name in [*GREEDY, *DRAWN] if name not in (*ARGUMENTS, "negative_prompt_ids")]
# Of the second prompt, what an option is about comes in time.
SECOND = {"max_length", *IN_A_CONFIG[1::2]} - {"min_length", "stop_strings"}


@pytest.fixture(scope="session")
def together(real: Real) -> dict[str, Generation]:
    """All options that a config may hold, in one call: each prompt has a config of its own."""
    prompts = [prompt for name in IN_A_CONFIG for prompt in _prompts(name, real)]
    configs = [GenerationConfig(**_options(name, real)) for name in IN_A_CONFIG]
    result = real.generator.generate(prompts, configs, seed=SEED, progress=False)
    return dict(zip(IN_A_CONFIG, result, strict=True))


def _assert_as_alone(name: str, row: Generation, real: Real, options: dict[str, Any]) -> None:
    assert check_row(real.model, row, options, SEED)
    if name not in (*CHANGES_NOTHING, *DRAWN):
        assert row.token_ids not in real.plain  # else it has shown nothing


@pytest.mark.some_cases
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IN_A_CONFIG)
def test_an_option(name: str, real: Real, together: dict[str, Generation]) -> None:
    options = _options(name, real)
    if name == "stop_strings":  # which ``generate`` would look for in all of the vocabulary once more
        options = {"max_new_tokens": NEW, "stopping_criteria": [real.stop(options.pop(name))]}
    _assert_as_alone(name, together[name], real, options)


@pytest.mark.some_cases
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_option_of_a_call(name: str, real: Real) -> None:
    options = _options(name, real)
    (row,) = real.generator.generate(real.prompts[:1], progress=False, **options)
    _assert_as_alone(name, row, real, options)


@pytest.mark.filterwarnings("ignore")
def test_negative_prompts(real: Real) -> None:
    negative = torch.tensor([[2, 818, 506]])
    options = {"max_new_tokens": NEW, "guidance_scale": 2.0, "negative_prompt_ids": negative}
    (row,) = real.generator.generate(real.prompts[:1], progress=False, **options)
    assert check_row(real.model, row, options)
