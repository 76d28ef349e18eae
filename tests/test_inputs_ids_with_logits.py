"""A head that is narrower than the table of tokens: ids beyond it can be read, and have no log-probability."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support_families import build
from torch import nn

from hf_batchllm import BatchGenerator, PromptError

NO_LOGITS = r"has token id 61, which has no log-probability: LlamaForCausalLM reads 101 ids, .* the first 60"


@pytest.fixture
def narrow() -> Any:
    model = copy.deepcopy(build("llama"))
    model.lm_head = nn.Linear(model.config.hidden_size, 60, bias=False)
    with torch.no_grad():
        model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    return model


def test_scores_of_ids_beyond_the_head_are_refused(narrow: Any) -> None:
    generator = BatchGenerator(narrow)
    with pytest.raises(PromptError, match=NO_LOGITS):
        generator.score([[1, 2], [1, 2]], [[[5, 6]], [[5, 61]]])
    with pytest.raises(PromptError, match=NO_LOGITS):
        generator.score(None, [[1, 61]])
    read_only = generator.score([[1, 61]], [[[5, 6]]])
    assert len(read_only) == 1


def test_prompt_logprobs_of_ids_beyond_the_head_are_refused(narrow: Any) -> None:
    generator = BatchGenerator(narrow)
    with pytest.raises(PromptError, match=NO_LOGITS):
        generator.generate([[1, 61, 2]], max_new_tokens=1, prompt_logprobs=1)
    assert generator.generate([[1, 61, 2]], max_new_tokens=1)[0].token_ids
    assert generator.generate([[61, 2]], max_new_tokens=1, prompt_logprobs=1)[0].prompt_logprobs


def test_a_head_that_is_replaced_later_counts(narrow: Any) -> None:
    head = narrow.lm_head
    narrow.lm_head = nn.Linear(narrow.config.hidden_size, 101, bias=False)
    generator = BatchGenerator(narrow)
    generator.score([[1, 2]], [[[61]]])
    narrow.lm_head = head
    with pytest.raises(PromptError, match=NO_LOGITS):
        generator.score([[1, 2]], [[[61]]])


class OwnHead(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T


def test_a_narrow_head_of_an_own_class_is_refused_as_early(narrow: Any) -> None:
    head = narrow.lm_head
    narrow.lm_head = OwnHead(head.weight.detach().clone())
    try:
        generator = BatchGenerator(narrow)
        last = narrow.lm_head.weight.shape[0]
        with pytest.raises(PromptError, match=f"token id {last}, which has no log-probability"):
            generator.score([[5, 6]], [[last]])
        assert generator.score([[5, 6]], [[7]])
    finally:
        narrow.lm_head = head
