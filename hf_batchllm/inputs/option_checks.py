"""Options that are wrong whatever the model: values of a wrong kind, and names that belong to other libraries.

transformers finds most wrong values, some of them by an error from deep inside; these are named here before it looks.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseWatermarkingConfig
from transformers.utils import TransformersKwargs

from ..config import BatchConfig
from ..errors import OptionValueError, UnsupportedOptionError
from ..notices import Notices
from ..wording import a_kind, shown
from .option_row import Fate, Subject, Takes
from .option_table import TABLE, names
from .tokenizer import check_tokenizer
from .user_callables import CRITERIA, PROCESSORS, check_listed

if TYPE_CHECKING:
    from .given import Given


_FOR_SAMPLING = [row.name for row in TABLE.values() if row.sampling]
_SPECULATION = sorted(names(fate=Fate.NO_EFFECT, subject=Subject.SPECULATION))
_SHARES = ("top_p", "typical_p", "epsilon_cutoff", "eta_cutoff")  # beyond 1, transformers passes over them in silence
_OF_BEAMS = ("early_stopping", "length_penalty")
_EXTRAS = ("output_scores", "output_logits")

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
    "allowed_token_ids": "is not taken: pass a `prefix_allowed_tokens_fn` that returns them",
    "timeout": "is called `max_time` here",
    "top_logprobs": "is called `logprobs` here: how many of the likeliest tokens, beside the chosen one",
    **dict.fromkeys(("device", "dtype", "torch_dtype"), "is not taken: the model runs where, and as, it is"),
    "model": "goes into BatchGenerator(model)",
    "config": "goes into BatchGenerator(model, config=...); options of generate go into `generation_config`",
}


def unknown_option(name: str, model: PreTrainedModel) -> UnsupportedOptionError:
    if name in inspect.signature(type(model).generate).parameters:
        return UnsupportedOptionError(name, _newer())
    if name in _ELSEWHERE:
        return UnsupportedOptionError(name, _ELSEWHERE[name])
    if name in (field.name for field in dataclasses.fields(BatchConfig)):
        return UnsupportedOptionError(name, f"is a field of BatchConfig: BatchGenerator(model, {name}=...)")
    if name in inspect.signature(model.forward).parameters or name in TransformersKwargs.__annotations__:
        why = f"is an input of {type(model).__name__} that is not supported: prompts are text or token ids"
        return UnsupportedOptionError(name, why)
    near = difflib.get_close_matches(name, TABLE, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return UnsupportedOptionError(name, f"is not an option of generate{hint}")


def unknown_field(name: str, value: Any) -> UnsupportedOptionError:
    return UnsupportedOptionError(name, f"{_newer()} (it is set to {shown(value)})")


def _newer() -> str:
    return (
        f"is an option of transformers {transformers.__version__} that this version of hf-batchllm does not know yet: "
        "leave it out, or call the model's own `generate`"
    )


def check_generation_config(given: Any, name: str = "generation_config") -> None:
    """``name``: ``generation_config``, where None stands for no config, or the name of one among several."""
    if isinstance(given, GenerationConfig) or (given is None and name == "generation_config"):
        return
    kind = type(given).__name__
    if isinstance(given, dict):
        hint = "pass its items as keyword arguments, generate(prompts, **options)"
    elif isinstance(given, BatchConfig):
        hint = "it goes into BatchGenerator(model, config=...)"
    elif isinstance(given, Integral):
        hint = f"if it is a length, pass `max_new_tokens={given}`"
    elif given is None:
        hint = "for the model's own defaults pass GenerationConfig()"
    elif kind == "SamplingParams":
        hint = "pass its values as keyword arguments, such as `do_sample=True, temperature=0.8`"
    elif isinstance(given, str | list):
        hint = "if it is a prompt, put all prompts into one list"
    else:
        hint = "or pass its values as keyword arguments"
    raise UnsupportedOptionError(name, f"must be a transformers.GenerationConfig, not {a_kind(given)}: {hint}")


def check_values(options: Mapping[str, Any]) -> None:
    """Each value's kind, and those ranges that hold for every model."""
    for name, value in options.items():
        row = TABLE.get(name) if value is not None else None
        if row is None:
            continue
        if row.takes is Takes.WHOLE and not _is_whole(value):
            raise OptionValueError(name, f"must be a whole number, not {shown(value)}")
        if row.takes is Takes.FLAG and not _is_flag(value):
            raise OptionValueError(name, f"must be True or False, not {shown(value)}")
        if row.takes is Takes.NUMBER:
            _check_number(name, value)
        if row.takes in (Takes.TOKEN, Takes.TOKENS, Takes.IDS):
            _check_token_ids(name, value, row.takes)
        if name in _CHECKS:
            _CHECKS[name](name, value)
    if options.get("max_new_tokens") is not None and options["max_new_tokens"] <= 0:
        raise OptionValueError("max_new_tokens", f"must be greater than 0, but is {options['max_new_tokens']}")
    for name in ("num_return_sequences", "num_beams"):
        if options.get(name) is not None and options[name] < 1:
            raise OptionValueError(name, f"must be at least 1, but is {options[name]}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, Integral) and value in (0, 1))


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise OptionValueError(name, f"must be a number, not {shown(value)}")
    # transformers says this of a `penalty`; a 1 of any type asks for nothing.
    if name.endswith("repetition_penalty") and value != 1 and not (isinstance(value, float) and value > 0):
        raise OptionValueError(name, f"must be a float above 0, such as 1.2, not {shown(value)}")


def _check_token_ids(name: str, value: Any, takes: Takes) -> None:
    if isinstance(value, torch.Tensor | np.ndarray):
        ids: Any = value.tolist() if value.ndim <= 1 else None
    else:
        ids = value
    listed = isinstance(ids, list | tuple)
    if takes is not Takes.TOKEN and listed and (ids or takes is Takes.IDS):
        good = all(map(_is_whole, ids))
    else:
        good = takes is not Takes.IDS and _is_whole(ids)
    if not good:
        hint = ": tokenizer.convert_tokens_to_ids gives it" if isinstance(value, str) else ""
        hint = ": for no EOS at all pass None" if name == "eos_token_id" and listed and not ids else hint
        raise OptionValueError(name, f"must be {takes.value}, not {shown(value)}{hint}")


def _check_stop_strings(name: str, value: Any) -> None:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) for each in listed):
        raise OptionValueError(name, f"must be a string, or a list of strings, not {shown(value)}")
    if not listed or not all(listed):
        raise OptionValueError(name, f"is {shown(value)}, and nothing ends where nothing stands: leave it out")


def _check_decay(name: str, value: Any) -> None:
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(each, Real) for each in value)):
        why = "must be a pair, (after how many new tokens it begins, by what factor it grows), such as (20, 1.1)"
        raise OptionValueError(name, f"{why}, not {shown(value)}")


def _check_early_stopping(name: str, value: Any) -> None:
    if not isinstance(value, bool) and value != "never":
        raise OptionValueError(name, f'must be True, False or "never", not {shown(value)}')


def _check_watermark(name: str, value: Any) -> None:
    if not isinstance(value, dict | BaseWatermarkingConfig):
        why = "must be a WatermarkingConfig or a SynthIDTextWatermarkingConfig of transformers"
        raise OptionValueError(name, f"{why}, not {shown(value)}")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "stop_strings": _check_stop_strings,
    "exponential_decay_length_penalty": _check_decay,
    "watermarking_config": _check_watermark,
    "early_stopping": _check_early_stopping,
}


def check_sampling(config: GenerationConfig) -> None:
    """What two options are to each other."""
    if config.do_sample and config.temperature == 0:
        why = "is 0, and sampling needs more than that: for greedy decoding set `do_sample=False`"
        raise OptionValueError("temperature", why)


def check_given(given: Given) -> None:
    """What is passed in as objects of the caller's own."""
    for name in ("logprobs", "prompt_logprobs"):
        _check_logprobs(name, getattr(given, name))
    check_listed(PROCESSORS, given.logits_processor)
    check_listed(CRITERIA, given.stopping_criteria)
    allowed = given.prefix_allowed_tokens_fn
    if allowed is not None and not callable(allowed):
        why = "must be a function of the prompt's index and its tokens so far that returns the token ids allowed next"
        raise OptionValueError("prefix_allowed_tokens_fn", f"{why}, not {a_kind(allowed)}")
    _check_negative_prompt(given.negative_prompt_ids, given.negative_prompt_attention_mask)
    if given.streamer is not None:
        lacking = [name for name in ("put", "end") if not callable(getattr(given.streamer, name, None))]
        if lacking or isinstance(given.streamer, type):
            hint = "an object of it" if isinstance(given.streamer, type) else "a TextStreamer of transformers, say"
            why = f"must have put() and end(), and is {a_kind(given.streamer)}: pass {hint}"
            raise OptionValueError("streamer", why)
    check_tokenizer(given.tokenizer)


def _check_logprobs(name: str, value: Any) -> None:
    if value is not None and (not _is_whole(value) or value < 0):
        # True is 1 to some libraries and 0 to others.
        why = "must be a whole number of at least 0, how many of the likeliest tokens come beside the token itself"
        raise OptionValueError(name, f"{why}, not {shown(value)}")


def _check_negative_prompt(ids: Any, mask: Any) -> None:
    if mask is not None and ids is None:
        raise OptionValueError("negative_prompt_attention_mask", "goes with `negative_prompt_ids`: pass them, too")
    for name, value in (("negative_prompt_ids", ids), ("negative_prompt_attention_mask", mask)):
        if value is not None and not (isinstance(value, torch.Tensor) and value.ndim == 2):
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise OptionValueError(name, f"must be a 2-D tensor, a row for each prompt, not {a_kind(value)}{shape}")
    if mask is not None and mask.shape != ids.shape:
        why = f"has shape {list(mask.shape)} and `negative_prompt_ids` {list(ids.shape)}: they must be the same"
        raise OptionValueError("negative_prompt_attention_mask", why)


def warn_of_options(
    config: GenerationConfig, asked: Mapping[str, Any], was_asked: Callable[[str], bool], notices: Notices
) -> None:
    """What was asked for in this call, by ``asked`` or in a config, and has no effect."""
    if not config.do_sample:
        idle = [name for name in _FOR_SAMPLING if was_asked(name) and TABLE[name].asks(getattr(config, name))]
        if idle:
            notices("greedy", f"{_have(idle)} no effect on greedy decoding: set `do_sample=True` to sample")
    for name in _SHARES:
        value = getattr(config, name)
        if config.do_sample and value is not None and was_asked(name) and not 0 <= value <= 1:
            notices(name, f"`{name}` is {value}, and has no effect: it is a probability, from 0 to 1")
    idle = [
        name
        for name in _SPECULATION
        if was_asked(name) and TABLE[name].asks(asked.get(name, getattr(config, name, None)))
    ]
    if idle:
        notices(
            "speculation", f"{_have(idle)} no effect: speculation changes how fast `generate` is, never what it gives"
        )
    idle = [name for name in _EXTRAS if was_asked(name) and getattr(config, name)]
    if idle and not config.return_dict_in_generate:
        notices("outputs", f"{_have(idle)} no effect without `return_dict_in_generate=True`, as in `generate`")
    idle = [] if (config.num_beams or 1) > 1 else [name for name in _OF_BEAMS if was_asked(name)]
    if idle := [name for name in idle if TABLE[name].asks(getattr(config, name))]:
        notices("beams", f"{_have(idle)} no effect without beams: set `num_beams` to more than 1")
    if config.max_new_tokens is not None:
        if asked.get("max_length") is not None:
            notices("max_length", "`max_length` has no effect beside `max_new_tokens`: leave one of them out")
        if config.min_new_tokens is not None and config.min_new_tokens > config.max_new_tokens:
            notices(
                "min_new_tokens",
                f"`min_new_tokens` ({config.min_new_tokens:,}) is more than `max_new_tokens` "
                f"({config.max_new_tokens:,}): every sequence stops at the latter",
            )


def _have(names: list[str]) -> str:
    *most, last = (f"`{name}`" for name in names)
    return f"{', '.join(most)} and {last} have" if most else f"{last} has"


def _check_on_error(on_error: Any) -> None:
    if on_error not in ("raise", "record"):
        raise OptionValueError("on_error", f'must be "raise" or "record", not {shown(on_error)}')
