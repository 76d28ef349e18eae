"""What odd and wrong options, settings, models and tokenizers get: an error that says what to do, if not a result."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from support_families import FAMILIES, REFUSED, build
from support_untouched import never_runs as never_runs  # a fixture
from support_word_tokenizer import word_tokenizer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MaxTimeCriteria,
    TemperatureLogitsWarper,
    TextGenerationPipeline,
    TextStreamer,
)

from hf_batchllm import (
    BatchConfig,
    BatchGenerator,
    ConfigError,
    GenerationInterrupted,
    PromptError,
    PromptsTypeError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_batchllm.errors import OptionValueError
from hf_batchllm.planning.scheduler import FifoScheduler

FAMILY = "llama"
IDS = [5, 6, 7]
WORDS = word_tokenizer()
SAMPLED = {"do_sample": True}


def make(model: Any = None, **fields: Any) -> BatchGenerator:
    return BatchGenerator(build(FAMILY) if model is None else model, **fields)


# -- options of a call -----------------------------------------------------------------------------------------

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_gen_toks": 5}, "`max_gen_toks` is called `max_new_tokens` here"),
    ({"max_tokens": 5, "max_new_tokens": 6}, "`max_tokens` contradicts `max_new_tokens`: keep one of them"),
    ({"max_new_tokens": 6, "n": 0}, "`num_return_sequences` must be at least 1"),
    ({"max_new_token": 5}, "`max_new_token` is not an option of generate; did you mean `max_new_tokens`?"),
    ({"temprature": 0.5}, "did you mean `temperature`?"),
    ({"min_gen_tokens": 5}, "did you mean `min_new_tokens`?"),
    ({"best_of": 4}, "ask for `n` answers with `logprobs=0`"),
    ({"stop_sequences": ["."]}, "`stop_sequences` is called `stop_strings` here"),
    ({"stop_token_ids": 2}, "`stop_token_ids` must be a list of token ids, not 2"),
    ({"ignore_eos": "yes"}, "`ignore_eos` must be True or False, not 'yes'"),
    ({"ignore_eos": True, "eos_token_id": 5}, "`ignore_eos` contradicts `eos_token_id`"),
    ({"use_beam_search": True}, "`use_beam_search` is called `num_beams` here"),
    ({"return_logprob": True}, "`return_logprob` is not an option of generate"),
    ({"structural_tag": "x"}, "`structural_tag` is not an option of generate"),
    ({"bad_words_ids": ["foo"]}, "`bad_words_ids` must be a list of lists of token ids, such as [[5], [7, 8]]"),
    (
        {"sequence_bias": {3: 1.0}},
        "`sequence_bias` must be a map of tuples of token ids to numbers, such as {(5,): -1.0}",
    ),
    ({"generation_config": "vllm"}, "for the model's own defaults leave it out"),
    ({"use_tqdm": False}, "`use_tqdm` is called `progress` here"),
    ({"sampling_params": object()}, "pass each option as a keyword argument"),
    ({"presence_penalty": 0.1}, "see `repetition_penalty`"),
    ({"repeat_penalty": 1.1}, "is called `repetition_penalty` here"),
    ({"batch_size": 8}, "the batch is as large as memory allows"),
    ({"prompt": "w5"}, "did you mean `prompts`?"),
    ({"return_full_text": True}, "each result holds `text`, `token_ids` and `prompt_token_ids`"),
    ({"skip_special_tokens": False}, "each result holds `text`, `token_ids` and `prompt_token_ids`"),
    ({"padding": True}, "`padding` is not an option of generate"),
    ({"tools": {}}, "`tools` must be a list of tools, not a dict"),
    ({"enable_thinking": False}, "goes into `chat_template_kwargs`: chat_template_kwargs={'enable"),
    ({"chat_template_kwarg": {}}, "did you mean `chat_template_kwargs`"),
    ({"truncate_prompt_tokens": 5}, "is called `max_prompt_tokens` here"),
    ({"max_model_len": 5}, "is called `max_prompt_tokens` here"),
    ({"add_generation_prompt": False}, "see `continue_final_message`"),
    ({"lora_request": object()}, "`lora_request` is called `adapter` here"),
    ({"guided_decoding": object()}, "pass `schema` (True for any JSON object), `regex`, `grammar` or `choice`"),
    ({"guided_json": {}}, "is called `schema` here"),
    ({"logits_processors": []}, "did you mean `logits_processor`?"),
    ({"logit_bias": {5: 1.0}}, "`logit_bias` is called `sequence_bias` here"),
    ({"bad_words": ["w5"]}, "`bad_words` is called `bad_words_ids` here"),
    ({"allowed_token_ids": [5]}, "pass a `prefix_allowed_tokens_fn` that returns them"),
    ({"top_logprobs": 5}, "`top_logprobs` needs `logprobs`"),
    ({"output_router_logits": True}, "is an input of LlamaForCausalLM that is not supported"),
    ({"streamers": object()}, "did you mean `streamer`?"),
    ({"on_errors": "record"}, "did you mean `on_error`?"),
    ({"labels": torch.ones(1)}, "is an input of LlamaForCausalLM that is not supported"),
    ({"kv_memory": "1GiB"}, "is a field of BatchConfig: BatchGenerator(model, kv_memory=...)"),
    ({"num_beams": 4, "logprobs": 1}, "`logprobs` does not go with `num_beams`"),
    ({"num_beams": 0}, "`num_beams` must be at least 1, but is 0"),
    ({"num_beams": 2, "early_stopping": "often"}, "`early_stopping` must be True, False or \"never\", not 'often'"),
    ({"num_beams": 2, "num_return_sequences": 3}, "`num_return_sequences` is 3, and there are 2 beams"),
    ({"num_beams": 2, "length_penalty": None}, "`length_penalty` is None, and a beam search needs a number"),
    ({"generation_config": {"max_new_tokens": 3}}, "not a dict: pass its items as keyword arguments"),
    ({"generation_config": 20}, "not an int: if it is a length, pass `max_new_tokens=20`"),
    ({"generation_config": "w5"}, "leave it out; if it is a prompt, put all prompts into one list"),
    ({"generation_config": BatchConfig()}, "not a BatchConfig: it goes into BatchGenerator(model, config=...)"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1, but is 0"),
    ({"max_new_tokens": -1}, "must be at least 1, but is -1"),
    ({"max_new_tokens": 1.5}, "`max_new_tokens` must be a whole number, not 1.5"),
    ({"max_new_tokens": "20"}, "`max_new_tokens` must be a whole number, not '20'"),
    ({"max_new_tokens": True}, "`max_new_tokens` must be a whole number, not True"),
    ({"max_length": "20"}, "`max_length` must be a whole number, not '20'"),
    ({"do_sample": "yes"}, "`do_sample` must be True or False, not 'yes'"),
    ({**SAMPLED, "temperature": 0}, "`temperature` is 0, and sampling needs a temperature above 0"),
    ({**SAMPLED, "temperature": 0.0}, "for greedy decoding set `do_sample=False`"),
    ({**SAMPLED, "temperature": "0.9"}, "`temperature` must be a number, not '0.9'"),
    ({**SAMPLED, "temperature": math.nan}, "`temperature` must be a number, not nan"),
    ({**SAMPLED, "top_p": "0.9"}, "`top_p` must be a number"),
    ({**SAMPLED, "top_k": -1}, "`top_k` must be at least 0 (0 for none), but is -1"),
    ({**SAMPLED, "num_return_sequences": 0}, "`num_return_sequences` must be at least 1, but is 0"),
    ({"num_return_sequences": 3}, "`num_return_sequences` is 3, and greedy decoding gives one sequence"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be a float above 0, such as 1.2, not 0"),
    ({"eos_token_id": "</s>"}, "must be a token id, or a list of them, not '</s>': tokenizer.convert_tokens_to_ids"),
    ({"eos_token_id": []}, "for no EOS at all pass None"),
    ({"eos_token_id": [[2]]}, "must be a token id, or a list of them, not [[2]]"),
    ({"eos_token_id": 1.5}, "must be a token id, or a list of them, not 1.5"),
    ({"pad_token_id": "w0"}, "`pad_token_id` must be a token id, not 'w0'"),
    ({"seed": -1}, "`seed` must be a whole number from 0 to 2**64 - 1, not -1"),
    ({"seed": 1.0}, "`seed` must be a whole number from 0 to 2**64 - 1, not 1.0"),
    ({"seed": True}, "`seed` must be a whole number"),
    ({"seed": "42"}, "`seed` must be a whole number"),
    ({"seed": torch.Generator()}, "`seed` must be a whole number"),
    ({"seed": [1, 2, 3, 4, 5, 6, 7]}, "`seed` is a list of 7 and there "),
    ({"seed": []}, "`seed` is a list of 0 and there "),
    ({"on_error": "ignore"}, '`on_error` must be "raise" or "record", not \'ignore\''),
    ({"on_error": None}, '`on_error` must be "raise" or "record", not None'),
    ({"progress": "yes"}, "`progress` must be True, False, or None for long lists only, not a string"),
]


class Halting:
    def put(self, value: Any) -> None: ...


def add(x: int) -> int:
    return x


WARPER = TemperatureLogitsWarper(2.0)
TENSOR = torch.tensor([IDS, [8, 9, 10]])
GUIDED = {"guidance_scale": 2.0}
# Wrong for every model.
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"stop_strings": 5}, "`stop_strings` must be a string, or a list of strings, not 5"),
    ({"stop_strings": ["a", 5]}, "must be a string, or a list of strings, not ['a', 5]"),
    ({"stop_strings": ""}, "`stop_strings` is '', and an empty string ends nothing: leave it out"),
    ({"stop_strings": ["a", ""]}, "an empty string ends nothing"),
    ({"max_time": "1"}, "`max_time` must be a number, not '1'"),
    ({"max_time": True}, "`max_time` must be a number, not True"),
    ({"logprobs": -1}, "must be a whole number of at least 0: how many of the most likely tokens come besides"),
    ({"logprobs": "yes"}, "besides the token itself, not 'yes'"),
    ({"logprobs": 1.0}, "not 1.0"),
    ({"prompt_logprobs": "5"}, "`prompt_logprobs` must be a whole number of at least 0"),
    ({"logits_processor": WARPER}, "is a single processor (TemperatureLogitsWarper): put it into a list"),
    ({"logits_processor": TemperatureLogitsWarper}, "is the class TemperatureLogitsWarper: make an object of it"),
    ({"logits_processor": lambda input_ids, scores: scores}, "is a single processor (<lambda>): put it into a list"),
    ({"logits_processor": [TemperatureLogitsWarper]}, "holds the class TemperatureLogitsWarper at place 0: make an"),
    ({"logits_processor": [WARPER, 5]}, "`logits_processor` holds an int at place 1, which is not a processor"),
    ({"logits_processor": "grammar"}, "must be a list of processors, or a function that gives a list for each"),
    ({"stopping_criteria": MaxTimeCriteria(1.0)}, "is a single criterion (MaxTimeCriteria): put it into"),
    ({"stopping_criteria": lambda ids, scores, **_: True}, "is a single criterion (<lambda>): put it into a list"),
    ({"stopping_criteria": 5}, "must be a list of criteria, or a function that gives a list for each"),
    ({"stopping_criteria": [None]}, "`stopping_criteria` holds None at place 0, which is not a criterion"),
    ({"prefix_allowed_tokens_fn": [5]}, "must be a function of the prompt's index and its tokens so far"),
    ({"streamer": object()}, "`streamer` must have put() and end(), and is an object: pass a TextStreamer"),
    ({"streamer": Halting()}, "`streamer` must have put() and end(), and is a Halting"),
    ({"streamer": TextStreamer}, "is the class TextStreamer: pass an object of it"),
    ({"negative_prompt_ids": [[5]], **GUIDED}, "must be a 2-D tensor, a row for each prompt, not a list"),
    ({"negative_prompt_ids": TENSOR[0], **GUIDED}, "not a tensor of shape [3]"),
    ({"negative_prompt_attention_mask": TENSOR}, "masks `negative_prompt_ids`, which is missing"),
    (
        {"negative_prompt_ids": TENSOR, "negative_prompt_attention_mask": TENSOR[:1], **GUIDED},
        "has shape [1, 3] and `negative_prompt_ids` [2, 3]",
    ),
    ({"guidance_scale": "2"}, "`guidance_scale` must be a number"),
    ({"no_repeat_ngram_size": 2.5}, "`no_repeat_ngram_size` must be a whole number, not 2.5"),
    ({"encoder_repetition_penalty": 2}, "`encoder_repetition_penalty` must be a float above 0, such as 1.2, not 2"),
    ({"suppress_tokens": 5}, "`suppress_tokens` must be a list of token ids, not 5"),
    ({"begin_suppress_tokens": ["w5"]}, "`begin_suppress_tokens` must be a list of token ids, not ['w5']"),
    ({"forced_eos_token_id": "w5"}, "a token id, or a list of them, not 'w5': tokenizer.convert_tokens_to_ids"),
    ({"forced_bos_token_id": [5]}, "`forced_bos_token_id` must be a token id, not [5]"),
    ({"renormalize_logits": "yes"}, "`renormalize_logits` must be True or False, not 'yes'"),
    ({"exponential_decay_length_penalty": 1.5}, "must be a pair (new tokens before it begins"),
    ({"watermarking_config": "green"}, "must be a WatermarkingConfig or a SynthIDTextWatermarkingConfig"),
    ({"do_sample": True, "typical_p": True}, "`typical_p` must be a number, not True"),
    ({"max_prompt_tokens": 0}, "`max_prompt_tokens` must be at least 1, but is 0"),
    ({"max_prompt_tokens": "512"}, "must be a whole number, not '512'"),
    ({"max_prompt_tokens": [3, 4, 5]}, "is a list of 3 and there are 2 prompts: it must have one for each"),
    ({"max_prompt_tokens": 3, "truncation_side": "end"}, '`truncation_side` must be "left" (the beginning of a'),
    ({"tools": add}, "`tools` must be a list of tools, not a function: pass [tool]"),
    ({"tools": [3]}, "`tools` holds an int; a tool is a dict (its JSON schema), or a function with type hints"),
    ({"tools": [{"name": "add"}, None]}, "`tools` holds None; a tool is a dict (its JSON schema), or a function"),
    ({"tools": [add]}, "`tools` holds the function add, of which transformers makes no schema: "),
    ({"tools": [[], [], []]}, "`tools` is a list of 3 and there are 2 prompts: it must have one for each"),
    ({"chat_template_kwargs": "enable_thinking"}, ", such as {'enable_thinking': False}, not 'en"),
    ({"chat_template_kwargs": {"tokenize": False}}, "has `tokenize`, which is not for templates: leave it out"),
    ({"chat_template_kwargs": {"tools": []}}, "has `tools`, which is an option of its own: pass it beside this"),
    ({"chat_template_kwargs": {"max_length": 5}}, "has `max_length`, which is not for templates: pass `max_prompt"),
    ({"chat_template_kwargs": [{}] * 3}, "`chat_template_kwargs` is a list of 3 and there are 2 prompts"),
    ({"continue_final_message": "content"}, "must be True (continue a chat's last message) or False"),
]
RIGHT: list[dict[str, Any]] = [
    {"max_new_tokens": np.int64(2)},
    {"eos_token_id": None},
    {"eos_token_id": 10**6},
    {"eos_token_id": torch.tensor([2, 3])},
    {"eos_token_id": np.int64(2)},
    {"repetition_penalty": 1},
    {"do_sample": 1, "seed": np.uint64(3)},
    {"generation_config": GenerationConfig(), "progress": False},
]


def name_of(value: Any) -> str:
    return ", ".join(value) if isinstance(value, dict) else ""


@pytest.mark.usefixtures("never_runs")
@pytest.mark.parametrize(("options", "says"), [*OPTIONS, *VALUES], ids=name_of)
def test_an_option_that_cannot_be_honoured_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        make().generate([IDS, IDS], **{"max_new_tokens": 2, **options})
    assert says in str(caught.value)
    assert f"`{caught.value.option}`" in str(caught.value)
    wrong_for_all = "must be" in says or "`max_new_tokens`" in says[:17] or "sampl" in says or "greedy" in says
    assert isinstance(caught.value, OptionValueError) or not wrong_for_all or "generation_config" in options
    assert (isinstance(caught.value, OptionValueError) and caught.value.option in options) or (options, says) in OPTIONS


@pytest.mark.parametrize("options", RIGHT, ids=name_of)
def test_odd_options_that_are_right(options: dict[str, Any]) -> None:
    assert len(make().generate([IDS], **{"max_new_tokens": 2, **options})[0].token_ids) == 2


@pytest.mark.usefixtures("never_runs")
def test_lengths_that_cannot_be_had_are_said_before_any_work() -> None:
    with pytest.raises(PromptError, match="prompt 1 has 3 tokens already and `max_length` is 3: increase"):
        make().generate([[5], IDS], max_length=3)
    generator = make(build("gpt2"))
    limit = generator.architecture.max_positions
    with pytest.raises(PromptError, match=r"prompt 1 has \d+ tokens and may grow by 4, but GPT2LMHead"):
        generator.generate([IDS, [5] * (limit - 2)], max_new_tokens=4)


def test_what_python_itself_says() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'prompts'"):
        make().generate([IDS], prompts=[IDS])
    with pytest.raises(TypeError, match="positional"):
        make().generate([IDS], None, 20)  # type: ignore[misc]
    with pytest.raises(PromptsTypeError, match="prompts is None"):
        make().generate(max_new_tokens=1)


# -- settings --------------------------------------------------------------------------------------------------

CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"page_sise": 16}, "`page_sise` is not a field of BatchConfig; did you mean `page_size`?"),
    ({"quux": 1}, "is not a field of BatchConfig; the fields are page_size, max_batch_tokens"),
    ({"page_size": 0}, "`page_size` must be a whole number of at least 1, not 0"),
    ({"page_size": 64.0}, "`page_size` must be a whole number of at least 1, not 64.0"),
    ({"page_size": None}, "`page_size` must be a whole number of at least 1, not None"),
    ({"max_batch_tokens": "4k"}, "`max_batch_tokens` must be a whole number of at least 1 or None, not '4k'"),
    ({"min_shared_tokens": -1}, "`min_shared_tokens` must be a whole number of at least 0"),
    ({"steps_per_sync": 0}, "`steps_per_sync` must be a whole number of at least 1 or None"),
    ({"keep_prefixes": True}, "`keep_prefixes` must be a whole number of at least 0, not True"),
    ({"share_prefixes": "no"}, "`share_prefixes` must be True or False, not 'no'"),
    ({"cuda_graphs": 1}, "`cuda_graphs` must be True or False, not 1"),
    ({"fuse": None}, "`fuse` must be True or False, not None"),
    ({"kv_memory": "20 giraffes"}, '`kv_memory` must be a size such as "20GiB" or "500MB", not \'20 giraffes\''),
    ({"kv_memory": "90%"}, '`kv_memory` must be a size such as "20GiB"'),
    ({"kv_memory": 1.5}, "`kv_memory` as a float is a fraction of the free memory, from 0 to 1, not 1.5: for bytes"),
    ({"kv_memory": math.nan}, "is a fraction of the free memory"),
    ({"kv_memory": "90%"}, "for a part of the free memory pass 0.9"),
    ({"kv_memory": 90}, "`kv_memory` is 90 bytes: if it is a percentage of the free memory pass 0.9"),
    ({"max_model_len": 1024}, "`max_prompt_tokens` of generate() cuts long prompts"),
    ({"mem_fraction_static": 0.9}, "`mem_fraction_static` is called `kv_memory` here"),
    ({"tp": 2}, "`tp` is not an option here: GeneratorPool(name, gpus=8, tp=2) has each model on two GPUs"),
    ({"kv_cache_dtype": "fp8"}, "in its own dtype"),
    ({"quux": 1, "page_sise": 2, "max_num_seqs": 3}, "`quux` is not a field of BatchConfig\n`page_sise` is not"),
    (
        {"page_sise": 2, "quux": 1},
        "`page_size`?\n`quux` is not a field of BatchConfig; the fields are page",
    ),
    ({"kv_memory": 0}, "`kv_memory` must be more than 0, not 0"),
    ({"kv_memory": [1]}, "`kv_memory` must be bytes, a string such as"),
    ({"scheduler": "group"}, '`scheduler` must be "groups" or "fifo", not \'group\'; did you mean "groups"?'),
    ({"scheduler": FifoScheduler}, "`scheduler` is the class FifoScheduler: pass an object of it, FifoScheduler()"),
    ({"scheduler": 3}, "or an object with start(), next() and finish()"),
    ({"backend": "cuda"}, '`backend` must be "auto", "torch" or "triton", not \'cuda\''),
    ({"backend": None}, '`backend` must be "auto", "torch" or "triton", not None'),
    ({"gpu_memory_utilization": 0.9}, "is called `kv_memory` here"),
    ({"max_num_batched_tokens": 8192}, "is called `max_batch_tokens` here"),
    ({"enable_prefix_caching": True}, "is called `share_prefixes` here"),
    ({"batch_size": 8}, "the batch is as large as memory allows"),
    ({"device": "cuda"}, "Set it when you load the model"),
    ({"max_new_tokens": 8}, "`max_new_tokens` goes into generate(), with the prompts"),
    ({"seed": 8}, "`seed` goes into generate()"),
    ({"config": {"page_size": 4}}, "`config` must be a BatchConfig, not a dict: pass BatchConfig(**config)"),
    ({"config": GenerationConfig()}, "`config` must be a BatchConfig, not a GenerationConfig"),
]


@pytest.mark.parametrize(("fields", "says"), CONFIGS, ids=name_of)
def test_a_setting_that_cannot_be_used_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**fields)
    assert says in str(caught.value)
    if "config" not in fields:
        with pytest.raises(ConfigError) as of_the_class:
            BatchConfig(**fields)
        assert str(of_the_class.value) == str(caught.value)


def test_settings_may_be_numpys_and_fields_go_on_top_of_a_config() -> None:
    generator = make(
        config=BatchConfig(page_size=np.int64(16), kv_memory=np.int64(1 << 20)), max_batch_tokens=np.uint8(7)
    )
    assert (generator.config.page_size, generator.config.max_batch_tokens) == (16, 7)
    assert type(generator.config.page_size) is int
    assert len(generator.generate([IDS], max_new_tokens=2)) == 1


# -- models and tokenizers -------------------------------------------------------------------------------------


def hollow() -> Any:
    with torch.device("meta"):
        return type(build(FAMILY))(build(FAMILY).config)


def spread() -> Any:
    model = FAMILIES[FAMILY]()
    model.lm_head.to("meta")
    return model


MODELS: list[tuple[str, Any, str]] = [
    ("a name", lambda: "gpt2", "not a string: load it first, AutoModelForCausalLM.from_pretrained('gpt2')"),
    ("a path", lambda: Path("models/mine"), "load it first, AutoModelForCausalLM.from_pretrained('models/mine')"),
    ("a class", lambda: AutoModelForCausalLM, "not the class AutoModelForCausalLM: load a model first"),
    ("None", lambda: SimpleNamespace, "not the class SimpleNamespace"),
    ("the tokenizer", lambda: WORDS, "the model comes first, the tokenizer second"),
    ("a pipeline", lambda: TextGenerationPipeline(build(FAMILY), WORDS), "pass the model in it, its `.model`"),
    ("a wrapper", lambda: torch.nn.DataParallel(build(FAMILY)), "pass the model in it, its `.module`"),
    ("a module", lambda: torch.nn.Linear(2, 2), "takes a transformers model with a language-model head, not a Linear"),
    (
        "no head",
        lambda: build(FAMILY).model,
        "has no language-model head to generate with: load it as",
    ),
    ("no weights", hollow, "weights that are not in memory"),
    ("partly without weights", spread, "weights that are not in memory"),
    ("an encoder-decoder", REFUSED["t5"], "is an encoder-decoder; only decoder-only models are supported"),
]
TOKENIZERS: list[tuple[str, Any, str]] = [
    ("a name", "gpt2", "`tokenizer` is a string: pass the tokenizer itself, AutoTokenizer.from_pretrained('gpt2')"),
    ("a path", Path("models/mine"), "AutoTokenizer.from_pretrained('models/mine')"),
    (
        "a BatchConfig",
        BatchConfig(),
        "is a BatchConfig: pass it by name, BatchGenerator(model, config=...)",
    ),
    ("a GenerationConfig", GenerationConfig(), "it goes into generate(), with the prompts"),
    ("a model", build(FAMILY), "the tokenizer comes second, after the model"),
    ("what is inside of one", WORDS.backend_tokenizer, "wrap it, PreTrainedTokenizerFast(tokenizer_object=...)"),
    ("a dict", {}, "`tokenizer` is a dict: pass what AutoTokenizer.from_pretrained gives"),
    ("a function", len, "pass what AutoTokenizer.from_pretrained gives"),
]


@pytest.mark.parametrize(("model", "says"), [row[1:] for row in MODELS], ids=[row[0] for row in MODELS])
def test_what_is_no_model_that_can_be_run(model: Any, says: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        make(model())
    assert says in str(caught.value)


@pytest.mark.parametrize(("given", "says"), [row[1:] for row in TOKENIZERS], ids=[row[0] for row in TOKENIZERS])
def test_what_is_no_tokenizer(given: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tokenizer=given)
    assert says in str(caught.value)


def test_a_model_that_is_partly_on_the_disk(tmp_path: Path) -> None:
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    places |= {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in range(3)}
    model = dispatch_model(FAMILIES[FAMILY](), places, main_device="cpu", offload_dir=tmp_path)
    with pytest.raises(UnsupportedModelError, match="not in memory"):
        make(model)


def test_a_model_that_moves_away_between_two_calls() -> None:
    model = FAMILIES[FAMILY]()
    generator = make(model)
    generator.generate([IDS], max_new_tokens=1)
    model.to("meta")
    with pytest.raises(UnsupportedModelError, match="not in memory"):
        generator.generate([IDS], max_new_tokens=1)


# -- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        PromptError({0: "is None", 7: "is empty"}),
        UnsupportedOptionError("num_beams", "is not supported"),
        ConfigError("no"),
        GenerationInterrupted([1], 1, 2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_from_process_to_process(error: Any) -> None:
    for reference in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(reference) is type(error)
        assert str(reference) == str(error)
        assert vars(reference) == vars(error)


def test_many_bad_prompts_make_a_short_message() -> None:
    error = PromptError({index: "is None" if index % 3 else f"has token id {index}" for index in range(3000)})
    lines = str(error).splitlines()
    assert lines[0] == "3,000 prompts cannot be run:"
    assert lines[2].startswith("  prompts 1-2, 4-5, 7-8") and lines[2].endswith("and 1,984 more: each is None")
    assert lines[-1] == "  ... and 993 more (all of them in .problems)"
    assert len(lines) == 10 and len(error.problems) == 3000
