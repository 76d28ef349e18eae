"""What becomes of each option of ``model.generate``: honoured, without effect here, or refused by name.

transformers itself resolves defaults (``model.generation_config``, then the config passed, then keyword arguments);
this module looks at the outcome and at nothing else.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from .architecture import base_model
from .errors import OptionValueError, UnsupportedOptionError
from .kinds import a_kind
from .notices import Notices
from .option_checks import check_generation_config, check_sampling, check_values, unknown_option, warn_of_options
from .tensors import PaddedBatch
from .user_processors import check_processors, listed

HONOURED = frozenset(
    "max_new_tokens max_length min_new_tokens min_length do_sample temperature top_k top_p min_p repetition_penalty "
    "num_return_sequences eos_token_id pad_token_id bos_token_id top_h typical_p epsilon_cutoff eta_cutoff "
    "encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids renormalize_logits "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens sequence_bias guidance_scale watermarking_config stop_strings max_time".split()
)
FOR_TENSORS = frozenset("return_dict_in_generate output_scores output_logits".split())

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
    "inputs_embeds": "is not supported: prompts are text or token ids",
    "position_ids": "is not supported: positions follow from the prompt",
    "past_key_values": "is not supported: shared prefixes are found in the list itself (see BatchConfig.keep_prefixes)",
    "assistant_model": "is not supported: assisted decoding is for single prompts",
    "trust_remote_code": "has no meaning here: no code is loaded",
    "custom_generate": "is not supported: it would replace what this library does",
    "synced_gpus": "is not supported: the model must be on a single device",
}

_REASONS = {
    "num_beams": "is not supported yet: beam search",
    "return_dict_in_generate": "goes with tensors (`input_ids=`): a list of prompts gives a BatchResult",
}


@dataclass(frozen=True, eq=False)
class Given:
    """What a call takes beside the fields of a GenerationConfig; the same for all of its prompts."""

    logits_processor: Any = None  # a list, or a factory of lists: see ``processing``
    stopping_criteria: Any = None  # a list, or a factory of lists
    prefix_allowed_tokens_fn: Any = None
    negative_prompt_ids: Any = None
    negative_prompt_attention_mask: Any = None
    streamer: Any = None
    tokenizer: Any = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


ARGUMENTS = tuple(each.name for each in fields(Given))


@dataclass(frozen=True, eq=False)
class Options:
    """The options of some prompts of a call, resolved."""

    config: GenerationConfig  # transformers' own, all defaults filled in; a copy
    eos_token_ids: frozenset[int]
    pad_token_id: int | None  # the first EOS where none was set
    do_sample: bool
    num_return_sequences: int
    has_default_length: bool  # no length was given anywhere
    given: Given = field(default_factory=Given)

    def max_new_tokens(self, prompt_tokens: int, max_positions: int | None) -> int:
        """How many tokens a prompt may grow by; 0 or less if it is as long as ``max_length`` already."""
        config = self.config
        if config.max_new_tokens is not None:
            return config.max_new_tokens
        if self.has_default_length:
            limit = config.max_length + prompt_tokens  # generate's default: 20 new tokens
            return (limit if max_positions is None else min(limit, max_positions)) - prompt_tokens
        return config.max_length - prompt_tokens


def resolve_options(
    model: nn.Module,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
    padded: PaddedBatch | None = None,
    notices: Notices | None = None,
) -> Options:
    """As ``generate`` resolves them; UnsupportedOptionError for what cannot be honoured.

    ``padded``: the tensors that the prompts came in, if they did; some lengths then count the padding.
    """
    inner = base_model(model)
    notices = notices or Notices()
    check_generation_config(generation_config)
    _refuse_arguments(kwargs, inner)
    given = Given(**{name: kwargs.get(name) for name in ARGUMENTS})
    check_processors(given.logits_processor)
    if given.prefix_allowed_tokens_fn is not None and not callable(given.prefix_allowed_tokens_fn):
        why = f"must be a function of (batch_id, input_ids), not {a_kind(given.prefix_allowed_tokens_fn)}"
        raise OptionValueError("prefix_allowed_tokens_fn", why)
    kwargs = {name: value for name, value in kwargs.items() if name not in ARGUMENTS}
    kwargs = _without_token_types(kwargs, inner, padded)
    check_values(kwargs)
    _refuse_greedy_samples(kwargs, generation_config, inner)
    lengths = (kwargs.get("max_length"), getattr(generation_config, "max_length", None))
    has_default_length = all(value is None for value in (*lengths, inner.generation_config.max_length))
    asked = {name: value for name, value in kwargs.items() if name not in REFUSED_ARGUMENTS}
    config, leftover = inner._prepare_generation_config(generation_config, **asked)
    for name in leftover:
        if name not in ("output_attentions", "output_hidden_states") and leftover[name] is not None:
            known = [each for each in vars(config) if not each.startswith("_")]
            raise unknown_option(name, [*known, "input_ids", "attention_mask", *ARGUMENTS, *REFUSED_ARGUMENTS], inner)
    _refuse_fields(config, HONOURED if padded is None else HONOURED | FOR_TENSORS)
    check_values(vars(config))
    check_sampling(config)
    warn_of_options(config, asked, generation_config, notices)
    if has_default_length and config.max_new_tokens is None:
        notices(
            "length",
            f"no length was given, so {config.max_length} new tokens are generated for each prompt, "
            "which is generate's default. Set `max_new_tokens`",
        )
    if padded is not None:
        _leave_out_the_padding(config, padded.width, has_default_length, inner)
    inner._prepare_special_tokens(
        config,
        kwargs_has_attention_mask=padded is None or padded.mask is not None,  # else transformers may have a warning
        device=inner.device,
        batch_size=None if padded is None else len(padded.ids),
    )
    eos, pad = config._eos_token_tensor, config._pad_token_tensor
    options = Options(
        config=config,
        eos_token_ids=frozenset(() if eos is None else eos.tolist()),
        pad_token_id=None if pad is None else int(pad),
        do_sample=bool(config.do_sample),
        num_return_sequences=config.num_return_sequences or 1,
        has_default_length=has_default_length and padded is None,
        given=given,
    )
    # Processors check their own values (a temperature of 0, say) when they are made: now rather than after a prefill.
    make_processors(inner, options, 1, 1)
    return options


def resolve_each(
    model: nn.Module,
    generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
    kwargs: dict[str, Any],
    padded: PaddedBatch | None = None,
    notices: Notices | None = None,
) -> list[Options]:
    """The options of each prompt, where a list of configs was given; else of all of them, as a list of one.

    Prompts with the same config have the same Options.
    """
    if not isinstance(generation_config, list | tuple):
        return [resolve_options(model, generation_config, kwargs, padded, notices)]
    if padded is not None:
        why = "is a list, which goes with a list of prompts: with tensors pass one GenerationConfig"
        raise UnsupportedOptionError("generation_config", why)
    resolved: dict[int, Options] = {}
    for config in generation_config:
        if id(config) not in resolved:
            resolved[id(config)] = resolve_options(model, config, kwargs, None, notices)
    return [resolved[id(config)] for config in generation_config]


def inferred_mask(model: nn.Module, options: Options, padded: PaddedBatch) -> torch.Tensor:
    """The mask that ``generate`` makes up where none is passed: pad tokens are padding, unless they are EOS, too."""
    inner = base_model(model)
    return inner._prepare_attention_mask_for_generation(padded.ids.long().to(inner.device), options.config, {})


def make_processors(
    model: PreTrainedModel,
    options: Options,
    prompt_tokens: int,
    max_new_tokens: int,
    *,
    given: Given | None = None,
    prompt: torch.Tensor | None = None,  # [1, prompt_tokens]
) -> LogitsProcessorList:
    """transformers' own, in its order, for prompts of one length, and among them those that were passed as a list.

    ``given``: what belongs to one sequence of that which was given for all; ``prompt``: its tokens, of which some
    processors make a table.
    """
    given = given or options.given
    prompt = torch.zeros(1, 1, dtype=torch.long) if prompt is None else prompt
    return model._get_logits_processor(
        generation_config=config_for_prompt(options, prompt_tokens, max_new_tokens),
        input_ids_seq_length=prompt_tokens,
        encoder_input_ids=prompt.to(model.device),
        prefix_allowed_tokens_fn=given.prefix_allowed_tokens_fn,
        logits_processor=LogitsProcessorList(listed(given.logits_processor) or ()),
        device=model.device,
        model_kwargs={},
        negative_prompt_ids=given.negative_prompt_ids,
        negative_prompt_attention_mask=given.negative_prompt_attention_mask,
    )


def config_for_prompt(options: Options, prompt_tokens: int, max_new_tokens: int) -> GenerationConfig:
    """The config as ``generate`` would have it for one prompt: lengths count that prompt's own tokens."""
    config = copy.copy(options.config)
    config.max_length = prompt_tokens + max_new_tokens
    if config.min_new_tokens is not None:
        config.min_length = config.min_new_tokens + prompt_tokens
    return config


def _leave_out_the_padding(config: GenerationConfig, width: int, default: bool, model: PreTrainedModel) -> None:
    """Limits that ``generate`` counts from the padded width, as numbers of new tokens: the same for every row."""
    if config.max_new_tokens is None:
        limit = config.max_length
        if default:
            limit = min(limit + width, getattr(model.config, "max_position_embeddings", None) or limit + width)
        if limit <= width:
            why = f"{type(model).__name__} has {limit:,} positions" if default else f"`max_length` is {limit:,}"
            raise ValueError(
                f"the input is {width:,} tokens wide, padding included, and {why}: increase `max_length` or, better, "
                "set `max_new_tokens`"
            )
        config.max_new_tokens = limit - width
    if config.min_new_tokens is None and config.min_length:
        config.min_new_tokens = max(config.min_length - width, 0)
    config.min_length = 0


def _refuse_arguments(kwargs: dict[str, Any], model: PreTrainedModel) -> None:
    for name, why in REFUSED_ARGUMENTS.items():
        value = kwargs.get(name)
        if value is None or value is False or (isinstance(value, list | tuple) and not value):
            continue  # nothing is asked for
        raise UnsupportedOptionError(name, why)
    if model._extract_generation_mode_kwargs(None, {}, None, None, None)["synced_gpus"]:  # by default, with ZeRO-3
        raise UnsupportedOptionError("synced_gpus", REFUSED_ARGUMENTS["synced_gpus"])


def _without_token_types(kwargs: dict[str, Any], model: PreTrainedModel, padded: PaddedBatch | None) -> dict[str, Any]:
    """Many tokenizers add ``token_type_ids``. All zeros tell a model without token types nothing; else they matter."""
    given = kwargs.get("token_type_ids")
    if given is None:
        return kwargs
    if padded is None:
        raise UnsupportedOptionError("token_type_ids", "goes with tensors (`input_ids=`): leave it out")
    name = type(model).__name__
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        raise UnsupportedOptionError(
            "token_type_ids", f"is not supported: it would change what {name} computes. Leave it out if it need not"
        )
    if torch.as_tensor(given).any():
        raise UnsupportedOptionError("token_type_ids", f"has no meaning to {name}: leave it out")
    return {option: value for option, value in kwargs.items() if option != "token_type_ids"}


def _refuse_fields(config: GenerationConfig, honoured: frozenset[str]) -> None:
    neutral = config._get_default_generation_params()
    # Names that transformers does not know either are a checkpoint's own notes; ``generate`` carries them along, too.
    for name in vars(GenerationConfig()):
        value = getattr(config, name, None)
        if name.startswith("_") or name in honoured or name in WITHOUT_EFFECT:
            continue
        if value is None or value is False or (name in neutral and value == neutral[name]):
            continue
        if (isinstance(value, list | tuple | dict) and not value) or (name == "penalty_alpha" and value == 0):
            continue  # nothing is asked for
        if name == "guidance_scale" and value == 1:
            continue
        raise UnsupportedOptionError(name, f"{_REASONS.get(name, 'is not supported yet')} (it is set to {value!r})")


def _refuse_greedy_samples(kwargs: dict[str, Any], given: GenerationConfig | None, model: PreTrainedModel) -> None:
    def resolved(name: str) -> Any:
        values = (kwargs.get(name), getattr(given, name, None), getattr(model.generation_config, name, None))
        return next((value for value in values if value is not None), None)

    samples = resolved("num_return_sequences") or 1
    if samples > 1 and not resolved("do_sample") and (resolved("num_beams") or 1) == 1:
        why = f"is {samples}, and greedy decoding gives one sequence for each prompt: set `do_sample=True`"
        raise OptionValueError("num_return_sequences", why)
