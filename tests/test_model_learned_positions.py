"""A table of learned positions bounds a prompt and its answer, and says so before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from support_families import reference_generate
from support_family_models import Family

from hf_batchllm import BatchGenerator, PromptError

ROWS = 24


def decoder(kind: str) -> Any:
    config = {"is_decoder": True, "max_position_embeddings": ROWS, "intermediate_size": 64, "pad_token_id": 1}
    return Family(kind, kind, config)()


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "xlm-roberta-xl", "bert-generation", "opt"])
def test_prompts_beyond_the_positions_are_refused_by_number(kind: str) -> None:
    model = decoder(kind)
    generator = BatchGenerator(model)
    assert generator.architecture.max_positions == ROWS
    longest = list(range(5, 5 + ROWS))
    expected = reference_generate(model, longest, max_new_tokens=1)
    assert generator.generate([longest], max_new_tokens=1)[0].token_ids == expected
    with pytest.raises(PromptError, match=rf"prompt 1 has {ROWS} tokens .*has learned {ROWS} positions"):
        generator.generate([[5, 6], longest], max_new_tokens=2)


def test_with_errors_recorded_the_other_prompts_run() -> None:
    results = BatchGenerator(decoder("bert")).generate(
        [[5, 6], [7] * (ROWS + 1)], max_new_tokens=2, do_sample=False, on_error="record"
    )
    assert [result.error is None for result in results] == [True, False]


@pytest.mark.parametrize("kind", ["whisper", "gpt2"])
def test_tables_of_other_families_are_found_as_before(kind: str) -> None:
    config = {"gpt2": {"max_position_embeddings": ROWS}, "whisper": {"max_target_positions": ROWS}}[kind]
    if kind == "whisper":
        config |= {"is_decoder": True, "is_encoder_decoder": False, "d_model": 48, "decoder_layers": 3}
        config |= {"decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    assert BatchGenerator(Family(kind, kind, config)()).architecture.max_positions == ROWS
