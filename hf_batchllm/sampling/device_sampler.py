"""From logits to tokens without the host: nothing is read back, and a CUDA graph can hold it.

Tokens are what transformers' processors and the softmax of their scores ask for; ``why_not`` says which options need
transformers' own code instead. The noise is the kernels': from (seed, prompt, sample, tokens made so far, token) alone.
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
from ..inputs.seeds import signed
from ..kernels.sampling_recipes import Recipe, RecipeTable, RowRecipes
from .sampling_kernels import SamplingKernels

_SEEN_BYTES = 512 << 20  # at most, for the tokens that requests have had
_WORD = 32  # tokens in each word of a row's bits
_COST = "by transformers' own code, for which the host waits after each step: steps are not queued ahead"
_GIVEN = ("logits_processor", "prefix_allowed_tokens_fn")  # arguments that pick tokens

_MINIMA = (processors.MinLengthLogitsProcessor, processors.MinNewTokensLengthLogitsProcessor)

# The options that other processors are made for; a processor that is not here is called by its own name.
_OPTIONS = {
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
    """What sampling has to know of the rows of ``logits``, on their device, each of shape [rows] but for ``seen``.

    ``kind``, ``minimum``, ``line`` and ``seen`` are those of a DeviceSampler, and only needed where it says so.
    """

    prompt: torch.Tensor  # int32 or int64  the prompt's number among all of its seed
    sample: torch.Tensor  # int32 or int64  which of its samples
    made: torch.Tensor  # int32 or int64  tokens generated so far
    kind: torch.Tensor | None = None  # int32  where rows differ: how this one is picked
    minimum: torch.Tensor | None = None  # int32  tokens that a row must have before EOS
    line: torch.Tensor | None = None  # int32  its own in ``seen``, -1 if it needs none; None: as rows stand
    seen: torch.Tensor | None = None  # [lines, words] int32  a bit for each token
    seed: torch.Tensor | None = None  # int64  where not all have that of the DeviceSampler


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
    """Those that transformers makes of it, in its order, with what they hold; those of minimum lengths always."""
    plain = {"filter_value": -float("inf"), "min_tokens_to_keep": 1}
    penalty = {"penalty": recipe.penalty, "prompt_ignore_length": None}
    warm = recipe.temperature not in (0, 1)
    every: list[tuple[bool, type[LogitsProcessor], dict[str, Any]]] = [
        (recipe.penalty != 1, processors.RepetitionPenaltyLogitsProcessor, penalty),
        *((True, minimum, {}) for minimum in _MINIMA),
        (warm, processors.TemperatureLogitsWarper, {"temperature": recipe.temperature}),
        (recipe.top_k is not None, processors.TopKLogitsWarper, {"top_k": recipe.top_k, **plain}),
        (recipe.top_p is not None, processors.TopPLogitsWarper, {"top_p": recipe.top_p, **plain}),
        (recipe.min_p is not None, processors.MinPLogitsWarper, {"min_p": recipe.min_p, **plain}),
    ]
    return {kind: values for asked, kind, values in every if asked}


def why_not(options: Options, model: nn.Module) -> str | None:
    """Which option needs transformers' own code, and what that costs; None where all can stay on the device.

    It asks for the processors that transformers makes of the options, and knows them by what they hold.
    """
    for name in _GIVEN:
        if getattr(options.given, name):
            return f"`{name}` is worked out {_COST}"
    expected = _processors_of(recipe_of(options))
    made = make_processors(base_model(model), options, 1, 1)
    for processor in made:
        values = expected.get(type(processor))
        if values is None or any(getattr(processor, name, None) != value for name, value in values.items()):
            name = type(processor).__name__
            return f"{f'`{_OPTIONS[name]}`' if name in _OPTIONS else name} is worked out {_COST}"
    present = [type(processor) for processor in made]
    if present != [kind for kind in expected if kind in present or kind not in _MINIMA]:
        return f"this transformers has an order of its own for sampling options, which are worked out {_COST}"
    return None


def picked_by_host(
    kinds: Sequence[Options], model: nn.Module, device: torch.device, depth: int, penalised: int, vocabulary: int
) -> str | None:
    """Why tokens are not picked on the device; None if they are.

    ``kinds``: the different options of a call. ``penalised``: how many of its sequences have a repetition penalty.
    """
    if not kinds:  # no prompt can be run
        return None
    # Where noise is ``sampling.py``'s, it stays so.
    if device.type != "cuda" and (depth == 1 or any(options.do_sample for options in kinds)):
        return "on a CPU there is nothing to gain"
    if penalised * vocabulary > 8 * _SEEN_BYTES:
        return (
            f"`repetition_penalty` over {penalised:,} sequences would take more than {_SEEN_BYTES >> 20} MB on the "
            "device, so the host works it out, for which it waits after each step: pass fewer prompts at a time"
        )
    for options in kinds:
        reason = why_not(options, model)
        if reason is not None:
            return reason if len(kinds) == 1 else f"{reason}. This holds for all prompts of the call"
    return None


def penalised_by(options: Options) -> bool:
    return recipe_of(options).penalty != 1


def minimum_of(options: Options, prompt_tokens: int) -> int:
    """How many new tokens such a prompt needs before EOS may come."""
    config = options.config
    if config.min_new_tokens is not None:
        return config.min_new_tokens  # as in ``generate``, it takes the place of min_length
    return max(0, (config.min_length or 0) - prompt_tokens)


class DeviceSampler:
    """The next token of each row. ``kinds``: the options that there are; for each ``why_not`` has found nothing.

    Those of one kind to this class have one number: what it is picked by is the same. ``seed``: of all rows, unless
    they bring theirs along.
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
            what = recipe_of(options), self._held_back(options)
            self.kinds[options] = numbers.setdefault(what, len(numbers))
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
        with torch.inference_mode(False):  # steps may run outside
            self._eos = torch.tensor(padded if self.needs_kind else padded[0], dtype=torch.int64, device=device)
            self._seed = torch.tensor([signed(seed or 0)], dtype=torch.int64, device=device)

    def _held_back(self, options: Options) -> tuple[int, ...]:
        """The tokens that may not come before a minimum length."""
        if not (options.config.min_new_tokens or options.config.min_length):
            return ()
        return tuple(token for token in sorted(options.eos_token_ids) if 0 <= token < self.vocabulary)

    def seen(self, ids: np.ndarray) -> np.ndarray:  # [words] int32
        """The bits of some tokens: a row's, when it starts or starts again."""
        found = np.zeros(-(-self.vocabulary // _WORD) * _WORD, dtype=bool)
        found[ids[(ids >= 0) & (ids < self.vocabulary)]] = True
        return np.packbits(found, bitorder="little").view("<i4")

    def __call__(self, logits: torch.Tensor, rows: RowsState, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tokens [rows] int64 for ``logits`` [rows, vocabulary]. Logits are left as they are, ``rows.seen`` is not.

        Sampled, a row with logits that are NaN or infinite, or nothing but -inf, gives -1: ``advance`` marks it. Greedy
        takes the lowest token of the best ones, NaN counting as infinity.
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
