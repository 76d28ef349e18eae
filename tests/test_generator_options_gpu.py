"""Every option on a GPU: what ``generate`` gives there in float32, whoever picks the tokens, the device or the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_families import build
from support_letter_tokenizers import letter_tokenizer
from support_options import ANY, SEED, WITH, _prompts, _tokens
from support_oracle import check_row
from transformers import PreTrainedModel

from hf_batchllm import BatchGenerator, accelerated

pytestmark = pytest.mark.gpu
FAMILY = "llama"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return copy.deepcopy(build(FAMILY)).cuda()


@pytest.fixture(scope="module")
def generator(model: PreTrainedModel) -> Iterator[BatchGenerator]:
    with BatchGenerator(model, letter_tokenizer()) as made:
        yield made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ANY)
def test_an_option(name: str, sampled: bool, generator: BatchGenerator) -> None:  # watermarks are the device's own
    options = {"max_new_tokens": 8, name: ANY[name][0]} | WITH.get(name, {})
    if sampled:  # with noise that a CPU can make again: it is the host's where one option needs the host
        options |= {"do_sample": True, "typical_p": 0.95}
    result = generator.generate(_prompts(1), seed=SEED, progress=False, **options)
    assert sum(check_row(generator.model, row, options | _tokens(options), SEED) for row in result) >= 3


@pytest.mark.filterwarnings("ignore")
def test_log_probabilities(generator: BatchGenerator) -> None:
    prompts = _prompts(3, 8)
    given: dict[str, Any] = {"max_new_tokens": 6, "logprobs": 3, "prompt_logprobs": 2, "progress": False}
    for ours, theirs in zip(
        generator.generate(prompts, **given), BatchGenerator(build(FAMILY)).generate(prompts, **given), strict=True
    ):
        assert ours.token_ids == theirs.token_ids
        for mine, others in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:])):
            for one, other in zip(mine, others, strict=True):
                assert one.keys() == other.keys()
                assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_scores_come_as_from_generate(model: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]], device="cuda")
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "no_repeat_ngram_size": 2}
    plain = model.generate(ids, **given)
    with accelerated(model):
        fast = model.generate(ids, **given)
        assert model.generate.last_report is not None
    assert torch.equal(fast.sequences, plain.sequences)
    for name in ("scores", "logits"):
        mine, others = getattr(fast, name), getattr(plain, name)
        assert mine[0].device == others[0].device
        torch.testing.assert_close(torch.stack(mine), torch.stack(others), atol=1e-3, rtol=1e-3)
