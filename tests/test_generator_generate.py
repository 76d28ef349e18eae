"""What ``generate`` promises beyond greedy parity: options, text, and errors before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_accelerated import tokenizer as tokenizer  # a fixture
from support_families import build, reference_generate
from support_llama_calls import FAMILY, prompts
from support_llama_calls import generator as generator  # a fixture
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hf_batchllm import (
    BatchConfig,
    BatchGenerator,
    PromptError,
    UnsupportedModelError,
)


def stock(prompt: list[int], **options: Any) -> list[int]:
    """The new tokens of ``model.generate`` for one prompt."""
    return reference_generate(build(FAMILY), prompt, **options)


# -- options ---------------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 6},
        {"max_new_tokens": 6, "min_new_tokens": 6, "eos_token_id": list(range(40))},
        {"max_new_tokens": 9, "min_new_tokens": 3, "eos_token_id": list(range(40))},
        {"max_new_tokens": 9, "min_length": 30, "eos_token_id": list(range(40))},
        {"max_length": 75},
        {"max_length": 75, "min_new_tokens": 2, "eos_token_id": [5, 6, 7, 8, 9, 10, 11]},
        {"max_new_tokens": 9, "repetition_penalty": 1.7},
        {"max_new_tokens": 9, "repetition_penalty": 0.6},
        {"max_new_tokens": 6, "use_cache": False},
        {"max_new_tokens": 6, "eos_token_id": 4, "pad_token_id": 4},
    ],
    ids=str,
)
def test_greedy_options_mean_what_they_mean_to_generate(generator: BatchGenerator, options: dict[str, Any]) -> None:
    found = generator.generate(prompts(), **options).token_ids
    assert found == [stock(prompt, **{"use_cache": True, **options}) for prompt in prompts()]


def test_defaults_come_from_the_models_generation_config(generator: BatchGenerator) -> None:
    config = build(FAMILY).generation_config
    before = config.to_dict()
    config.max_new_tokens, config.eos_token_id = 5, list(range(15))
    try:
        result = generator.generate(prompts())
        assert result.token_ids == [stock(prompt) for prompt in prompts()]
        assert {g.finish_reason for g in result} == {"stop", "length"}
        longer = GenerationConfig(max_new_tokens=7)
        found = generator.generate(prompts(), longer).token_ids
        assert found == [stock(prompt, generation_config=longer) for prompt in prompts()]
    finally:
        config.max_new_tokens, config.eos_token_id = None, before["eos_token_id"]
    assert config.to_dict() == before


def test_without_a_length_twenty_tokens_and_one_warning(generator: BatchGenerator) -> None:
    with pytest.warns(UserWarning, match="20 new tokens") as caught:
        result = generator.generate(prompts(), eos_token_id=None)
    assert {len(generation.token_ids) for generation in result} == {20}
    assert len([warning for warning in caught if "max_new_tokens" in str(warning.message)]) == 1


def test_finish_reasons_and_the_eos_in_the_tokens(generator: BatchGenerator) -> None:
    eos = list(range(30))
    for generation in generator.generate(prompts(), max_new_tokens=12, eos_token_id=eos):
        stopped = [token in eos for token in generation.token_ids]
        assert not any(stopped[:-1])
        assert generation.finish_reason == ("stop" if stopped[-1] else "length")
        assert stopped[-1] or len(generation.token_ids) == 12


# -- text ------------------------------------------------------------------------------------------------------


def test_strings_and_ids_mix_and_text_is_decoded(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "w5 w6 w7 w8"
    given = [text, [5, 6, 7, 8], torch.tensor([5, 6])]
    result = BatchGenerator(build(FAMILY), tokenizer).generate(given, max_new_tokens=4)
    assert result[0].prompt_token_ids == [5, 6, 7, 8] == result[1].prompt_token_ids
    assert result[0].token_ids == result[1].token_ids
    for generation in result:
        assert generation.text == tokenizer.decode(generation.token_ids, skip_special_tokens=True)
    (single,) = BatchGenerator(build(FAMILY), tokenizer).generate(text, max_new_tokens=4)
    assert single.token_ids == result[0].token_ids


def test_the_tokenizer_saved_beside_the_model_is_found(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(build(FAMILY).config, "_name_or_path", str(tmp_path))
    generator = BatchGenerator(build(FAMILY))
    ids_only = generator.generate([[5, 6, 7]], max_new_tokens=3)
    assert ids_only[0].text == tokenizer.decode(ids_only[0].token_ids, skip_special_tokens=True)
    assert generator.generate("w5 w6 w7", max_new_tokens=3).token_ids == ids_only.token_ids


def test_without_a_tokenizer_there_is_no_text_and_strings_are_refused() -> None:
    generator = BatchGenerator(build(FAMILY))
    assert generator.generate([[5, 6]], max_new_tokens=2)[0].text is None
    with pytest.raises(ValueError, match=r"pass BatchGenerator\(model, tokenizer\)"):
        generator.generate("hello", max_new_tokens=2)


# -- errors ----------------------------------------------------------------------------------------------------


def test_a_config_and_fields_on_top_of_it() -> None:
    generator = BatchGenerator(build(FAMILY), config=BatchConfig(page_size=16, kv_memory="1MiB"), page_size=4)
    assert (generator.config.page_size, generator.config.kv_memory) == (4, "1MiB")
    assert BatchConfig(kv_memory="1.5 KiB").kv_bytes(10) == 1536
    assert BatchConfig(kv_memory=0.25).kv_bytes(1000) == 250


def test_all_prompts_are_checked_before_any_work(generator: BatchGenerator) -> None:
    bad: list[Any] = [[5, 6], [], [7, 200], [1.5, 2], None, [8]]
    with pytest.raises(PromptError) as caught:
        generator.generate(bad, max_new_tokens=3)
    assert set(caught.value.problems) == {1, 2, 3, 4}
    assert "vocabulary of 101" in caught.value.problems[2]
    recorded = generator.generate(bad, max_new_tokens=3, on_error="record")
    assert [g.finish_reason for g in recorded] == ["length", "error", "error", "error", "error", "length"]
    assert recorded[2].error == caught.value.problems[2]
    assert recorded[5].token_ids == stock([8], max_new_tokens=3)
    assert [g.index for g in recorded] == list(range(6))
    assert len(generator.generate([], max_new_tokens=3)) == 0
    with pytest.raises(TypeError, match="prompts is None; pass a list"):
        generator.generate(max_new_tokens=3)


def test_a_prompt_beyond_the_learned_positions_is_named() -> None:
    generator = BatchGenerator(build("gpt2"))
    limit = generator.architecture.max_positions or 0
    with pytest.raises(PromptError, match="learned"):
        generator.generate([[5] * (limit - 2)], max_new_tokens=4)
    assert len(generator.generate([[5] * (limit - 3)], max_new_tokens=4)[0].token_ids) == 4


def test_a_cache_too_small_for_a_prompt_names_it() -> None:
    generator = BatchGenerator(build(FAMILY), kv_memory=1 << 14, page_size=4)
    given = [[5] * ((1 << 14) // generator._kv.page_bytes * 4), [6, 7]]
    with pytest.raises(PromptError, match="`kv_memory`") as caught:
        generator.generate(given, max_new_tokens=8)
    assert list(caught.value.problems) == [0]
    recorded = generator.generate(given, max_new_tokens=8, on_error="record")
    assert recorded[0].finish_reason == "error"
    assert recorded[1].token_ids == stock([6, 7], max_new_tokens=8)


def test_a_prompt_that_fits_only_without_its_prefixes_is_run_and_named() -> None:
    page = BatchGenerator(build(FAMILY), page_size=16)._kv.page_bytes
    given = [[5] * 17 + [7], [5] * 17 + [8]]  # 17 shared + 1 + 14 new: three pages with the prefix apart, two without
    generator = BatchGenerator(build(FAMILY), page_size=16, min_shared_tokens=1, kv_memory=2 * page)
    with pytest.warns(UserWarning, match="2 sequences share prefixes but fit"):
        result = generator.generate(given, max_new_tokens=14)
    assert result.token_ids == [stock(prompt, max_new_tokens=14) for prompt in given]
    assert result.report.saving == 0


def test_a_model_that_cannot_be_right_is_refused() -> None:
    with torch.device("meta"):
        hollow = type(build(FAMILY))(build(FAMILY).config)
    refused: list[tuple[Any, str]] = [
        (torch.nn.Linear(2, 2), "Linear"),
        ("some/model", "from_pretrained"),
        (hollow, "not in memory"),
        (build(FAMILY).model, "language-model head"),
    ]
    for model, says in refused:
        with pytest.raises(UnsupportedModelError, match=says):
            BatchGenerator(model)


def test_notes_in_a_generation_config_and_empty_lists_ask_for_nothing(generator: BatchGenerator) -> None:
    config = GenerationConfig(max_new_tokens=3, suppress_tokens=[], chat_format="own", user_token_id=7)
    assert generator.generate([[5, 6]], config)[0].token_ids == stock([5, 6], max_new_tokens=3)


# -- reports ---------------------------------------------------------------------------------------------------


def test_a_result_shows_itself(generator: BatchGenerator) -> None:
    lines = repr(generator.generate([[5, 6], [], [7], [8], [9]], max_new_tokens=30, on_error="record")).splitlines()
    assert lines[0] == "BatchResult of 5 generations"
    assert "error: is empty" in lines[2]
    assert lines[-1] == "  ... and 2 more"
    assert max(map(len, lines)) <= 80


def test_the_report_says_how_it_went(generator: BatchGenerator) -> None:
    report = generator.generate(prompts("prefix", 6), max_new_tokens=5).report
    assert report.new_tokens == 30
    assert 0 < report.saving < 1
    assert report.tokens_per_second > 0
    assert 0 < report.peak_memory <= report.kv_memory
    text = str(report)
    assert "30 new tokens" in text
    assert f"{report.saving:.1%} saved" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_under_autocast(family: str) -> None:
    """There queries, keys and values come in different dtypes, and ``generate`` runs all the same."""
    model, given = build(family), [[5, 6, 7], [8, 9]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = BatchGenerator(model).generate(given, max_new_tokens=2).token_ids
        assert found == [reference_generate(model, prompt, max_new_tokens=2) for prompt in given]


def test_steps_in_and_out_of_inference_mode() -> None:
    generator = BatchGenerator(build("llama"), max_batch_tokens=4)  # not all of them end in the same step
    given = [[index + 1] * (index + 2) for index in range(9)]
    expected = generator.generate(given, max_new_tokens=6).token_ids
    stream = generator.stream(given, max_new_tokens=6)
    with torch.inference_mode():
        got = [next(stream)]
    got += list(stream)
    assert [one.token_ids for one in sorted(got, key=lambda one: one.index)] == expected


def test_a_minimum_under_another_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        result = BatchGenerator(build("llama")).generate([[1, 2]], max_new_tokens=4, min_new_tokens=4, eos_token_id=[5])
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(result[0].token_ids) == 4 and 5 not in result[0].token_ids[:3]
