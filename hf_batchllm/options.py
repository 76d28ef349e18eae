"""What becomes of each option of ``model.generate``: honoured, without effect here, or refused by name.

transformers itself resolves defaults (``model.generation_config``, then the config passed, then keyword arguments);
this module looks at the outcome and at nothing else.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import warnings
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from .architecture import base_model
from .config import BatchConfig
from .errors import UnsupportedOptionError

HONOURED = frozenset(
    "max_new_tokens max_length min_new_tokens min_length do_sample temperature top_k top_p min_p repetition_penalty "
    "num_return_sequences eos_token_id pad_token_id bos_token_id".split()
)

# They choose how transformers would run, or belong to modes that are refused: no effect on the results here.
WITHOUT_EFFECT = frozenset(
    "use_cache cache_implementation cache_config max_cache_len prefill_chunk_size compile_config disable_compile "
    "continuous_batching_config low_memory early_stopping length_penalty decoder_start_token_id is_assistant "
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit "
    "assistant_lookbehind target_lookbehind assistant_ensemble_weight max_matching_ngram_size speculation_type "
    "transformers_version".split()
)

# Arguments of ``generate`` itself that are not fields of GenerationConfig.
REFUSED_ARGUMENTS = {
    "input_ids": "is not supported yet: pass the prompts as a list",
    "inputs": "is not supported yet: pass the prompts as a list",
    "attention_mask": "is not supported yet: pass the prompts as a list, without padding",
    "inputs_embeds": "is not supported: prompts are text or token ids",
    "position_ids": "is not supported: positions follow from the prompt",
    "past_key_values": "is not supported: shared prefixes are found in the list itself (see BatchConfig.keep_prefixes)",
    "logits_processor": "is not supported yet",
    "stopping_criteria": "is not supported yet",
    "prefix_allowed_tokens_fn": "is not supported yet",
    "assistant_model": "is not supported: assisted decoding is for single prompts",
    "streamer": "is not supported yet",
    "negative_prompt_ids": "is not supported (classifier-free guidance)",
    "negative_prompt_attention_mask": "is not supported (classifier-free guidance)",
    "trust_remote_code": "has no meaning here: no code is loaded",
    "custom_generate": "is not supported: it would replace what this library does",
    "synced_gpus": "is not supported: the model must be on a single device",
    "tokenizer": "goes into BatchGenerator(model, tokenizer=...)",
}

_REASONS = {
    "num_beams": "is not supported yet: beam search",
    "max_time": "is not supported yet",
    "stop_strings": "is not supported yet",
    "return_dict_in_generate": "is not supported yet: results come as a BatchResult",
}


@dataclass(frozen=True)
class Options:
    """The options of one call, resolved."""

    config: GenerationConfig  # transformers' own, all defaults filled in; a copy
    eos_token_ids: frozenset[int]
    do_sample: bool
    num_return_sequences: int
    has_default_length: bool  # no length was given anywhere

    def max_new_tokens(self, prompt_tokens: int, max_positions: int | None) -> int:
        """How many tokens a prompt may grow by; 0 or less if it is as long as ``max_length`` already."""
        config = self.config
        if config.max_new_tokens is not None:
            return config.max_new_tokens
        if self.has_default_length:
            limit = config.max_length + prompt_tokens  # generate's default: 20 new tokens
            return (limit if max_positions is None else min(limit, max_positions)) - prompt_tokens
        return config.max_length - prompt_tokens


def resolve_options(model: nn.Module, generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> Options:
    """As ``generate`` resolves them; UnsupportedOptionError for what cannot be honoured."""
    inner = base_model(model)
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise UnsupportedOptionError(
            "generation_config", f"must be a transformers.GenerationConfig, not {type(generation_config).__name__}"
        )
    _refuse_arguments(kwargs, inner)
    given = (kwargs.get("max_length"), getattr(generation_config, "max_length", None))
    has_default_length = all(value is None for value in (*given, inner.generation_config.max_length))
    asked = {name: value for name, value in kwargs.items() if name not in REFUSED_ARGUMENTS}
    config, leftover = inner._prepare_generation_config(generation_config, **asked)
    for name in leftover:
        if name not in ("output_attentions", "output_hidden_states"):
            raise _unknown(name, config)
    _refuse_fields(config)
    for name in ("max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences"):
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise ValueError(f"`{name}` must be a whole number, not {value!r}")
    if config.num_return_sequences is not None and config.num_return_sequences < 1:
        raise ValueError(f"`num_return_sequences` must be at least 1, but is {config.num_return_sequences}")
    if (config.num_return_sequences or 1) > 1 and not config.do_sample:
        raise ValueError(
            "Greedy methods without beam search do not support `num_return_sequences` different than 1 "
            f"(got {config.num_return_sequences}): set `do_sample=True`"
        )
    if config.max_new_tokens is not None and config.max_new_tokens <= 0:
        raise ValueError(f"`max_new_tokens` must be greater than 0, but is {config.max_new_tokens}")
    if has_default_length and config.max_new_tokens is None:
        warnings.warn(
            f"No length was given, so {config.max_length} new tokens are generated for each prompt, "
            "which is generate's default. Set `max_new_tokens`.",
            UserWarning,
            stacklevel=4,
        )
    inner._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=inner.device)
    eos = config._eos_token_tensor
    options = Options(
        config=config,
        eos_token_ids=frozenset(() if eos is None else eos.tolist()),
        do_sample=bool(config.do_sample),
        num_return_sequences=config.num_return_sequences or 1,
        has_default_length=has_default_length,
    )
    # Processors check their own values (a temperature of 0, say) when they are made: now rather than after a prefill.
    make_processors(inner, options, 1, 1)
    return options


def make_processors(
    model: PreTrainedModel, options: Options, prompt_tokens: int, max_new_tokens: int
) -> LogitsProcessorList:
    """transformers' own, in its order, for prompts of one length."""
    return model._get_logits_processor(
        generation_config=config_for_prompt(options, prompt_tokens, max_new_tokens),
        input_ids_seq_length=prompt_tokens,
        device=model.device,
        model_kwargs={},
    )


def config_for_prompt(options: Options, prompt_tokens: int, max_new_tokens: int) -> GenerationConfig:
    """The config as ``generate`` would have it for one prompt: lengths count that prompt's own tokens."""
    config = copy.copy(options.config)
    config.max_length = prompt_tokens + max_new_tokens
    if config.min_new_tokens is not None:
        config.min_length = config.min_new_tokens + prompt_tokens
    return config


def _refuse_arguments(kwargs: dict[str, Any], model: nn.Module) -> None:
    for name, why in REFUSED_ARGUMENTS.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedOptionError(name, why)


def _refuse_fields(config: GenerationConfig) -> None:
    neutral = config._get_default_generation_params()
    # Names that transformers does not know either are a checkpoint's own notes; ``generate`` carries them along, too.
    for name in vars(GenerationConfig()):
        value = getattr(config, name, None)
        if name.startswith("_") or name in HONOURED or name in WITHOUT_EFFECT:
            continue
        if value is None or value is False or (name in neutral and value == neutral[name]):
            continue
        if (isinstance(value, list | tuple | dict) and not value) or (name == "penalty_alpha" and value == 0):
            continue  # nothing is asked for
        if name == "guidance_scale" and value == 1:
            continue
        raise UnsupportedOptionError(name, f"{_REASONS.get(name, 'is not supported yet')} (it is set to {value!r})")


def _unknown(name: str, config: GenerationConfig) -> UnsupportedOptionError:
    if name in (field.name for field in dataclasses.fields(BatchConfig)):
        return UnsupportedOptionError(name, f"is a field of BatchConfig: BatchGenerator(model, {name}=...)")
    known = [field for field in vars(config) if not field.startswith("_")]
    known += ["seed", "on_error", "progress", *REFUSED_ARGUMENTS]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return UnsupportedOptionError(name, f"is not an option of generate{hint}")
