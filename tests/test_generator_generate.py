"""What ``generate`` promises beyond greedy parity: options, text, and errors before any work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support_accelerated import tokenizer as tokenizer  # a fixture
from support_families import build, reference_generate
from support_llama_calls import FAMILY, prompts
from support_llama_calls import generator as generator  # a fixture
from support_step_tensors import batch
from support_stopping import TOKENIZER
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerFast

from hf_batchllm import BatchConfig, BatchGenerator, ConfigError, PromptError, UnsupportedOptionError
from hf_batchllm.errors import OptionValueError, TokenizerError


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


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert BatchGenerator(build(FAMILY)).generate([[5, 6]], max_new_tokens=2)[0].text is None


# -- errors ----------------------------------------------------------------------------------------------------
# What is wrong whatever the prompts are stands in test_inputs_odd_options.py and test_inputs_option_table.py.

IDS, MASK = batch(width=26)


class Odd(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> None:
    scores -= 1


Row = tuple[dict[str, Any], type[Exception], str]
OPTIONS: list[Row] = [
    ({"stop_strings": ["x", ""]}, ValueError, "`stop_strings`"),
    ({"do_sample": True, "typical_p": 0.0}, ValueError, "`typical_p`"),
    ({"do_sample": True, "num_return_sequences": 1.5}, ValueError, "`num_return_sequences` must be a whole number"),
    ({"do_sample": True, "min_p": 2.0}, ValueError, "min_p"),
    ({"seed": 2**64}, ValueError, "`seed`"),
    ({"stop_strings": "a"}, TokenizerError, "`stop_strings` need a tokenizer.*or pass `tokenizer=` here"),
    ({"stop_strings": [], "tokenizer": TOKENIZER}, OptionValueError, "`stop_strings` is .* it names no string"),
    ({"stop_strings": "xyz", "tokenizer": TOKENIZER}, OptionValueError, "cannot be looked for in tokens of this token"),
    (
        {"prompts": [[5, 6]] * 5, "guidance_scale": 2.0, "negative_prompt_ids": torch.full((4, 6), 7)},
        *(OptionValueError, "`negative_prompt_ids` has 4 rows and there are 5 prompts"),
    ),
]
TENSORS: list[Row] = [
    ({"prompts": IDS, "input_ids": IDS}, ValueError, "`prompts` and `input_ids` were passed together"),
    ({"prompts": [[5, 6]], "input_ids": IDS}, ValueError, "`prompts` and `input_ids` were passed together"),
    ({"inputs": IDS, "input_ids": IDS}, ValueError, "`input_ids` and `inputs` were passed together"),
    ({"attention_mask": MASK}, ValueError, "`attention_mask` was passed without `input_ids`"),
    ({"prompts": [[5, 6], [7]], "attention_mask": MASK}, ValueError, "the prompts are a list: leave out"),
    ({"prompts": "w5", "attention_mask": MASK}, ValueError, "the prompts are a list: leave out"),
    ({"input_ids": IDS[0]}, ValueError, r"not shape \[26\]: for a batch of one row pass input_ids\[None\]"),
    ({"prompts": IDS[None]}, ValueError, r"`prompts` must have two dimensions.*not shape \[1, 6, 26\]"),
    ({"input_ids": IDS[:0]}, ValueError, r"`input_ids` is empty: its shape is \[0, 26\]"),
    ({"input_ids": IDS[:, :0]}, ValueError, r"`input_ids` is empty: its shape is \[6, 0\]"),
    ({"input_ids": IDS.tolist()}, TypeError, r"not list: pass lists and strings as prompts"),
    ({"input_ids": "some text"}, TypeError, r"not str: pass lists and strings as prompts"),
    ({"input_ids": {1, 2}}, TypeError, r"must be a 2-D tensor of token ids, not set"),
    ({"input_ids": IDS.float()}, TypeError, r"`input_ids` holds torch.float32; token ids are integers"),
    ({"input_ids": IDS.bool()}, TypeError, r"`input_ids` holds torch.bool; token ids are integers"),
    ({"input_ids": IDS.double().numpy()}, TypeError, r"`input_ids` holds float64; token ids are integers"),
    ({"prompts": np.array([["a", "b"]])}, TypeError, r"`prompts` holds <U1; token ids are integers"),
    ({"input_ids": IDS.to("meta")}, ValueError, "`input_ids` is on the meta device"),
    ({"input_ids": IDS, "attention_mask": MASK.to("meta")}, ValueError, "`attention_mask` is on the meta device"),
    ({"input_ids": IDS, "attention_mask": MASK[:, 1:]}, ValueError, r"shape \[6, 25\] and `input_ids` \[6, 26\]"),
    ({"input_ids": IDS, "attention_mask": MASK[0]}, ValueError, r"has shape \[26\] and"),
    ({"input_ids": IDS, "attention_mask": MASK[:1]}, ValueError, r"has shape \[1, 26\] and"),
    ({"input_ids": IDS, "attention_mask": MASK[:, None, None]}, ValueError, r"shape \[6, 1, 1, 26\] and"),
    ({"input_ids": IDS, "attention_mask": MASK.tolist()}, TypeError, "`attention_mask` must be a 2-D tensor"),
    ({"input_ids": IDS, "attention_mask": MASK * 2}, ValueError, "holds 2: 1 marks a token and 0 padding"),
    ({"input_ids": IDS, "attention_mask": MASK.float() - 1}, ValueError, "holds -1.0: 1 marks a token"),
    ({"input_ids": IDS, "attention_mask": MASK, "max_length": 26}, ValueError, "26 tokens wide, padding included"),
    ({"input_ids": IDS, "max_new_tokens": 0}, ValueError, "max_new_tokens"),
    ({"input_ids": IDS, "num_return_sequences": 2}, ValueError, "num_return_sequences"),
    ({"input_ids": IDS, "on_error": "record"}, ValueError, "a tensor has no place for an error"),
    ({"input_ids": IDS, "atention_mask": MASK}, UnsupportedOptionError, "did you mean `attention_mask`"),
    ({"prompts": [[5, 6]], "token_type_ids": [[0, 0]]}, UnsupportedOptionError, "`token_type_ids`"),
    ({"input_ids": IDS, "max_time": 3}, OptionValueError, "`pad_token_id` is None, and rows may end at different"),
    ({"input_ids": IDS, "stop_strings": "a", "tokenizer": TOKENIZER}, OptionValueError, "`pad_token_id` is None, and"),
]
PROCESSORS: list[Row] = [
    ({"logits_processor": given}, OptionValueError, f"`logits_processor` .*{says}")
    for given, says in (
        (lambda index, ids: Odd(), "must give a list of processors, not an Odd"),
        (lambda index, ids: ["x"], "gave a list that holds a string at place 0, which is not a processor"),
        ([nothing], r"nothing gave None: it must return scores of shape \[1, 101\]"),
        ([lambda ids, scores: scores[:, :50]], r"gave scores of shape \[1, 50\]: it must return .* \[1, 101\]"),
    )
]
PROCESSORS += [
    (
        {"do_sample": True, "logits_processor": [lambda ids, scores: torch.full_like(scores, -torch.inf)]},
        *(RuntimeError, "processors left no token a chance"),
    ),
    (
        {"prompts": [[5, 6], [5]], "prefix_allowed_tokens_fn": lambda row, ids: [] if row else [1]},
        *(ValueError, r"`prefix_allowed_tokens_fn` gave no token for batch_id 1 \(after 1 tokens\)"),
    ),
]
TOPICS = {"option": OPTIONS, "tensors": TENSORS, "processors": PROCESSORS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [pytest.param(*row, id=f"{topic}: {' '.join(row[0])}") for topic, rows in TOPICS.items() for row in rows],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    generator: BatchGenerator, given: dict[str, Any], kind: type[Exception], says: str
) -> None:
    prompts = {} if given.keys() & {"prompts", "inputs", "input_ids", "attention_mask"} else {"prompts": [[5, 6, 7, 8]]}
    length = {} if "max_length" in given else {"max_new_tokens": 4}
    with pytest.raises(kind, match=says):
        generator.generate(**prompts | length | given)


def test_kernels_that_need_a_gpu_are_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="CUDA GPU, and the model is on cpu"):
        BatchGenerator(build(FAMILY), backend="triton")


def test_a_config_and_fields_on_top_of_it() -> None:
    generator = BatchGenerator(build(FAMILY), config=BatchConfig(page_size=16, kv_memory="1MiB"), page_size=4)
    assert (generator.config.page_size, generator.config.kv_memory) == (4, "1MiB")
    assert BatchConfig(kv_memory="1.5 KiB").kv_bytes(10) == 1536
    assert BatchConfig(kv_memory=0.25).kv_bytes(1000) == 250


def test_a_cache_too_small_for_a_prompt_names_it() -> None:
    generator = BatchGenerator(build(FAMILY), kv_memory=1 << 14, page_size=4)
    given = [[5] * ((1 << 14) // generator._resources.kv.page_bytes * 4), [6, 7]]
    with pytest.raises(PromptError, match="`kv_memory`") as caught:
        generator.generate(given, max_new_tokens=8)
    assert list(caught.value.problems) == [0]
    recorded = generator.generate(given, max_new_tokens=8, on_error="record")
    assert recorded[0].finish_reason == "error"
    assert recorded[1].token_ids == stock([6, 7], max_new_tokens=8)


def test_a_prompt_that_fits_only_without_its_prefixes_is_run_and_named() -> None:
    page = BatchGenerator(build(FAMILY), page_size=16)._resources.kv.page_bytes
    given = [[5] * 17 + [7], [5] * 17 + [8]]  # 17 shared + 1 + 14 new: three pages with the prefix apart, two without
    generator = BatchGenerator(build(FAMILY), page_size=16, min_shared_tokens=1, kv_memory=2 * page)
    with pytest.warns(UserWarning, match="2 sequences share prefixes but fit"):
        result = generator.generate(given, max_new_tokens=14)
    assert result.token_ids == [stock(prompt, max_new_tokens=14) for prompt in given]
    assert result.report.saving == 0


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
