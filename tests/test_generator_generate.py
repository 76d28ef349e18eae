"""What ``generate`` promises beyond greedy parity: options, text, and errors before any work."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support_families import build
from support_llama_calls import FAMILY, prompts
from support_llama_calls import generator as generator  # a fixture
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hf_batchllm import (
    BatchConfig,
    BatchGenerator,
    ConfigError,
    PromptError,
    UnsupportedModelError,
    UnsupportedOptionError,
)


def stock(prompt: list[int], **options: Any) -> list[int]:
    """The new tokens of ``model.generate`` for one prompt."""
    ids = torch.tensor([prompt])
    model: Any = build(FAMILY)
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about lengths that cannot be had; ours is held against what comes out
        return model.generate(ids, **options)[0, len(prompt) :].tolist()


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
    given = prompts()
    result = generator.generate(given, **options)
    for prompt, generation in zip(given, result, strict=True):
        assert generation.token_ids == stock(prompt, **{"use_cache": True, **options})


def test_defaults_come_from_the_models_generation_config(generator: BatchGenerator) -> None:
    config = build(FAMILY).generation_config
    before = config.to_dict()
    config.max_new_tokens, config.eos_token_id = 5, list(range(15))
    try:
        result = generator.generate(prompts())
        assert [g.token_ids for g in result] == [stock(prompt) for prompt in prompts()]
        assert {g.finish_reason for g in result} == {"stop", "length"}
        longer = generator.generate(prompts(), GenerationConfig(max_new_tokens=7))
        assert [g.token_ids for g in longer] == [
            stock(prompt, generation_config=GenerationConfig(max_new_tokens=7)) for prompt in prompts()
        ]
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


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(97)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", eos_token="w2", pad_token="w0")


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


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"max_new_token": 5}, UnsupportedOptionError, "did you mean `max_new_tokens`"),
        ({"kv_memory": "1GiB"}, UnsupportedOptionError, "field of BatchConfig"),
        ({"temprature": 0.5}, UnsupportedOptionError, "did you mean `temperature`"),
        ({"num_beams": 4, "logprobs": 2}, UnsupportedOptionError, "`logprobs` .* `num_beams`"),
        ({"token_healing": True}, UnsupportedOptionError, r"`token_healing` .* model\.heal_tokens"),
        ({"dola_layers": "high"}, UnsupportedOptionError, "`dola_layers` .* call the model's own `generate`"),
        ({"no_repeat_ngram_size": 2.5}, ValueError, "`no_repeat_ngram_size` must be a whole number"),
        ({"stop_strings": ["x", ""]}, ValueError, "`stop_strings`"),
        ({"max_time": "1s"}, ValueError, "`max_time` must be a number"),
        ({"output_scores": True}, UnsupportedOptionError, "`output_scores` goes with tensors .* pass `logprobs=k`"),
        ({"output_attentions": True}, UnsupportedOptionError, "`output_attentions`"),
        ({"guidance_scale": "1.5"}, ValueError, "`guidance_scale` must be a number"),
        ({"do_sample": True, "typical_p": 0.0}, ValueError, "`typical_p`"),
        ({"assistant_ensemble_weight": 0.5}, UnsupportedOptionError, "`assistant_ensemble_weight`"),
        ({"logits_processor": lambda ids, scores: scores}, ValueError, "`logits_processor` .* put it into a list"),
        ({"stopping_criteria": lambda ids, scores: True}, ValueError, "`stopping_criteria` .* put it into a list"),
        ({"streamer": object()}, ValueError, "`streamer` must have"),
        ({"custom_generate": "some/repository"}, UnsupportedOptionError, "`custom_generate`"),
        ({"inputs_embeds": torch.zeros(1, 2, 4)}, UnsupportedOptionError, "`inputs_embeds`"),
        ({"num_return_sequences": 2}, ValueError, "num_return_sequences"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"max_length": 3}, PromptError, "`max_length`"),
        ({"generation_config": {"max_new_tokens": 3}}, UnsupportedOptionError, "GenerationConfig"),
        ({"do_sample": True, "num_return_sequences": 1.5}, ValueError, "`num_return_sequences` must be a whole number"),
        ({"max_new_tokens": 4.5}, ValueError, "`max_new_tokens` must be a whole number"),
        ({"do_sample": True, "temperature": 0.0}, ValueError, "temperature"),
        ({"do_sample": True, "top_k": -1}, ValueError, "top_k"),
        ({"do_sample": True, "min_p": 2.0}, ValueError, "min_p"),
        ({"repetition_penalty": -1.0}, ValueError, "penalty"),
        ({"seed": -1}, ValueError, "`seed`"),
        ({"seed": 2**64}, ValueError, "`seed`"),
        ({"on_error": "ignore"}, ValueError, "`on_error`"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(
    generator: BatchGenerator, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        generator.generate([[5, 6, 7, 8]], **({"max_new_tokens": 4} if "max_length" not in options else {}) | options)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"page_sise": 16}, "did you mean `page_size`"),
        ({"page_size": 0}, "`page_size` must be a whole number of at least 1"),
        ({"page_size": 2.5}, "`page_size`"),
        ({"max_batch_tokens": -1}, "`max_batch_tokens`"),
        ({"kv_memory": "20 giraffes"}, "`kv_memory` must be a size such as"),
        ({"kv_memory": 1.5}, "fraction"),
        ({"kv_memory": 0}, "more than 0"),
        ({"share_prefixes": 1}, "True or False"),
        ({"scheduler": "group"}, 'did you mean "groups"'),
        ({"scheduler": 3}, "start"),
        ({"backend": "cuda"}, "`backend`"),
        ({"backend": "triton"}, "CUDA GPU, and the model is on cpu"),
        ({"keep_prefixes": -2}, "`keep_prefixes`"),
        ({"config": {"page_size": 4}}, "must be a BatchConfig"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_configs_say_what_is_wrong(fields: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=says):
        BatchGenerator(build(FAMILY), **fields)


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
    limit = generator.architecture.max_positions
    assert limit is not None
    with pytest.raises(PromptError, match="learned"):
        generator.generate([[5] * (limit - 2)], max_new_tokens=4)
    assert len(generator.generate([[5] * (limit - 3)], max_new_tokens=4)[0].token_ids) == 4


def test_a_cache_too_small_for_a_prompt_names_it() -> None:
    generator = BatchGenerator(build(FAMILY), kv_memory=1 << 14, page_size=4)
    pages = (1 << 14) // generator._kv.page_bytes
    longest = pages * 4
    with pytest.raises(PromptError, match="`kv_memory`") as caught:
        generator.generate([[5] * longest, [6, 7]], max_new_tokens=8)
    assert list(caught.value.problems) == [0]
    recorded = generator.generate([[5] * longest, [6, 7]], max_new_tokens=8, on_error="record")
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
    with pytest.raises(UnsupportedModelError, match="Linear"):
        BatchGenerator(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="from_pretrained"):
        BatchGenerator("some/model")  # type: ignore[arg-type]
    with torch.device("meta"):
        hollow = type(build(FAMILY))(build(FAMILY).config)
    with pytest.raises(UnsupportedModelError, match="not in memory"):
        BatchGenerator(hollow)
    headless: Any = build(FAMILY).model
    with pytest.raises(UnsupportedModelError, match="language-model head"):
        BatchGenerator(headless)


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
        result = BatchGenerator(model).generate(given, max_new_tokens=2)
        for prompt, generation in zip(given, result, strict=True):
            alone = model.generate(torch.tensor([prompt]), max_new_tokens=2, do_sample=False, pad_token_id=0)
            assert generation.token_ids == alone[0, len(prompt) :].tolist()


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
