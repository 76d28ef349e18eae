"""Each option of ``generate`` on a real language model: every row is what ``generate`` makes of its prompt alone.

The values are made of what the model would say without them, so that each of them changes something.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support_oracle import check_row, reference
from test_generator_option_combinations import DRAWN
from transformers import LogitsProcessor, WatermarkingConfig
from transformers.generation import StoppingCriteria

from hf_batchllm import BatchGenerator

_spec = importlib.util.spec_from_file_location("small_model", Path(__file__).parents[1] / "examples" / "small_model.py")
assert _spec is not None
assert _spec.loader is not None
small_model = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small_model)

pytestmark = [
    pytest.mark.skipif(not small_model.is_available(), reason=small_model.why_not_available()),
    pytest.mark.xdist_group("real_options"),  # one worker: the model is loaded once
    pytest.mark.timeout(300),
]
NEW, SEED = 4, 3
PROMPTS = ["The capital of France is", "The capital of France, which lies on the river Seine, is called"]


class Real:
    def __init__(self) -> None:
        self.model, self.tokenizer = small_model.load()
        self.generator = BatchGenerator(self.model, self.tokenizer)
        self.prompts = [self.tokenizer(text).input_ids for text in PROMPTS]
        self.plain = [reference(self.model, prompt, {"max_new_tokens": NEW})[0] for prompt in self.prompts]
        self.said = sorted({token for tokens in self.plain for token in tokens})


@pytest.fixture(scope="session")
def real() -> Real:
    return Real()


class Less(LogitsProcessor):
    """Whatever the prompt holds becomes less likely, and what is being said before it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_add(1, input_ids, torch.full_like(input_ids, -2, dtype=scores.dtype))


class Even(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 2 == 0


GREEDY: dict[str, Any] = {
    "max_length": lambda real: len(real.prompts[1]) + 3,
    "min_new_tokens": lambda real: {"min_new_tokens": 3, "eos_token_id": real.said},
    "min_length": lambda real: {"min_length": len(real.prompts[0]) + 3, "eos_token_id": real.said},
    "eos_token_id": lambda real: [real.plain[0][1], real.plain[1][2]],
    "repetition_penalty": lambda real: 1.5,
    "encoder_repetition_penalty": lambda real: 1.5,
    "no_repeat_ngram_size": lambda real: 1,
    "encoder_no_repeat_ngram_size": lambda real: 1,
    "bad_words_ids": lambda real: [[real.plain[0][0]], real.plain[1][:2]],
    "sequence_bias": lambda real: {tuple(real.plain[0][:1]): -20.0, tuple(real.plain[1][:2]): -20.0},
    "forced_bos_token_id": lambda real: 506,
    "forced_eos_token_id": lambda real: 107,
    "exponential_decay_length_penalty": lambda real: {
        "exponential_decay_length_penalty": (1, 3.0),
        "eos_token_id": 107,
    },
    "suppress_tokens": lambda real: real.said,
    "begin_suppress_tokens": lambda real: real.said,
    "renormalize_logits": lambda real: True,
    "remove_invalid_values": lambda real: True,
    "guidance_scale": lambda real: 3.0,
    "negative_prompt_ids": lambda real: None,  # by itself, below
    "watermarking_config": lambda real: WatermarkingConfig(bias=6.0),
    "stop_strings": lambda real: real.tokenizer.decode(real.plain[0])[1:4],
    "logits_processor": lambda real: [Less()],
    "stopping_criteria": lambda real: [Even()],
    "prefix_allowed_tokens_fn": lambda real: lambda batch_id, ids: [1000, *real.said[::2]],
    "max_time": lambda real: 10_000.0,
}


def _options(name: str, real: Real) -> dict[str, Any]:
    value = GREEDY[name](real)
    options = value if isinstance(value, dict) and name in value else {name: value}
    return options if name == "max_length" else {"max_new_tokens": NEW, **options}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in GREEDY if name != "negative_prompt_ids"])
def test_an_option(name: str, real: Real) -> None:
    options = _options(name, real)
    prompts = real.prompts if name != "forced_bos_token_id" else [[2], *real.prompts]  # it is for the second token
    result = real.generator.generate(prompts, progress=False, **options)
    tokens = {"tokenizer": real.tokenizer} if name == "stop_strings" else {}
    assert all(check_row(real.model, row, options | tokens) for row in result)
    if name not in ("renormalize_logits", "remove_invalid_values", "max_time"):
        assert [row.token_ids for row in result] != real.plain  # else it has shown nothing


@pytest.mark.filterwarnings("ignore")
def test_negative_prompts(real: Real) -> None:
    negative = torch.tensor([[2, 818, 506], [2, 236743, 107]])
    options = {"max_new_tokens": NEW, "guidance_scale": 2.0}
    result = real.generator.generate(real.prompts, progress=False, negative_prompt_ids=negative, **options)
    for row in result:
        own = {"negative_prompt_ids": negative[row.index : row.index + 1]}
        assert check_row(real.model, row, options | own)


@pytest.mark.parametrize("name", DRAWN)
def test_an_option_of_sampling(name: str, real: Real) -> None:
    options = {"max_new_tokens": NEW, "do_sample": True, name: DRAWN[name][-1]}
    result = real.generator.generate(real.prompts, seed=SEED, progress=False, **options)
    assert len(result) == 2
    assert all(check_row(real.model, row, options, SEED) for row in result)
