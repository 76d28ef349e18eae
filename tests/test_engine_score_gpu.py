"""Scores on a GPU: the kernels under short chunks, and figures that come back while the next step runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support_families import build, family_params
from support_parity import watched  # noqa: F401
from support_score import KINDS_OF_ATTENTION, assert_right, questions

from hf_batchllm import BatchGenerator

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:attention on cuda")]


@pytest.mark.parametrize("family", family_params(KINDS_OF_ATTENTION))
@pytest.mark.parametrize(
    "config",
    [{}, {"max_batch_tokens": 7}, {"scheduler": "fifo", "max_batch_tokens": 31}, {"page_size": 16, "keep_prefixes": 4}],
    ids=str,
)
@pytest.mark.usefixtures("watched")
def test_float32_is_what_a_plain_forward_on_a_cpu_gives(family: str, config: dict[str, Any]) -> None:
    model = copy.deepcopy(build(family)).to("cuda")
    contexts, several = questions()
    with BatchGenerator(model, **{"min_shared_tokens": 1, **config}) as generator:
        for _ in range(2):  # kept prefixes, the second time
            assert_right(family, contexts, several, generator.score(contexts, several, progress=False))


def test_bfloat16() -> None:
    model = copy.deepcopy(build("llama")).to("cuda", torch.bfloat16)
    contexts, several = questions()
    result = BatchGenerator(model).score(contexts, several, progress=False)
    for score in result:
        ids = torch.tensor([[*contexts[score.index], *score.token_ids]], device="cuda")
        with torch.no_grad():
            logprobs = model(ids).logits[0].float().log_softmax(dim=-1)
        first = len(contexts[score.index])
        expected = [logprobs[first - 1 + at, token].item() for at, token in enumerate(score.token_ids)]
        assert score.logprobs == pytest.approx(expected, abs=0.5)
