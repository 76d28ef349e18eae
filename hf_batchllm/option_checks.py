"""Options that are wrong whatever the model: values of a wrong kind, and names that belong to other libraries.

transformers finds most wrong values, some of them by an error from deep inside; these are named here before it looks.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .config import BatchConfig
from .errors import OptionValueError, UnsupportedOptionError
from .kinds import a_kind, shown
from .notices import Notices

_WHOLE = ("max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences")
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")
_FOR_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}  # with the values that ask for nothing

_PROGRESS = "is called `progress` here (True, False, or None for long lists only)"
_CHAT = "is not taken: apply the template yourself, with tokenizer.apply_chat_template, and pass its token ids"
_ENCODING = (
    "is not taken: prompts are encoded as the tokenizer does by default. Encode them yourself, and pass token ids"
)
# Names that people bring along from vLLM, the pipelines, peft's and TRL's helpers, or the OpenAI client.
_ELSEWHERE = {
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
    "ignore_eos": "is not taken: pass `eos_token_id=None`",
    **dict.fromkeys(("sampling_params", "params"), "is not taken: pass each option as a keyword argument"),
    **dict.fromkeys(("use_tqdm", "show_progress", "progress_bar", "verbose", "disable_tqdm"), _PROGRESS),
    **dict.fromkeys(("random_seed", "generator", "rng"), "is called `seed` here, and is a whole number"),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty"), "is not an option of transformers; see `repetition_penalty`"
    ),
    **dict.fromkeys(("repeat_penalty", "rep_penalty", "rep_pen"), "is called `repetition_penalty` here"),
    **dict.fromkeys(("sample", "sampling"), "is called `do_sample` here"),
    "greedy": "is not taken: pass `do_sample=False`",
    **dict.fromkeys(
        ("prompt", "text", "texts", "text_inputs", "messages", "conversations", "chats", "prompt_token_ids"),
        "is not taken: the prompts are the first argument",
    ),
    **dict.fromkeys(
        ("batch_size", "max_num_seqs", "num_workers"),
        "is not needed: the batch is as large as memory allows (see BatchConfig.max_batch_tokens)",
    ),
    **dict.fromkeys(
        ("return_full_text", "return_text", "return_tensors", "echo"),
        "is not taken: each result holds `text`, `token_ids` and `prompt_token_ids`",
    ),
    **dict.fromkeys(
        ("skip_special_tokens", "clean_up_tokenization_spaces"),
        "is not taken: to decode in another way, use tokenizer.decode on `token_ids`",
    ),
    **dict.fromkeys(
        ("padding", "truncation", "add_special_tokens", "padding_side", "tokenizer_kwargs", "truncate_prompt_tokens"),
        _ENCODING,
    ),
    **dict.fromkeys(
        ("tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "enable_thinking"),
        _CHAT,
    ),
    **dict.fromkeys(("chat_template_kwargs", "apply_chat_template"), _CHAT),
    "lora_request": "is not taken: give BatchGenerator the model with its adapter (PEFT)",
    **dict.fromkeys(
        ("guided_decoding", "structured_outputs", "response_format", "guided_json", "guided_regex"),
        "is not supported (constrained decoding)",
    ),
    "top_logprobs": "is called `logprobs` here: how many of the likeliest tokens, beside the chosen one",
    **dict.fromkeys(("device", "dtype", "torch_dtype"), "is not taken: the model runs where, and as, it is"),
    "model": "goes into BatchGenerator(model)",
    "config": "goes into BatchGenerator(model, config=...); options of generate go into `generation_config`",
}


def unknown_option(name: str, known: Iterable[str], model: PreTrainedModel) -> UnsupportedOptionError:
    if name in _ELSEWHERE:
        return UnsupportedOptionError(name, _ELSEWHERE[name])
    if name in (field.name for field in dataclasses.fields(BatchConfig)):
        return UnsupportedOptionError(name, f"is a field of BatchConfig: BatchGenerator(model, {name}=...)")
    if name in inspect.signature(model.forward).parameters:
        why = f"is an input of {type(model).__name__} that is not supported: prompts are text or token ids"
        return UnsupportedOptionError(name, why)
    near = difflib.get_close_matches(name, [*known, "seed", "on_error", "progress"], n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return UnsupportedOptionError(name, f"is not an option of generate{hint}")


def check_generation_config(given: Any) -> None:
    if given is None or isinstance(given, GenerationConfig):
        return
    kind = type(given).__name__
    if isinstance(given, dict):
        hint = "pass its items as keyword arguments, generate(prompts, **options)"
    elif isinstance(given, BatchConfig):
        hint = "it goes into BatchGenerator(model, config=...)"
    elif isinstance(given, Integral):
        hint = f"if it is a length, pass `max_new_tokens={given}`"
    elif kind == "SamplingParams":
        hint = "pass its values as keyword arguments, such as `do_sample=True, temperature=0.8`"
    elif isinstance(given, str | list):
        hint = "if it is a prompt, put all prompts into one list"
    else:
        hint = "or pass its values as keyword arguments"
    raise UnsupportedOptionError(
        "generation_config", f"must be a transformers.GenerationConfig, not {a_kind(given)}: {hint}"
    )


def check_values(options: Mapping[str, Any]) -> None:
    """Each value's kind, and those ranges that hold for every model."""
    for name, value in options.items():
        if value is None:
            continue
        if name in _WHOLE and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise OptionValueError(name, f"must be a whole number, not {shown(value)}")
        if name == "do_sample" and not _is_flag(value):
            raise OptionValueError(name, f"must be True or False, not {shown(value)}")
        if name in _NUMBERS:
            _check_number(name, value)
        if name in _TOKENS:
            _check_token_ids(name, value)
    if options.get("max_new_tokens") is not None and options["max_new_tokens"] <= 0:
        raise OptionValueError("max_new_tokens", f"must be greater than 0, but is {options['max_new_tokens']}")
    samples = options.get("num_return_sequences")
    if samples is not None and samples < 1:
        raise OptionValueError("num_return_sequences", f"must be at least 1, but is {samples}")


def _is_flag(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, Integral) and value in (0, 1))


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise OptionValueError(name, f"must be a number, not {shown(value)}")
    # transformers says this of a `penalty`; a 1 of any type asks for nothing.
    if name == "repetition_penalty" and value != 1 and not (isinstance(value, float) and value > 0):
        raise OptionValueError(name, f"must be a float above 0, such as 1.2, not {shown(value)}")


def _check_token_ids(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        ids: Any = value.tolist() if value.ndim <= 1 else None
    else:
        ids = value
    several = name == "eos_token_id"
    if several and isinstance(ids, list | tuple) and ids:
        good = all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids)
    else:
        good = isinstance(ids, Integral) and not isinstance(ids, bool)
    if not good:
        what = "a token id, or a list of them" if several else "a token id"
        hint = ": tokenizer.convert_tokens_to_ids gives it" if isinstance(value, str) else ""
        hint = ": for no EOS at all pass None" if several and isinstance(ids, list | tuple) and not ids else hint
        raise OptionValueError(name, f"must be {what}, not {shown(value)}{hint}")


def check_sampling(config: GenerationConfig) -> None:
    if config.do_sample and config.temperature == 0:
        why = "is 0, and sampling needs more than that: for greedy decoding set `do_sample=False`"
        raise OptionValueError("temperature", why)


def warn_of_options(
    config: GenerationConfig, asked: Mapping[str, Any], given: GenerationConfig | None, notices: Notices
) -> None:
    """What was asked for in this call and has no effect. A checkpoint's own defaults are nobody's mistake."""

    def was_asked(name: str) -> bool:
        return asked.get(name) is not None or getattr(given, name, None) is not None

    idle = [
        f"`{name}`"
        for name, neutral in _FOR_SAMPLING.items()
        if not config.do_sample and was_asked(name) and getattr(config, name) not in (None, neutral)
    ]
    if idle:
        verb = "has" if len(idle) == 1 else "have"
        notices("greedy", f"{' and '.join(idle)} {verb} no effect on greedy decoding: set `do_sample=True` to sample")
    if config.do_sample and config.top_p is not None and was_asked("top_p") and not 0 <= config.top_p <= 1:
        notices("top_p", f"`top_p` is {config.top_p}, and has no effect: it is a probability, from 0 to 1")
    if config.max_new_tokens is not None:
        if asked.get("max_length") is not None:
            notices("max_length", "`max_length` has no effect beside `max_new_tokens`: leave one of them out")
        if config.min_new_tokens is not None and config.min_new_tokens > config.max_new_tokens:
            notices(
                "min_new_tokens",
                f"`min_new_tokens` ({config.min_new_tokens:,}) is more than `max_new_tokens` "
                f"({config.max_new_tokens:,}): every sequence stops at the latter",
            )
