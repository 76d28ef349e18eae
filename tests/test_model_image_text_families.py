"""Classes that read images and text give the tokens of ``model.generate`` for prompts of text alone."""

from __future__ import annotations

import pytest
from support_families import reference_generate
from support_image_text_families import IMAGE_TEXT

from hf_batchllm import BatchGenerator

_BASE = [5, 9, 22, 31, 7, 18, 40, 41, 55, 3, 77, 62, 12, 13, 90]
# A shared prefix, equal ones, a prefix of another, one token; all longer ones leave the windows behind.
_PROMPTS = [[*_BASE, 1], [*_BASE, 2], _BASE, _BASE, _BASE[:4], [9]]


@pytest.mark.some_cases
@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_text_prompts_give_the_tokens_of_generate(name: str) -> None:
    model = IMAGE_TEXT[name]()
    with BatchGenerator(model, page_size=4, max_batch_tokens=16, min_shared_tokens=1) as generator:
        result = generator.generate(_PROMPTS, max_new_tokens=8, pad_token_id=0)
    assert result.report.saving > 0.3
    for prompt, row in zip(_PROMPTS, result, strict=True):
        assert row.token_ids == reference_generate(model, prompt, max_new_tokens=8), prompt
    assert len({tuple(row.token_ids) for row in result}) > 2  # what a model says depends on the prompt
