"""From logits to tokens without the host: nothing is read back, and a CUDA graph can hold it.

Tokens are what transformers' processors and the softmax of their scores ask for; ``why_not`` says which options need
transformers' own code instead. The noise is the kernels': from (seed, prompt, sample, tokens made so far, token) alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LogitsProcessor
from transformers.generation import logits_process as processors

from .architecture import base_model
from .options import Options, make_processors

_SEEN_BYTES = 512 << 20  # at most, for the tokens that requests have had
_WORD = 32  # tokens in each word of a row's bits

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
class SamplingKernels:
    """The kernels, in Triton or as their twins in PyTorch."""

    greedy: Callable[..., torch.Tensor]
    gumbel_sample: Callable[..., torch.Tensor]
    cutoffs: Callable[..., torch.Tensor]
    penalise: Callable[..., torch.Tensor]
    mark_seen: Callable[..., None]
    advance: Callable[..., None]


def triton_sampling() -> SamplingKernels:
    from .kernels import cut_triton, sample_triton

    return SamplingKernels(
        greedy=sample_triton.greedy,
        gumbel_sample=sample_triton.gumbel_sample,
        cutoffs=cut_triton.cutoffs,
        penalise=cut_triton.penalise,
        mark_seen=cut_triton.mark_seen,
        advance=sample_triton.advance,
    )


def torch_sampling() -> SamplingKernels:
    from .kernels import cut_torch, small_torch

    return SamplingKernels(
        greedy=small_torch.greedy,
        gumbel_sample=small_torch.gumbel_sample,
        cutoffs=cut_torch.cutoffs,
        penalise=cut_torch.penalise,
        mark_seen=cut_torch.mark_seen,
        advance=small_torch.advance,
    )


@dataclass(frozen=True)
class RowsState:
    """What sampling has to know of the rows of ``logits``, on their device, each of shape [rows] but for the last."""

    prompt: torch.Tensor  # int64  the prompt's place in the list
    sample: torch.Tensor  # int64  which of its samples
    made: torch.Tensor  # int32 or int64  tokens generated so far
    minimum: torch.Tensor | None = None  # int32  of them that a row must have before EOS: see ``DeviceSampler.minimum``
    seen: torch.Tensor | None = None  # [rows, words] int32  a bit for each token: see ``DeviceSampler.seen``


@dataclass(frozen=True)
class _Recipe:
    """What the options ask for; the values that ask for nothing are those of ``GenerationConfig``."""

    penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @classmethod
    def of(cls, options: Options) -> _Recipe:
        config = options.config
        penalty = 1.0 if config.repetition_penalty is None else config.repetition_penalty
        if not options.do_sample:
            return cls(penalty)
        return cls(
            penalty,
            1.0 if config.temperature is None else config.temperature,
            config.top_k or None,
            None if config.top_p is None or config.top_p >= 1 else float(config.top_p),
            config.min_p,
        )

    def processors(self) -> dict[type[LogitsProcessor], dict[str, Any]]:
        """Those that transformers makes of it, in its order, with what they hold; those of minimum lengths always."""
        plain = {"filter_value": -float("inf"), "min_tokens_to_keep": 1}
        penalty = {"penalty": self.penalty, "prompt_ignore_length": None}
        every: list[tuple[bool, type[LogitsProcessor], dict[str, Any]]] = [
            (self.penalty != 1, processors.RepetitionPenaltyLogitsProcessor, penalty),
            *((True, minimum, {}) for minimum in _MINIMA),
            (self.temperature != 1, processors.TemperatureLogitsWarper, {"temperature": self.temperature}),
            (self.top_k is not None, processors.TopKLogitsWarper, {"top_k": self.top_k, **plain}),
            (self.top_p is not None, processors.TopPLogitsWarper, {"top_p": self.top_p, **plain}),
            (self.min_p is not None, processors.MinPLogitsWarper, {"min_p": self.min_p, **plain}),
        ]
        return {kind: values for asked, kind, values in every if asked}


def why_not(options: Options, model: nn.Module) -> str | None:
    """Which option needs transformers' own code, and what that costs; None where all can stay on the device.

    It asks for the processors that transformers makes of the options, and knows them by what they hold.
    """
    cost = "by transformers' own code, for which the host waits after each step: steps are not queued ahead"
    if options.given.logits_processor:  # a list, or a factory of lists
        return "`logits_processor` is run by the host, which waits after each step: steps are not queued ahead"
    expected = _Recipe.of(options).processors()
    made = make_processors(base_model(model), options, 1, 1)
    for processor in made:
        values = expected.get(type(processor))
        if values is None or any(getattr(processor, name, None) != value for name, value in values.items()):
            name = type(processor).__name__
            return f"{f'`{_OPTIONS[name]}`' if name in _OPTIONS else name} is worked out {cost}"
    present = [type(processor) for processor in made]
    if present != [kind for kind in expected if kind in present or kind not in _MINIMA]:
        return f"this transformers has an order of its own for sampling options, which are worked out {cost}"
    return None


def picked_by_host(
    options: Options, model: nn.Module, device: torch.device, depth: int, requests: int, vocabulary: int
) -> str | None:
    """Why tokens are not picked on the device; None if they are."""
    if device.type != "cuda" and (depth == 1 or options.do_sample):  # where noise is ``sampling.py``'s, it stays so
        return "on a CPU there is nothing to gain"
    if _Recipe.of(options).penalty != 1 and requests * vocabulary > 8 * _SEEN_BYTES:
        return (
            f"`repetition_penalty` over {requests:,} sequences would take more than {_SEEN_BYTES >> 20} MB on the "
            "device, so the host works it out, for which it waits after each step: pass fewer prompts at a time"
        )
    return why_not(options, model)


class DeviceSampler:
    """The next token of each row. All rows have the same options, for which ``why_not`` has found nothing."""

    def __init__(
        self, options: Options, seed: int | None, vocabulary: int, device: torch.device | str, kernels: SamplingKernels
    ) -> None:
        assert seed is not None or not options.do_sample
        self._options = options
        self._recipe = _Recipe.of(options)
        self._kernels = kernels
        self.vocabulary = vocabulary
        eos = [token for token in sorted(options.eos_token_ids) if 0 <= token < vocabulary]
        config = options.config
        self.needs_minimum = bool(eos) and bool(config.min_new_tokens or config.min_length)
        self.needs_seen = self._recipe.penalty != 1
        self._eos = torch.tensor(eos, dtype=torch.int64, device=device) if self.needs_minimum else None
        wrapped = ((seed or 0) + 2**63) % 2**64 - 2**63  # the same 64 bits, with a sign
        self._seed = torch.tensor([wrapped], dtype=torch.int64, device=device)

    def minimum(self, prompt_tokens: int) -> int:
        """How many new tokens such a prompt needs before EOS may come."""
        config = self._options.config
        if config.min_new_tokens is not None:
            return config.min_new_tokens  # as in ``generate``, it takes the place of min_length
        return max(0, (config.min_length or 0) - prompt_tokens)

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
        if self.needs_seen or self.needs_minimum:
            assert (rows.seen is not None or not self.needs_seen) and (
                rows.minimum is not None or not self.needs_minimum
            )
            looking_back: dict[str, Any] = {}
            if self.needs_seen:
                looking_back |= {"seen": rows.seen, "penalty": recipe.penalty}
            if self.needs_minimum:
                looking_back |= {"eos": self._eos, "made": rows.made, "minimum": rows.minimum}
            logits = kernels.penalise(logits, **looking_back)
        if not self._options.do_sample:
            tokens = kernels.greedy(logits, out=out)
        else:
            threshold = None
            if (recipe.top_k, recipe.top_p, recipe.min_p) != (None, None, None):
                threshold = kernels.cutoffs(
                    logits,
                    temperature=recipe.temperature,
                    top_k=recipe.top_k,
                    top_p=recipe.top_p,
                    min_p=recipe.min_p,
                )
            tokens = kernels.gumbel_sample(
                logits,
                recipe.temperature,
                self._seed,
                rows.prompt,
                rows.sample,
                rows.made,
                threshold=threshold,
                out=out,
            )
        if self.needs_seen:
            kernels.mark_seen(rows.seen, tokens, self.vocabulary)
        return tokens
