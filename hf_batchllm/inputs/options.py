"""What becomes of each option of ``model.generate``: honoured, without effect here, or refused by name.

transformers itself resolves defaults (``model.generation_config``, then the config passed, then keyword arguments);
this module looks at the outcome and at nothing else.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..errors import OptionValueError, UnsupportedOptionError
from ..notices import Notices
from ..wording import shown
from .base_model import base_model
from .given import ARGUMENTS, Given
from .option_checks import (
    check_generation_config,
    check_given,
    check_sampling,
    check_values,
    unknown_field,
    unknown_option,
    warn_of_options,
)
from .option_row import Fate, OptionKind, OptionRow, With
from .option_table import TABLE, names
from .padded_batch import PaddedBatch
from .user_callables import listed

_ARGUMENTS = names(kind=OptionKind.ARGUMENT) | names(kind=OptionKind.OURS)
_FIELDS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
_METADATA = ("_from_model_config", "_original_object_hash", "_commit_hash", "transformers_version")
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")


@dataclass(frozen=True, eq=False)
class Options:
    """The options of some prompts of a call, resolved."""

    config: GenerationConfig  # transformers' own, all defaults filled in; a copy
    eos_token_ids: frozenset[int]
    pad_token_id: int | None  # the first EOS where none was set
    do_sample: bool
    num_return_sequences: int
    has_default_length: bool  # no length was given anywhere
    num_beams: int = 1
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
    check_generation_config(generation_config)
    inner = base_model(model)
    return _resolve(inner, generation_config, *_arguments(kwargs, inner, padded), padded, notices or Notices())


def resolve_each(
    model: nn.Module,
    generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
    kwargs: dict[str, Any],
    padded: PaddedBatch | None = None,
    notices: Notices | None = None,
) -> list[Options]:
    """The options of each prompt, where a list of configs was given; else of all of them, as a list of one.

    Prompts whose configs are equal have the same Options.
    """
    if not isinstance(generation_config, list | tuple):
        return [resolve_options(model, generation_config, kwargs, padded, notices)]
    if padded is not None:
        why = "is a list, which goes with a list of prompts: with tensors pass one GenerationConfig"
        raise UnsupportedOptionError("generation_config", why)
    inner, notices = base_model(model), notices or Notices()
    given, asked = _arguments(kwargs, inner, None)
    known: dict[Hashable, Options] = {}
    resolved: list[Options] = []
    for place, config in enumerate(generation_config):
        check_generation_config(config, f"generation_config[{place}]")
        key = _content(config)
        if key not in known:
            try:
                known[key] = _resolve(inner, config, given, asked, None, notices)
            except ValueError as error:
                if getattr(error, "option", None) not in kwargs:
                    error.args = (f"generation_config[{place}]: {error}",)
                raise
        resolved.append(known[key])
    return resolved


def _arguments(
    kwargs: dict[str, Any], model: PreTrainedModel, padded: PaddedBatch | None
) -> tuple[Given, dict[str, Any]]:
    """A call's keyword arguments, checked: those that are no fields of a GenerationConfig, then the others."""
    kwargs = _without_token_types(kwargs, model, padded)
    for name, value in kwargs.items():
        row = TABLE.get(name)
        if row is not None and row.kind is not OptionKind.FIELD and row.asks(value):
            _refuse(row, padded)
    if model._extract_generation_mode_kwargs(None, {}, None, None, None)["synced_gpus"]:  # by default, with ZeRO-3
        _refuse(TABLE["synced_gpus"], padded)
    given = Given(**{name: kwargs.get(name) for name in ARGUMENTS})
    check_given(given)
    asked = {name: value for name, value in kwargs.items() if name not in ARGUMENTS}
    check_values(asked)
    return given, asked


def _resolve(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None,
    given: Given,
    asked: dict[str, Any],
    padded: PaddedBatch | None,
    notices: Notices,
) -> Options:
    _refuse_samples(asked, generation_config, model)
    lengths = (asked.get("max_length"), getattr(generation_config, "max_length", None))
    has_default_length = all(value is None for value in (*lengths, model.generation_config.max_length))
    own = {name: value for name, value in asked.items() if name not in _ARGUMENTS}
    config, leftover = model._prepare_generation_config(generation_config, **own)
    for name, value in leftover.items():
        if name not in TABLE and value is not None:
            raise unknown_option(name, model)

    def was_asked(name: str) -> bool:
        """For in this call. A checkpoint's own defaults are nobody's mistake."""
        value = getattr(generation_config, name, None)
        return asked.get(name) is not None or (
            value is not None and _frozen(value) != _frozen(getattr(model.generation_config, name, None))
        )

    _refuse_fields(config, was_asked, padded)
    check_values(vars(config))
    check_sampling(config)
    warn_of_options(config, asked, was_asked, notices)
    if has_default_length and config.max_new_tokens is None:
        notices(
            "length",
            f"no length was given, so {config.max_length} new tokens are generated for each prompt, "
            "which is generate's default. Set `max_new_tokens`",
        )
    if padded is not None:
        _leave_out_the_padding(config, padded.width, has_default_length, model)
    if padded is None or not config.return_dict_in_generate:  # then nothing of it would come back
        for name in _OUTPUTS:
            setattr(config, name, False)
    model._prepare_special_tokens(
        config,
        kwargs_has_attention_mask=padded is None or padded.mask is not None,  # else transformers may have a warning
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
        given=given,
    )
    # Processors check their own values (a temperature of 0, say) when they are made: now rather than after a prefill.
    make_processors(model, options, 1, 1)
    return options


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
        logits_processor=LogitsProcessorList(listed(given.logits_processor)),
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


def _refuse(row: OptionRow, padded: PaddedBatch | None, set_to: str = "") -> None:
    """If it cannot be honoured, or not for prompts of this kind."""
    if row.fate is Fate.REFUSED:
        raise UnsupportedOptionError(row.name, row.doc + set_to)
    if row.goes_with is (With.TENSORS if padded is None else With.LISTS):
        raise UnsupportedOptionError(row.name, row.instead)


def _refuse_fields(config: GenerationConfig, was_asked: Callable[[str], bool], padded: PaddedBatch | None) -> None:
    # Names that transformers does not know either are a checkpoint's own notes; ``generate`` carries them along, too.
    for name in _FIELDS:
        value = getattr(config, name, None)
        if value is None or value is False:
            continue
        row = TABLE.get(name)
        if row is None:
            if value != config._get_default_generation_params().get(name):
                raise unknown_field(name, value)
        elif row.asks(value) and (row.fate is Fate.REFUSED or was_asked(name)):
            _refuse(row, padded, f" (it is set to {shown(value)})")


def _refuse_samples(kwargs: dict[str, Any], given: GenerationConfig | None, model: PreTrainedModel) -> None:
    def resolved(name: str) -> Any:
        values = (kwargs.get(name), getattr(given, name, None), getattr(model.generation_config, name, None))
        return next((value for value in values if value is not None), None)

    samples = resolved("num_return_sequences") or 1
    beams = resolved("num_beams") or 1
    if beams > 1 and samples > beams:
        why = f"is {samples:,}, and there are {beams:,} beams, each of which can give one answer: raise `num_beams`"
        raise OptionValueError("num_return_sequences", why)
    if samples > 1 and not resolved("do_sample") and beams == 1:
        why = f"is {samples}, and greedy decoding gives one sequence for each prompt: set `do_sample=True`"
        raise OptionValueError("num_return_sequences", why)


def _content(config: GenerationConfig) -> Hashable:
    """Equal for equal configs. (Those of transformers compare and hash by their JSON, which takes far longer.)"""
    return tuple(
        (name, _frozen(value)) for name, value in vars(config).items() if value is not None and name not in _METADATA
    )


def _frozen(value: Any) -> Hashable:
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, dict):
        return dict, tuple((_frozen(key), _frozen(each)) for key, each in value.items())
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, _frozen(value.tolist())
    if isinstance(value, np.ndarray):
        return np.ndarray, value.dtype, _frozen(value.tolist())
    if hasattr(value, "to_dict"):  # a watermarking config, say
        return type(value), _frozen(value.to_dict())
    # By its type, too: 1, 1.0 and True are not all the same to an option.
    return (type(value), value) if isinstance(value, int | float | str | np.generic) else id(value)
