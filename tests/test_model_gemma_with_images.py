"""Gemma 3n and Gemma 4 as checkpoints have them, with parts for images: text prompts are as in ``generate``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_families import FAMILIES, reference_generate
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from hf_batchllm import BatchGenerator
from hf_batchllm.patches.mask_probe import NotedMask

PROMPTS = [[5, 9, 33, 71] * 6 + last for last in ([2], [3, 4, 50], [80, 81, 7, 8, 9])] + [[17]]
PLACES = {"image_token_id": 98, "audio_token_id": 97, "boi_token_id": 96, "eoi_token_id": 95}  # no prompt has them
NO_TOWERS: dict[str, Any] = {"vision_config": None, "audio_config": None, "video_token_id": 99}


def with_images(model_type: str, text: str, **fields: Any) -> Any:
    """A tiny model around the text model of a family of the zoo."""
    whole = type(AutoConfig.for_model(model_type))
    own = {**FAMILIES[text]().config.to_dict(), "pad_token_id": 0, **fields}
    config = whole(text_config={**own, "model_type": f"{model_type}_text"}, **PLACES, **fields.get("more", NO_TOWERS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 1.3 * parameter.shape[-1] ** -0.5)
    return model


def check(model: Any, sources: list[int | None]) -> None:
    generator = BatchGenerator(model, min_shared_tokens=1, page_size=4)
    assert [shape.source for shape in generator.architecture.attention] == sources
    result = generator.generate(PROMPTS, max_new_tokens=6, suppress_tokens=list(range(90, 101)), progress=False)
    options: dict[str, Any] = {"max_new_tokens": 6, "suppress_tokens": list(range(90, 101))}
    assert result.token_ids == [reference_generate(model, prompt, **options) for prompt in PROMPTS]
    assert len(set(map(tuple, result.token_ids))) == len(PROMPTS)


@pytest.mark.parametrize(
    ("kind", "text", "fields", "sources"),
    [
        ("gemma4", "gemma4_shared", {}, [None, None, None, 1, 2]),
        ("gemma4", "gemma4", {"use_bidirectional_attention": "vision"}, [None] * 3),  # images are seen both ways
        # Its masks look up which tokens belong to an image; the pass that asks about them has two tokens.
        ("gemma4_unified", "gemma4", {}, [None] * 3),
    ],
)
def test_gemma4(kind: str, text: str, fields: dict[str, Any], sources: list[int | None]) -> None:
    check(with_images(kind, text, **fields), sources)


def test_gemma3n(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma3n import modeling_gemma3n

    class Tower(torch.nn.Module):
        """In the place of a vision tower, for which further packages are needed."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, 2))

    class Towers:
        @staticmethod
        def from_config(config: Any, **options: Any) -> torch.nn.Module:
            return AutoModel.from_config(config, **options) if config.model_type == "gemma3n_text" else Tower()

    monkeypatch.setattr(modeling_gemma3n, "AutoModel", Towers)
    small = {"hidden_size": 8, "vocab_size": 2}
    towers = {"vision_config": {**small, "vocab_offset": 90}, "audio_config": {**small, "vocab_offset": 92}}
    check(with_images("gemma3n", "gemma3n", more=towers), [None, None, None, 1, 2])


def test_a_table_goes_on_only_where_all_of_it_is_alike() -> None:
    def same_block(table: torch.Tensor) -> NotedMask:
        return NotedMask(lambda batch, head, q, k: table[batch, q] == table[batch, k], torch.empty(0))

    assert same_block(torch.tensor([[4, 4]])).sees(1_000_000, 3)
    assert not same_block(torch.tensor([[4, 5]])).sees(1, 0)
    with pytest.raises(IndexError):
        same_block(torch.tensor([[4, 5]])).sees(1_000_000, 3)
