"""Which options the device can serve by itself, as which recipe, and why not the others.

The processors that transformers makes of the options are compared, attribute by attribute, with those expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import LogitsProcessor
from transformers.generation import logits_process as processors

from ..inputs.base_model import base_model
from ..inputs.options import Options, make_processors
from ..kernel_check.trust import failed_check
from ..kernels.lists.sampling_recipes import Recipe
from .logit_edits import LogitEdits, edits_of
from .processor_chains import MINIMUM_LENGTHS

MOST_OF_TOP_H = 100  # tokens that transformers looks at, and so the most that stay
_KEPT_BYTES = 512 << 20  # at most, of the tokens that requests have had
_COST = "by transformers' own code, for which the host waits after each step: steps are not queued ahead"
_CUTTING = (processors.TopKLogitsWarper, processors.TopPLogitsWarper, processors.MinPLogitsWarper)
_ARGUMENTS_THAT_PICK = ("logits_processor", "prefix_allowed_tokens_fn")

# The option for which transformers makes each processor, for messages; they name others by their class.
_OPTION_OF = {
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "LogitNormalization": "renormalize_logits",
    "MinLengthLogitsProcessor": "min_length",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "MinPLogitsWarper": "min_p",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "TemperatureLogitsWarper": "temperature",
    "TopHLogitsWarper": "top_h",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "TypicalLogitsWarper": "typical_p",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "WatermarkLogitsProcessor": "watermarking_config",
}


def recipe_of(options: Options) -> Recipe:
    config = options.config
    penalty = 1.0 if config.repetition_penalty is None else config.repetition_penalty
    if not options.do_sample:
        return Recipe(penalty, temperature=0)
    return Recipe(
        penalty,
        1.0 if config.temperature is None else config.temperature,
        config.top_k or None,
        None if config.top_p is None or config.top_p >= 1 else float(config.top_p),
        config.min_p,
        None if config.typical_p is None or config.typical_p >= 1 else float(config.typical_p),
        _share(config.epsilon_cutoff),
        _share(config.eta_cutoff),
        None if config.top_h is None else float(config.top_h),
    )


def cuts_of(warpers: Sequence[LogitsProcessor], options: Options) -> tuple[int, Recipe] | None:
    """From which of a row's last processors on kernels do the same, and as which recipe.

    None where nothing cuts, or where it takes transformers' own code.
    """
    recipe = replace(recipe_of(options), penalty=1.0)
    expected = _warpers_of(recipe)
    own = [each for each in warpers if type(each) is not processors.LogitNormalization]  # changes no token's chances
    begin = next((place for place, each in enumerate(own) if type(each) in expected), len(own))
    if not {*expected} & {*_CUTTING} or not {*expected} <= {*_CUTTING, processors.TemperatureLogitsWarper}:
        return None
    if [type(each) for each in own[begin:]] != list(expected) or own[:begin] != list(warpers[:begin]):
        return None
    if any(getattr(each, name, None) != value for each in own[begin:] for name, value in expected[type(each)].items()):
        return None
    return begin, recipe


def _share(value: float | None) -> float | None:
    return float(value) if value is not None and 0 < value < 1 else None


def _warpers_of(recipe: Recipe) -> dict[type[LogitsProcessor], dict[str, Any]]:
    """The processors that transformers makes for a recipe, with their attributes."""
    plain = {"filter_value": -float("inf"), "min_tokens_to_keep": 1}
    penalty = {"penalty": recipe.penalty, "prompt_ignore_length": None}
    warm = recipe.temperature not in (0, 1)
    every: list[tuple[bool, type[LogitsProcessor], dict[str, Any]]] = [
        (recipe.penalty != 1, processors.RepetitionPenaltyLogitsProcessor, penalty),
        (warm, processors.TemperatureLogitsWarper, {"temperature": recipe.temperature}),
        (
            recipe.top_h is not None,
            processors.TopHLogitsWarper,
            {"top_h": recipe.top_h, "top_n": MOST_OF_TOP_H, "filter_value": -float("inf")},
        ),
        (recipe.top_k is not None, processors.TopKLogitsWarper, {"top_k": recipe.top_k, **plain}),
        (recipe.top_p is not None, processors.TopPLogitsWarper, {"top_p": recipe.top_p, **plain}),
        (recipe.min_p is not None, processors.MinPLogitsWarper, {"min_p": recipe.min_p, **plain}),
        (recipe.typical_p is not None, processors.TypicalLogitsWarper, {"mass": recipe.typical_p, **plain}),
        (recipe.epsilon is not None, processors.EpsilonLogitsWarper, {"epsilon": recipe.epsilon, **plain}),
        (recipe.eta is not None, processors.EtaLogitsWarper, {"epsilon": recipe.eta, **plain}),
    ]
    return {kind: values for asked, kind, values in every if asked}


# What the device does, in the order in which transformers does it.
_IN_ORDER = (
    processors.SequenceBiasLogitsProcessor,
    processors.EncoderRepetitionPenaltyLogitsProcessor,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.EncoderNoRepeatNGramLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    *MINIMUM_LENGTHS,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor,
    processors.ExponentialDecayLengthPenalty,
    processors.SuppressTokensLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
    processors.TemperatureLogitsWarper,
    processors.TopHLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.LogitNormalization,  # changes no token's chances
)


_known: WeakKeyDictionary[Options, tuple[int, LogitEdits | str]] = WeakKeyDictionary()


def edits_or_why_not(options: Options, model: nn.Module, vocabulary: int) -> LogitEdits | str:
    """What is done to single logits; or which option needs transformers' own code, and what that costs.

    The processors that transformers makes of the options are compared, attribute by attribute, with those expected.
    """
    if options not in _known or _known[options][0] != vocabulary:
        _known[options] = vocabulary, _edits_or_why_not(options, model, vocabulary)
    return _known[options][1]


def why_not_on_device(options: Options, model: nn.Module, vocabulary: int) -> str | None:
    """Which option needs transformers' own code, and what that costs; None if tokens can be picked on the device."""
    found = edits_or_why_not(options, model, vocabulary)
    return found if isinstance(found, str) else None


def _edits_or_why_not(options: Options, model: nn.Module, vocabulary: int) -> LogitEdits | str:
    for name in _ARGUMENTS_THAT_PICK:
        if getattr(options.arguments, name):
            return f"`{name}` is worked out {_COST}"
    expected = _warpers_of(recipe_of(options))
    made = make_processors(base_model(model), options, 1, 1)
    for processor in made:
        known = type(processor) in _IN_ORDER
        values = expected.get(type(processor), {})
        if not known or any(getattr(processor, name, None) != value for name, value in values.items()):
            return _why_not(processor)
    present = [type(processor) for processor in made]
    in_order = sorted(present, key=_IN_ORDER.index) == present and len(set(present)) == len(present)
    warpers = {kind for kind in present if kind in _ALL_WARPERS}
    if not in_order or warpers != set(expected):
        return f"this transformers has an order of its own for sampling options, which are worked out {_COST}"
    if processors.TopHLogitsWarper in warpers and warpers & _AFTER_TOP_H:  # they see what it has left, and only that
        return _why_not(next(each for each in made if type(each) is processors.TopHLogitsWarper))
    edits = edits_of(made, vocabulary)
    return edits if isinstance(edits, LogitEdits) else _why_not(edits)


_ALL_WARPERS = set(_warpers_of(Recipe(2.0, 2.0, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5)))
_AFTER_TOP_H = {
    processors.TopPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
}


def _why_not(processor: LogitsProcessor) -> str:
    name = type(processor).__name__
    return f"{f'`{_OPTION_OF[name]}`' if name in _OPTION_OF else name} is worked out {_COST}"


def why_picked_by_host(
    kinds: Sequence[Options],
    model: nn.Module,
    device: torch.device,
    depth: int,
    kept_bytes: int,
    vocabulary: int,
    *,
    amd: bool = False,
) -> str | None:
    """Why tokens are picked by the host; None if they are picked on the device.

    ``kinds``: the different options of a call. ``kept_bytes``: what the device would keep of the tokens that its
    sequences have had.
    """
    if not kinds:  # no prompt can be run
        return None
    if device.type == "cuda" and failed_check("sampling", device, amd=amd):  # its references fit into no CUDA graph
        return "the kernels that pick tokens failed their check on this card"
    # Without kernels the host cuts distributions in less time, and needs no float64 of the device.
    if not may_pick_on(device, amd) and (depth == 1 or any(options.do_sample for options in kinds)):
        return "on a CPU there is nothing to gain"
    for options in kinds:
        reason = why_not_on_device(options, model, vocabulary)
        if reason is not None:
            return reason if len(kinds) == 1 else f"{reason}. This holds for all prompts of the call"
    if not may_keep(kept_bytes):
        return (
            f"what penalties and forbidden repetitions have to look back at would take more than {_KEPT_BYTES >> 20} "
            "MB on the device, so the host works them out, for which it waits after each step: pass fewer prompts at a "
            "time"
        )
    return None


def may_keep(kept_bytes: int) -> bool:
    """Whether so much may be kept on the device of the tokens that sequences have had."""
    return kept_bytes <= _KEPT_BYTES


def may_pick_on(device: torch.device, amd: bool = False) -> bool:
    """Whether sampled tokens are picked on the device where the options allow it."""
    return device.type == "cuda" and not failed_check("sampling", device, amd=amd)


def penalised_by(options: Options) -> bool:
    return recipe_of(options).penalty != 1


def minimum_of(options: Options, prompt_tokens: int) -> int:
    """How many new tokens must come before EOS."""
    config = options.config
    if config.min_new_tokens is not None:
        return int(config.min_new_tokens)  # as in ``generate``, it takes the place of min_length
    return max(0, (config.min_length or 0) - prompt_tokens)
