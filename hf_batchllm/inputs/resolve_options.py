"""A call's options, resolved and checked: honoured, without effect here, or refused by name.

transformers itself resolves defaults (``model.generation_config``, then the config passed, then keyword arguments).
This module checks the outcome by the table of options.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig

from ..errors import OptionValueError, UnsupportedOptionError
from ..notices import Notices
from ..wording import shown
from .base_model import GenerativeModel, base_model
from .call_arguments import CALL_ARGUMENTS, CallArguments
from .config_names import with_known_names
from .option_checks import check_assistant, check_call_arguments, check_generation_config, check_values
from .option_conflicts import check_samples, check_sampling
from .option_row import Fate, OptionKind, OptionRow, PromptForm
from .option_table import TABLE, names
from .option_warnings import not_warned_twice, warn_of_options
from .options import Options, make_processors
from .padded_batch import PaddedBatch
from .unknown_options import unknown_field, unknown_option

_NO_FIELDS = names(kind=OptionKind.ARGUMENT) | names(kind=OptionKind.ADDED)
_FIELDS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
_METADATA = ("_from_model_config", "_original_object_hash", "_commit_hash", "transformers_version")
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")


def resolve_options(
    model: nn.Module,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
    padded: PaddedBatch | None = None,
    notices: Notices | None = None,
) -> Options:
    """The options as ``generate`` resolves them; UnsupportedOptionError for one that cannot be honoured.

    ``padded``: the prompts, if they came as tensors; some lengths then count the padding.
    """
    check_generation_config(generation_config)
    inner = base_model(model)
    return _resolve(inner, generation_config, *_checked_arguments(kwargs, inner, padded), padded, notices or Notices())


def resolve_each(
    model: nn.Module,
    generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
    kwargs: dict[str, Any],
    padded: PaddedBatch | None = None,
    notices: Notices | None = None,
) -> list[Options]:
    """The options of each prompt, where ``generation_config`` is a list; else a list of one, for all prompts.

    Prompts with equal configs share one Options object.
    """
    if generation_config is None or isinstance(generation_config, GenerationConfig):
        return [resolve_options(model, generation_config, kwargs, padded, notices)]
    if not isinstance(generation_config, list | tuple):
        check_generation_config(generation_config)  # raises: it is neither one config nor a list of them
    if padded is not None:
        why = "is a list, which goes with a list of prompts: with tensors pass one GenerationConfig"
        raise UnsupportedOptionError("generation_config", why)
    inner, notices = base_model(model), notices or Notices()
    arguments, fields = _checked_arguments(kwargs, inner, None)
    known: dict[Hashable, Options] = {}
    by_object: dict[int, Options] = {}  # the list holds them all
    resolved: list[Options] = []
    for place, config in enumerate(generation_config):
        if id(config) in by_object:
            resolved.append(by_object[id(config)])
            continue
        check_generation_config(config, f"generation_config[{place}]")
        key = _content_key(config)
        if key not in known:
            try:
                known[key] = _resolve(inner, config, arguments, fields, None, notices)
            except ValueError as error:
                if getattr(error, "option", None) not in kwargs:
                    error.args = (f"generation_config[{place}]: {error}",)
                raise
        by_object[id(config)] = known[key]
        resolved.append(known[key])
    return resolved


def _checked_arguments(
    kwargs: dict[str, Any], model: GenerativeModel, padded: PaddedBatch | None
) -> tuple[CallArguments, dict[str, Any]]:
    """A call's keyword arguments, checked and parted: the CallArguments, and the fields of a GenerationConfig."""
    kwargs = _without_token_types(kwargs, model, padded)
    for name, value in kwargs.items():
        row = TABLE.get(name)
        if row is None or not row.asks(value):
            continue
        if row.kind is not OptionKind.FIELD:
            _refuse(row, padded)
        elif row.fate is Fate.REFUSED:
            _refuse(row, padded, _set_to(value))  # before transformers makes a config of it, and warns
    defaults = model._extract_generation_mode_kwargs(None, {}, None, None, None)
    if defaults["synced_gpus"]:  # transformers' default with ZeRO-3
        _refuse(TABLE["synced_gpus"], padded)
    arguments = CallArguments(**{name: kwargs.get(name) for name in CALL_ARGUMENTS})
    check_call_arguments(arguments)
    check_assistant(arguments.assistant_model, kwargs.get("assistant_tokenizer"), model)
    fields = {name: value for name, value in kwargs.items() if name not in CALL_ARGUMENTS}
    check_values(fields)
    return arguments, fields


def _resolve(
    model: GenerativeModel,
    generation_config: GenerationConfig | None,
    arguments: CallArguments,
    fields: dict[str, Any],
    padded: PaddedBatch | None,
    notices: Notices,
) -> Options:
    generation_config = with_known_names(generation_config, model.generation_config, notices)
    check_samples(fields, generation_config, model)
    lengths = (fields.get("max_length"), getattr(generation_config, "max_length", None))
    has_default_length = all(value is None for value in (*lengths, model.generation_config.max_length))
    own = {name: value for name, value in fields.items() if name not in _NO_FIELDS}
    with not_warned_twice():
        config, leftover = model._prepare_generation_config(generation_config, **own)
    for name, value in leftover.items():
        if name not in TABLE and value is not None:
            raise unknown_option(name, model)

    def was_asked(name: str) -> bool:
        """Whether this call set the option. A checkpoint's own defaults are not the caller's mistake."""
        value = getattr(generation_config, name, None)
        return fields.get(name) is not None or (
            value is not None and _hashable(value) != _hashable(getattr(model.generation_config, name, None))
        )

    _refuse_fields(config, was_asked, padded)
    check_values(vars(config))
    _settle_end_tokens(config, generation_config, fields)
    check_sampling(config)
    warn_of_options(config, fields, was_asked, notices)
    if arguments.assistant_model is None and was_asked("num_assistant_tokens") and config.num_assistant_tokens:
        notices("num_assistant_tokens", "`num_assistant_tokens` has no effect without `assistant_model`")
    if arguments.assistant_model is not None and config.prompt_lookup_num_tokens:
        notices(
            "two drafts", "`assistant_model` has no effect beside `prompt_lookup_num_tokens`: leave one of them out"
        )
    if has_default_length and config.max_new_tokens is None:
        notices(
            "length",
            f"no length was given, so {config.max_length} new tokens are generated for each prompt, "
            "which is generate's default. Set `max_new_tokens`",
        )
    if padded is not None:
        _leave_out_the_padding(config, padded.width, has_default_length, model)
    if padded is None or not config.return_dict_in_generate:  # then these outputs would not be returned
        for name in _OUTPUTS:
            setattr(config, name, False)
    model._prepare_special_tokens(
        config,
        kwargs_has_attention_mask=padded is None or padded.mask is not None,  # without a mask transformers may warn
        device=model.device,
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
        num_beams=config.num_beams or 1,
        arguments=arguments,
    )
    # Processors check their own values (a temperature below 0, say) when they are made: now, not after a prefill.
    return dataclasses.replace(options, scores_are_logits=not make_processors(model, options, 1, 1))


def _leave_out_the_padding(config: GenerationConfig, width: int, default: bool, model: GenerativeModel) -> None:
    """Turn limits that ``generate`` counts from the padded width into numbers of new tokens: the same for every row."""
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


def _without_token_types(kwargs: dict[str, Any], model: GenerativeModel, padded: PaddedBatch | None) -> dict[str, Any]:
    """Drop ``token_type_ids`` that are all zeros, as many tokenizers add, for a model without token types."""
    given = kwargs.get("token_type_ids")
    if given is None:
        return kwargs
    if padded is None:
        raise UnsupportedOptionError("token_type_ids", "goes with tensors (`input_ids=`): leave it out")
    name = type(model).__name__
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        raise UnsupportedOptionError(
            "token_type_ids", f"is not supported: it would change what {name} computes. If it need not, leave it out"
        )
    if torch.as_tensor(given, device="cpu").any():
        raise UnsupportedOptionError("token_type_ids", f"has no meaning to {name}: leave it out")
    return {option: value for option, value in kwargs.items() if option != "token_type_ids"}


def _settle_end_tokens(config: GenerationConfig, given: GenerationConfig | None, fields: dict[str, Any]) -> None:
    """Say ``stop_token_ids`` and ``ignore_eos`` in the ``eos_token_id`` of ``config``, which is the resolved one.

    ``given``: the call's config; ``fields``: the call's keyword arguments, which win over it.
    """

    def asked(name: str) -> Any:
        value = fields.get(name)
        return getattr(given, name, None) if value is None else value

    more, ignored = asked("stop_token_ids"), asked("ignore_eos")
    if not more and not ignored:
        return
    if ignored and fields.get("eos_token_id") is not None:
        raise OptionValueError("ignore_eos", "contradicts `eos_token_id`: keep one of them")
    own = None if ignored else config.eos_token_id
    if isinstance(own, torch.Tensor):
        own = own.tolist()
    listed = [] if own is None else list(own) if isinstance(own, list | tuple) else [own]
    config.eos_token_id = list(dict.fromkeys((*listed, *map(int, more or ())))) or None


def _refuse(row: OptionRow, padded: PaddedBatch | None, set_to: str = "") -> None:
    """Raise if the option is refused, or does not go with prompts in this form."""
    if row.fate is Fate.REFUSED:
        raise UnsupportedOptionError(row.name, row.doc + set_to)
    if row.goes_with is (PromptForm.TENSORS if padded is None else PromptForm.LISTS):
        raise UnsupportedOptionError(row.name, row.instead)


def _refuse_fields(config: GenerationConfig, was_asked: Callable[[str], bool], padded: PaddedBatch | None) -> None:
    # A name beside these is a note of the model's own config: ignored, as by ``generate``.
    for name in _FIELDS:
        value = getattr(config, name, None)
        if value is None or value is False:
            continue
        row = TABLE.get(name)
        if row is None:
            if value != config._get_default_generation_params().get(name):
                raise unknown_field(name, value)
        elif row.asks(value) and (row.fate is Fate.REFUSED or was_asked(name)):
            _refuse(row, padded, _set_to(value))


def _set_to(value: object) -> str:
    return f" (it is set to {shown(value)})"


def _content_key(config: GenerationConfig) -> Hashable:
    """Equal for equal configs. (transformers compares configs by their JSON, which takes far longer.)"""
    return tuple(
        (name, _hashable(value)) for name, value in vars(config).items() if value is not None and name not in _METADATA
    )


def _hashable(value: Any) -> Hashable:
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(map(_hashable, value))
    if isinstance(value, dict):
        return dict, tuple((_hashable(key), _hashable(each)) for key, each in value.items())
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, _hashable(value.tolist())
    if isinstance(value, np.ndarray):
        return np.ndarray, value.dtype, _hashable(value.tolist())
    if hasattr(value, "to_dict"):  # a watermarking config, say
        return type(value), _hashable(value.to_dict())
    # With its type: 1, 1.0 and True may mean different things to an option.
    return (type(value), value) if isinstance(value, int | float | str | np.generic) else id(value)
