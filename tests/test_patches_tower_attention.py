"""A vision tower attends to pieces of one length at once, and makes what it makes of each by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support_image_prompts import generated, inputs_of, model_of, picture, processor_of, shows, user, words
from support_kernels import plain
from torch.nn.functional import scaled_dot_product_attention

from hf_batchllm import BatchGenerator
from hf_batchllm.patches import tower_attention
from hf_batchllm.patches.tower_attention import TowerAttention, attend_in_pieces

pytestmark = plain
CHATS = [user(shows(picture(seed, 96, 64 + 32 * (seed % 2))), words(seed)) for seed in range(5)]


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [3, 1, 3, 7, 1], [2, 0, 2]])
def test_each_piece_sees_itself_alone(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, sum(lengths), 8, generator=generator, dtype=torch.float64) for _ in range(3))
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    out, _ = attend_in_pieces(torch.nn.Identity(), q, k, v, None, scaling=0.3, cu_seq_lens_q=ends)
    want = [
        scaled_dot_product_attention(*(each[:, :, begin:end] for each in (q, k, v)), scale=0.3)
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(want, dim=2).transpose(1, 2))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_tokens_are_those_of_generate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(q: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        calls.append(len(q))
        return scaled_dot_product_attention(q, *given, **named)

    monkeypatch.setattr(tower_attention, "scaled_dot_product_attention", counted)
    model = copy.deepcopy(model_of(family))
    model.model.visual.config._attn_implementation = "sdpa"
    with BatchGenerator(model, processor_of(family)) as gen:
        out = gen.generate(CHATS, max_new_tokens=6, eos_token_id=None, do_sample=False, progress=False)
    assert out.token_ids == generated(family, CHATS, 6)
    assert calls, "each image was attended to by itself"
    assert sum(calls) > len(calls), "no two pieces were one call"
    assert model.model.visual.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("chosen", ["eager", "flash_attention_2"])
def test_an_implementation_that_the_user_chose_is_left(chosen: str) -> None:
    inner = copy.deepcopy(model_of("qwen2_5_vl").model)
    inner.visual.config._attn_implementation_internal = chosen
    with TowerAttention(inner).applied():
        assert inner.visual.config._attn_implementation == chosen


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_towers_that_pack_nothing_are_left(family: str) -> None:
    inner = model_of(family).model
    before = inner.vision_tower.config._attn_implementation
    with TowerAttention(inner).applied():
        assert inner.vision_tower.config._attn_implementation == before


def test_it_is_put_back_after_an_error() -> None:
    model = copy.deepcopy(model_of("qwen2_5_vl"))
    model.model.visual.config._attn_implementation = "sdpa"
    pixels = inputs_of("qwen2_5_vl", CHATS[0])["pixel_values"]
    too_many = torch.tensor([[1, 50, 50]])
    with pytest.raises(Exception, match=r"shape|size"), TowerAttention(model.model).applied():
        model.model.get_image_features(pixels, too_many)
    assert model.model.visual.config._attn_implementation == "sdpa"
