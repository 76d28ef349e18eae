"""From logits to tokens without the host: nothing is read back, and a CUDA graph can hold it.

Tokens are drawn from the same distribution as with transformers' processors; ``why_not_on_device`` says which options
need transformers' own code instead. Noise depends on (seed, prompt, sample, tokens made so far, token) alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

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
from ..kernels.token_edits import History
from ..model.transfers import to_device
from .logit_edits import EditTables, LogitEdits, edits_of
from .processor_chains import MINIMUM_LENGTHS
from .sampling_kernels import SamplingKernels

_KEPT_BYTES = 512 << 20  # at most, of the tokens that requests have had
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
    history: History | None = None  # the tokens of each row, where ``DeviceSampler.edits`` look back at them
    prompt_line: torch.Tensor | None = None  # int32  as ``line``, in ``prompt_seen``
    prompt_seen: torch.Tensor | None = None  # [lines, words] int32  as ``seen``, of the prompts alone
    first_at: torch.Tensor | None = None  # int32  the number of new tokens at which the first one is forced; -1: none
    last_at: torch.Tensor | None = None  # int32  the number of new tokens at which the last one is


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
    )


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
    processors.ExponentialDecayLengthPenalty,
    processors.SuppressTokensLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
    processors.TemperatureLogitsWarper,
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
    edits = edits_of(made, vocabulary)
    return edits if isinstance(edits, LogitEdits) else _why_not(edits)


_ALL_WARPERS = set(_warpers_of(Recipe(2.0, 2.0, 1, 0.5, 0.5, 0.5, 0.5, 0.5)))


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
    if device.type == "cuda" and failed_check("sampling", device, amd=amd):  # its twins fit into no CUDA graph
        return "the kernels that pick tokens failed their check on this card"
    # On a CPU, sampled tokens have a noise of their own.
    if not may_pick_on(device, amd) and (depth == 1 or any(options.do_sample for options in kinds)):
        return "on a CPU there is nothing to gain"
    for options in kinds:
        reason = why_not_on_device(options, model, vocabulary)
        if reason is not None:
            return reason if len(kinds) == 1 else f"{reason}. This holds for all prompts of the call"
    if kept_bytes > _KEPT_BYTES:
        return (
            f"what penalties and forbidden repetitions have to look back at would take more than {_KEPT_BYTES >> 20} "
            "MB on the device, so the host works them out, for which it waits after each step: pass fewer prompts at a "
            "time"
        )
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
    same way get the same number. ``seed``: of rows without a seed of their own. ``edits``: what is done to single
    logits, if anything is. ``longest``: new tokens of the longest row.
    ``keeps_scores``: whether ``scores`` [rows, vocabulary] are to hold what the latest tokens were drawn from.
    """

    def __init__(
        self,
        kinds: Iterable[Options],
        seed: int | None,
        vocabulary: int,
        device: torch.device | str,
        kernels: SamplingKernels,
        edits: Mapping[Options, LogitEdits] = MappingProxyType({}),
        longest: int = 1,
        keeps_scores: bool = False,
    ) -> None:
        self._kernels = kernels
        self.vocabulary = vocabulary
        self._keeps_scores = keeps_scores
        self.scores: torch.Tensor | None = None
        numbers: dict[tuple[Recipe, tuple[int, ...], LogitEdits, bool], int] = {}
        self.kinds: dict[Options, int] = {}
        for options in kinds:
            normalised = keeps_scores and bool(options.config.renormalize_logits)
            way = recipe_of(options), self._held_back(options), edits.get(options, LogitEdits()), normalised
            self.kinds[options] = numbers.setdefault(way, len(numbers))
        recipes = [recipe for recipe, *_ in numbers]
        each_edits = [each for _, _, each, _ in numbers]
        self.edits = EditTables(each_edits, vocabulary, longest, torch.device(device))
        self._recipe = recipes[0]
        self._table = RecipeTable(recipes, vocabulary, device) if len(recipes) > 1 else None
        self._draws = any(recipe.temperature for recipe in recipes)
        self._cuts = any(recipe.cuts(vocabulary) for recipe in recipes)
        tails = any(recipe.has_tails for recipe in recipes)
        self._tails = (self._table or RecipeTable(recipes, vocabulary, device)) if tails else None
        self.needs_kind = self._table is not None
        self.needs_seen = any(recipe.penalty != 1 for recipe in recipes)
        held_back = [tokens for _, tokens, *_ in numbers]
        most = max(map(len, held_back))
        self.needs_minimum = most > 0
        padded = [[*tokens, *[-1] * (most - len(tokens))] for tokens in held_back]
        device = torch.device(device)
        with torch.inference_mode(False):  # steps may run outside it
            self._eos = to_device(np.array(padded if self.needs_kind else padded[0], dtype=np.int64), device)
            self._seed = to_device(np.array([as_int64(seed or 0)], dtype=np.int64), device)
            warmth = np.array([recipe.temperature or 1.0 for recipe in recipes], dtype=np.float32)
            self._warmth = to_device(warmth, device) if keeps_scores else None
            which = np.array([each for *_, each in numbers])
            self._normalised = to_device(which, device) if which.any() else None

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
        logits = self._edited(logits, rows, by_row)
        threshold = ceiling = None
        if not self._draws:
            tokens = kernels.greedy(logits, out=out)
        else:
            if self._cuts:
                threshold = kernels.cutoffs(
                    logits,
                    temperature=recipe.temperature,
                    top_k=recipe.top_k,
                    top_p=recipe.top_p,
                    min_p=recipe.min_p,
                    by_row=by_row,
                )
            if self._tails is not None:
                which = rows.kind if self.needs_kind else None
                threshold, ceiling = kernels.tail_cuts(logits, self._tails, which, threshold)
            tokens = kernels.gumbel_sample(
                logits,
                recipe.temperature if by_row is None else by_row,
                self._seed if rows.seed is None else rows.seed,
                rows.prompt,
                rows.sample,
                rows.made,
                threshold=threshold,
                ceiling=ceiling,
                out=out,
            )
        if self._keeps_scores:
            self.scores = self._scores_of(logits, rows.kind, threshold, ceiling)
        if self.needs_seen:
            kernels.mark_seen(rows.seen, tokens, self.vocabulary, rows.line)
        if self.edits.looks_back:
            kernels.append_tokens(rows.history, tokens)
        return tokens

    def _scores_of(
        self,
        edited: torch.Tensor,
        kind: torch.Tensor | None,
        threshold: torch.Tensor | None,
        ceiling: torch.Tensor | None,
    ) -> torch.Tensor:  # [rows, vocabulary] float32
        """What the tokens are drawn from, as ``generate`` has it: after temperature, -inf where something was cut off.

        Among equals at the edge of a nucleus all are left, where transformers leaves some.
        """
        scores = edited.float()
        if self._table is not None:
            assert kind is not None and self._warmth is not None
            scores = scores / self._warmth[kind][:, None]
        elif self._recipe.temperature not in (0, 1):
            scores = scores / self._recipe.temperature
        for edge, beyond in ((threshold, torch.lt), (ceiling, torch.gt)):
            if edge is not None:
                scores = scores.masked_fill(beyond(edited, edge[:, None]), -torch.inf)
        if self._normalised is not None:
            log_probs = scores.log_softmax(dim=-1)
            if kind is None or self._table is None:
                return log_probs
            scores = torch.where(self._normalised[kind][:, None], log_probs, scores)
        return scores

    def _edited(self, logits: torch.Tensor, rows: RowsState, by_row: RowRecipes | None) -> torch.Tensor:
        """Logits in which single ones are changed, in transformers' order: copies, unless nothing is."""
        edits, kernels = self.edits, self._kernels
        which = rows.kind if self.needs_kind else None
        scores = logits.to(torch.float32, copy=True) if edits.any else logits
        own = scores if edits.any else None
        if edits.biased is not None:
            kernels.edit_tokens(scores, edits.biased, which, rows.made, rows.history)
        if edits.prompt_penalties is not None:
            table, of_row = edits.prompt_penalties, torch.zeros_like(rows.prompt, dtype=torch.int32)
            given = RowRecipes(table, of_row if which is None else which)
            kernels.penalise(scores, seen=rows.prompt_seen, line=rows.prompt_line, by_row=given, out=own)
        if self.needs_seen or self.needs_minimum:
            looking_back: dict[str, Any] = {"by_row": by_row, "out": own}
            if self.needs_seen:
                assert rows.seen is not None
                looking_back |= {"seen": rows.seen, "line": rows.line, "penalty": self._recipe.penalty}
            if self.needs_minimum:
                assert rows.minimum is not None
                looking_back |= {"eos": self._eos, "made": rows.made, "minimum": rows.minimum}
            scores = kernels.penalise(scores, **looking_back)
        if edits.no_repeat is not None:
            kernels.ban_repeats(scores, edits.no_repeat, which, rows.history)
        if edits.forbidden is not None:
            kernels.edit_tokens(scores, edits.forbidden, which, rows.made, rows.history)
        if edits.forced is not None:
            kernels.force_tokens(scores, edits.forced, which, rows.made, rows.first_at, rows.last_at)
        if edits.decays is not None:
            kernels.grow_ends(scores, edits.decays, which, rows.made)
        if edits.suppressed is not None:
            kernels.edit_tokens(scores, edits.suppressed, which, rows.made, rows.history)
        return scores
