"""Fused layers give what the model's own code gives, and leave alone what is not theirs to replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build, family_params
from fused import FUSED_FAMILIES, logits_of_steps, run, some_prompts
from fused import fusing as fusing  # a fixture
from harness import assert_parity
from harness import watched as watched
from test_kernel_attention import twins as twins

NEW_TOKENS = 6


@pytest.mark.parametrize("family", family_params(FUSED_FAMILIES))
class TestEveryFamily:
    def test_over_plain_attention(self, family: str, fusing: list[int], watched: list[Any]) -> None:
        result = run(build(family), some_prompts(14), NEW_TOKENS, max_batch_tokens=40)
        assert_parity(family, some_prompts(14), result, NEW_TOKENS)
        assert set(fusing) == {3 * 3 + 1}, "each layer, its attention, its MLP, and the last norm"
        assert "fused      3 of 3 layers" in str(result.report)
        assert "<td>3 of 3 layers</td>" in result.report._repr_html_()

    def test_over_the_kernels(
        self, family: str, fusing: list[int], watched: list[Any], twins: dict[str, Any]
    ) -> None:
        result = run(build(family), some_prompts(14), NEW_TOKENS)
        assert_parity(family, some_prompts(14), result, NEW_TOKENS)
        assert set(fusing) == {10} and twins["lists"]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_bits(self, family: str, dtype: torch.dtype, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        from families import FAMILIES

        model = FAMILIES[family]().to(dtype)
        own = logits_of_steps(monkeypatch, model, some_prompts(), fuse=False)
        assert not fusing
        fused = logits_of_steps(monkeypatch, model, some_prompts())
        assert fusing
        for a, b in zip(own, fused, strict=True):
            print((a-b).abs().max())
            assert torch.equal(a, b)
