"""From logits to tokens without the host: nothing is read back, and a CUDA graph can hold it.

Tokens are drawn from the same distribution as with transformers' processors; ``why_not_on_device`` says which options
need transformers' own code instead. Noise depends on (seed, prompt, sample, tokens made so far, token) alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LogitsProcessor
from transformers.generation import logits_process as processors

from ..inputs.base_model import base_model
from ..inputs.options import Options, make_processors
from ..inputs.seeds import as_int64
from ..kernel_check.trust import failed_check
from ..kernels.sampling_recipes import Recipe, RecipeTable, RowRecipes
from ..model.transfers import to_device
from .processor_chains import MINIMUM_LENGTHS
from .sampling_kernels import SamplingKernels

_SEEN_BYTES = 512 << 20  # at most, for a bit for each token that a request may have had
_WORD = 32  # tokens in each word of a row's bits
_COST = "by transformers' own code, for which the host waits after each step: steps are not queued ahead"
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


@dataclass(frozen=True)
class RowsState:
    """What a DeviceSampler has to know of the rows of ``logits``, on their device. Each is [rows], but for ``seen``.

    ``kind``, ``minimum`` and ``seen`` are only needed where ``DeviceSampler.needs_...`` says so.
    """

    prompt: torch.Tensor  # int32 or int64  the prompt's number among those with the same seed
    sample: torch.Tensor  # int32 or int64  the number of the prompt's sample
    made: torch.Tensor  # int32 or int64  tokens generated so far
    kind: torch.Tensor | None = None  # int32  the number of the row's options in ``DeviceSampler.kinds``
    minimum: torch.Tensor | None = None  # int32  tokens that a row must have before EOS
    line: torch.Tensor | None = None  # int32  the row's line in ``seen``, -1 if it needs none; None: line i for row i
    seen: torch.Tensor | None = None  # [lines, words] int32  a bit for each token of the vocabulary
    seed: torch.Tensor | None = None  # int64  where rows have seeds of their own


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
    )


def _processors_of(recipe: Recipe) -> dict[type[LogitsProcessor], dict[str, Any]]:
    """The processors that transformers makes for a recipe, in its order, with their attributes.

    Processors of minimum lengths are always among them.
    """
    plain = {"filter_value": -float("inf"), "min_tokens_to_keep": 1}
    penalty = {"penalty": recipe.penalty, "prompt_ignore_length": None}
    warm = recipe.temperature not in (0, 1)
    every: list[tuple[bool, type[LogitsProcessor], dict[str, Any]]] = [
        (recipe.penalty != 1, processors.RepetitionPenaltyLogitsProcessor, penalty),
        *((True, minimum, {}) for minimum in MINIMUM_LENGTHS),
        (warm, processors.TemperatureLogitsWarper, {"temperature": recipe.temperature}),
        (recipe.top_k is not None, processors.TopKLogitsWarper, {"top_k": recipe.top_k, **plain}),
        (recipe.top_p is not None, processors.TopPLogitsWarper, {"top_p": recipe.top_p, **plain}),
        (recipe.min_p is not None, processors.MinPLogitsWarper, {"min_p": recipe.min_p, **plain}),
    ]
    return {kind: values for asked, kind, values in every if asked}


def why_not_on_device(options: Options, model: nn.Module) -> str | None:
    """Which option needs transformers' own code, and what that costs; None if tokens can be picked on the device.

    The processors that transformers makes of the options are compared, attribute by attribute, with those expected.
    """
    for name in _ARGUMENTS_THAT_PICK:
        if getattr(options.arguments, name):
            return f"`{name}` is worked out {_COST}"
    expected = _processors_of(recipe_of(options))
    made = make_processors(base_model(model), options, 1, 1)
    for processor in made:
        values = expected.get(type(processor))
        if values is None or any(getattr(processor, name, None) != value for name, value in values.items()):
            name = type(processor).__name__
            return f"{f'`{_OPTION_OF[name]}`' if name in _OPTION_OF else name} is worked out {_COST}"
    present = [type(processor) for processor in made]
    if present != [kind for kind in expected if kind in present or kind not in MINIMUM_LENGTHS]:
        return f"this transformers has an order of its own for sampling options, which are worked out {_COST}"
    return None


def why_picked_by_host(
    kinds: Sequence[Options],
    model: nn.Module,
    device: torch.device,
    depth: int,
    penalised: int,
    vocabulary: int,
    *,
    amd: bool = False,
) -> str | None:
    """Why tokens are picked by the host; None if they are picked on the device.

    ``kinds``: the different options of a call. ``penalised``: how many of its sequences have a repetition penalty.
    """
    if not kinds:  # no prompt can be run
        return None
    if device.type == "cuda" and failed_check("sampling", device, amd=amd):  # its twins fit into no CUDA graph
        return "the kernels that pick tokens failed their check on this card"
    # On a CPU, sampled tokens have a noise of their own.
    if not may_pick_on(device, amd) and (depth == 1 or any(options.do_sample for options in kinds)):
        return "on a CPU there is nothing to gain"
    if penalised * vocabulary > 8 * _SEEN_BYTES:
        return (
            f"`repetition_penalty` over {penalised:,} sequences would take more than {_SEEN_BYTES >> 20} MB on the "
            "device, so the host works it out, for which it waits after each step: pass fewer prompts at a time"
        )
    for options in kinds:
        reason = why_not_on_device(options, model)
        if reason is not None:
            return reason if len(kinds) == 1 else f"{reason}. This holds for all prompts of the call"
    return None


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


class DeviceSampler:
    """Picks the next token of each row.

    ``kinds``: all options that rows may have; ``why_not_on_device`` is None for each. Options that pick tokens in the
    same way get the same number. ``seed``: of rows without a seed of their own.
    """

    def __init__(
        self,
        kinds: Iterable[Options],
        seed: int | None,
        vocabulary: int,
        device: torch.device | str,
        kernels: SamplingKernels,
    ) -> None:
        self._kernels = kernels
        self.vocabulary = vocabulary
        numbers: dict[tuple[Recipe, tuple[int, ...]], int] = {}
        self.kinds: dict[Options, int] = {}
        for options in kinds:
            way = recipe_of(options), self._held_back(options)
            self.kinds[options] = numbers.setdefault(way, len(numbers))
        recipes = [recipe for recipe, _ in numbers]
        self._recipe = recipes[0]
        self._table = RecipeTable(recipes, vocabulary, device) if len(recipes) > 1 else None
        self._draws = any(recipe.temperature for recipe in recipes)
        self._cuts = any(recipe.cuts(vocabulary) for recipe in recipes)
        self.needs_kind = self._table is not None
        self.needs_seen = any(recipe.penalty != 1 for recipe in recipes)
        held_back = [tokens for _, tokens in numbers]
        most = max(map(len, held_back))
        self.needs_minimum = most > 0
        padded = [[*tokens, *[-1] * (most - len(tokens))] for tokens in held_back]
        device = torch.device(device)
        with torch.inference_mode(False):  # steps may run outside it
            self._eos = to_device(np.array(padded if self.needs_kind else padded[0], dtype=np.int64), device)
            self._seed = to_device(np.array([as_int64(seed or 0)], dtype=np.int64), device)

    def _held_back(self, options: Options) -> tuple[int, ...]:
        """The tokens that may not come before a minimum length."""
        if not (options.config.min_new_tokens or options.config.min_length):
            return ()
        return tuple(token for token in sorted(options.eos_token_ids) if 0 <= token < self.vocabulary)

    def seen(self, ids: np.ndarray) -> np.ndarray:  # [words] int32
        """The bits of the tokens that a row starts with."""
        found = np.zeros(-(-self.vocabulary // _WORD) * _WORD, dtype=bool)
        found[ids[(ids >= 0) & (ids < self.vocabulary)]] = True
        return np.packbits(found, bitorder="little").view("<i4")

    def __call__(self, logits: torch.Tensor, rows: RowsState, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tokens [rows] int64 for ``logits`` [rows, vocabulary], which stay as they are; ``rows.seen`` gets them.

        Sampling gives -1 for a row whose logits are NaN, infinite, or all -inf; ``advance`` ends such a row. Greedy
        takes the lowest token of the best ones, and NaN counts as infinity.
        """
        assert logits.shape[1] == self.vocabulary
        recipe, kernels = self._recipe, self._kernels
        by_row = None
        if self._table is not None:
            assert rows.kind is not None
            by_row = RowRecipes(self._table, rows.kind)
        if self.needs_seen or self.needs_minimum:
            looking_back: dict[str, Any] = {"by_row": by_row}
            if self.needs_seen:
                assert rows.seen is not None
                looking_back |= {"seen": rows.seen, "line": rows.line, "penalty": recipe.penalty}
            if self.needs_minimum:
                assert rows.minimum is not None
                looking_back |= {"eos": self._eos, "made": rows.made, "minimum": rows.minimum}
            logits = kernels.penalise(logits, **looking_back)
        if not self._draws:
            tokens = kernels.greedy(logits, out=out)
        else:
            threshold = None
            if self._cuts:
                threshold = kernels.cutoffs(
                    logits,
                    temperature=recipe.temperature,
                    top_k=recipe.top_k,
                    top_p=recipe.top_p,
                    min_p=recipe.min_p,
                    by_row=by_row,
                )
            tokens = kernels.gumbel_sample(
                logits,
                recipe.temperature if by_row is None else by_row,
                self._seed if rows.seed is None else rows.seed,
                rows.prompt,
                rows.sample,
                rows.made,
                threshold=threshold,
                out=out,
            )
        if self.needs_seen:
            kernels.mark_seen(rows.seen, tokens, self.vocabulary, rows.line)
        return tokens
