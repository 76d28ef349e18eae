"""Fused layers of models that read images: with prompts of text alone they give what the model's own code gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_families import reference_generate
from support_fused import assert_same_logits, logits_of_steps, run, some_prompts
from support_fused import fusing as fusing  # a fixture
from support_image_text_families import FUSED_IMAGE_TEXT, IMAGE_TEXT
from support_kernels import INTERPRETED
from support_untouched import fingerprint

pytestmark = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")
PROMPTS = some_prompts(6, "nested")
FORWARDS = {"qwen3_vl_moe": 2 * 4 + 1}  # where they are not those of two layers of three parts, and of the last norm


def without_addresses(model: Any) -> Any:
    modules, tensors, *rest = fingerprint(model)
    return modules, {name: (each[0], *each[2:]) for name, each in tensors.items()}, rest


@pytest.mark.some_cases
@pytest.mark.parametrize("name", FUSED_IMAGE_TEXT)
def test_tokens_and_what_is_left(name: str, fusing: list[int]) -> None:
    model = IMAGE_TEXT[name]()
    before = without_addresses(model)
    result = run(model, PROMPTS, 5)
    assert set(fusing) == {FORWARDS.get(name, 2 * 3 + 1)}
    assert str(result.report.fused).startswith("2 of 2 layers") and "left as" not in str(result.report.fused)
    assert without_addresses(model) == before
    for prompt, row in zip(PROMPTS, result, strict=True):
        assert row.token_ids == reference_generate(model, prompt, max_new_tokens=5), prompt


@pytest.mark.some_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED_IMAGE_TEXT)
def test_bits(name: str, dtype: torch.dtype, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.patches.fusion.mixtures", lambda model: [])  # experts add up in another order
    model = IMAGE_TEXT[name]().to(dtype)
    own = logits_of_steps(monkeypatch, model, PROMPTS, fuse=False)
    assert not fusing
    assert_same_logits(logits_of_steps(monkeypatch, model, PROMPTS), own, dtype)
    assert fusing
