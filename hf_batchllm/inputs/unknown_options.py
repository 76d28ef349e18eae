"""Names that are not options: what a call's unknown keyword argument may have been meant as."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from typing import Any

import transformers
from transformers.utils.generic import TransformersKwargs

from ..config import BatchConfig
from ..errors import UnsupportedOptionError
from ..wording import shown
from .base_model import GenerativeModel
from .option_table import TABLE

_PROGRESS = "is called `progress` here (True, False, or None for long lists only)"
_ENCODING = (
    "is not an option here: prompts are encoded with the tokenizer's defaults. Encode them yourself, and pass token ids"
)
_CUT = "is not an option here: `max_prompt_tokens` cuts long prompts, and `truncation_side` says where"
# Names from vLLM, the pipelines, peft's and TRL's helpers, and the OpenAI client: what to do instead.
_FROM_ELSEWHERE = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_gen_toks", "max_generated_tokens"),
        "is called `max_new_tokens` here",
    ),
    **dict.fromkeys(("min_tokens", "min_gen_tokens"), "is called `min_new_tokens` here"),
    **dict.fromkeys(
        ("n", "best_of", "num_samples", "num_generations", "num_outputs"),
        "is called `num_return_sequences` here",
    ),
    **dict.fromkeys(("stop", "stop_words", "stop_sequences", "stop_sequence"), "is called `stop_strings` here"),
    "stop_token_ids": "is called `eos_token_id` here: a token id, or a list of them",
    "ignore_eos": "is not an option here: pass `eos_token_id=None`",
    **dict.fromkeys(("sampling_params", "params"), "is not an option here: pass each option as a keyword argument"),
    **dict.fromkeys(("use_tqdm", "show_progress", "progress_bar", "verbose", "disable_tqdm"), _PROGRESS),
    **dict.fromkeys(("random_seed", "generator", "rng"), "is called `seed` here, and is a whole number"),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty"), "is not an option of transformers; see `repetition_penalty`"
    ),
    **dict.fromkeys(("repeat_penalty", "rep_penalty", "rep_pen"), "is called `repetition_penalty` here"),
    **dict.fromkeys(("sample", "sampling"), "is called `do_sample` here"),
    "greedy": "is not an option here: pass `do_sample=False`",
    **dict.fromkeys(
        ("prompt", "text", "texts", "text_inputs", "messages", "conversations", "chats", "prompt_token_ids"),
        "is not an option here: the prompts are the first argument",
    ),
    **dict.fromkeys(
        ("batch_size", "max_num_seqs", "num_workers"),
        "is not needed: the batch is as large as memory allows (see BatchConfig.max_batch_tokens)",
    ),
    **dict.fromkeys(
        ("return_full_text", "return_text", "return_tensors", "echo"),
        "is not an option here: each result holds `text`, `token_ids` and `prompt_token_ids`",
    ),
    **dict.fromkeys(
        ("skip_special_tokens", "clean_up_tokenization_spaces"),
        "is not an option here: to decode in another way, use tokenizer.decode on `token_ids`",
    ),
    **dict.fromkeys(("padding", "add_special_tokens", "padding_side", "tokenizer_kwargs"), _ENCODING),
    **dict.fromkeys(("truncation", "max_prompt_length", "max_input_length", "max_model_len"), _CUT),
    "truncate_prompt_tokens": "is called `max_prompt_tokens` here",
    **dict.fromkeys(("tool", "functions", "tool_schemas"), "is called `tools` here, a list"),
    **{
        name: f"goes into `chat_template_kwargs`: chat_template_kwargs={{'{name}': ...}}"
        for name in ("enable_thinking", "thinking", "reasoning_effort", "documents", "chat_template", "xml_tools")
    },
    "template_kwargs": "is called `chat_template_kwargs` here",
    "add_generation_prompt": (
        "is not an option here: a chat gets the beginning of an answer, unless it is continued; "
        "see `continue_final_message`"
    ),
    "apply_chat_template": "is not an option here: chats get the tokenizer's template, and strings none",
    **dict.fromkeys(
        ("lora_request", "adapter_name", "adapter_names", "lora", "lora_name", "lora_path"),
        "is called `adapter` here: the name of a PEFT adapter that the model has, or a list with one for each prompt",
    ),
    **dict.fromkeys(
        ("guided_decoding", "structured_outputs", "response_format", "guided_json", "guided_regex", "grammar"),
        "is not an option of transformers: pass `logits_processor=factory`, where factory(index, prompt_token_ids) "
        "makes the processors of one sequence (docs/generate.md)",
    ),
    "logits_processors": "is called `logits_processor` here: a list for all prompts, or a callable that makes one",
    "logit_bias": "is called `sequence_bias` here, and maps tuples of token ids to a bias",
    "bad_words": "is called `bad_words_ids` here, and takes token ids",
    "allowed_token_ids": "is not an option here: pass a `prefix_allowed_tokens_fn` that returns them",
    "timeout": "is called `max_time` here",
    "top_logprobs": "is called `logprobs` here: how many of the likeliest tokens, besides the chosen one",
    **dict.fromkeys(
        ("device", "dtype", "torch_dtype"), "is not an option here: the model runs on its own device, in its own dtype"
    ),
    "model": "goes into BatchGenerator(model)",
    "config": "goes into BatchGenerator(model, config=...); options of generate go into `generation_config`",
}


def unknown_option(name: str, model: GenerativeModel) -> UnsupportedOptionError:
    """The error for a keyword argument that the table does not have."""
    if name in inspect.signature(type(model).generate).parameters:
        return UnsupportedOptionError(name, _newer_than_this())
    if name in _FROM_ELSEWHERE:
        return UnsupportedOptionError(name, _FROM_ELSEWHERE[name])
    if name in (field.name for field in dataclasses.fields(BatchConfig)):
        return UnsupportedOptionError(name, f"is a field of BatchConfig: BatchGenerator(model, {name}=...)")
    if name in inspect.signature(model.forward).parameters or name in TransformersKwargs.__annotations__:
        why = f"is an input of {type(model).__name__} that is not supported: prompts are text or token ids"
        return UnsupportedOptionError(name, why)
    near = difflib.get_close_matches(name, TABLE, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return UnsupportedOptionError(name, f"is not an option of generate{hint}")


def unknown_field(name: str, value: Any) -> UnsupportedOptionError:
    """The error for a field of GenerationConfig that the table does not have."""
    return UnsupportedOptionError(name, f"{_newer_than_this()} (it is set to {shown(value)})")


def _newer_than_this() -> str:
    return (
        f"is an option of transformers {transformers.__version__} that this version of hf-batchllm does not know yet: "
        "leave it out, or call the model's own `generate`"
    )
