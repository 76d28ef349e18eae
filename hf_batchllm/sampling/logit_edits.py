"""What transformers' processors do to single logits, as lists that kernels read; so the device can do it by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as processors

from ..kernels.lists.sampling_recipes import Recipe, RecipeTable
from ..kernels.lists.token_edits import Decays, Forced, Target, TargetLists
from ..model.transfers import to_device

Sequences = tuple[tuple[tuple[int, ...], float], ...]  # tokens, and what is added to the logit of the last one

_FORBIDDEN = -float("inf")


@dataclass(frozen=True)
class LogitEdits:
    """What a prompt's options do to logits, in the order in which transformers applies them. Defaults do nothing."""

    biased: Sequences = ()
    prompt_penalty: float = 1.0  # as ``encoder_repetition_penalty`` is applied: below 1 for a penalty above
    no_repeat: int = 0  # tokens of a stretch that may not come twice
    no_repeat_of_prompt: int = 0  # tokens of a stretch of the prompt that may not come again
    forbidden: Sequences = ()
    first: int = -1  # the first new token of a prompt of one token
    last: tuple[int, ...] = ()  # one of these is the last token of the longest answer
    repaired: bool = False  # NaN becomes 0, and infinity the largest number
    ends: tuple[int, ...] = ()  # tokens that become likelier with the length
    growth: tuple[int, float] = (0, 1.0)  # after how many new tokens they do, and by which factor with each
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()  # as the first new token

    @property
    def any(self) -> bool:
        return self != _NONE

    def reach(self) -> int | None:
        """How many of a prompt's tokens have to be known at least; None for all of them."""
        if self.no_repeat or self.no_repeat_of_prompt:
            return None
        return max((len(tokens) for tokens, _ in (*self.biased, *self.forbidden) if len(tokens) > 1), default=0)


_NONE = LogitEdits()


# These may forbid a token that ends an answer, before ends become likelier.
_MAY_FORBID_ENDS = (
    processors.NoRepeatNGramLogitsProcessor,
    processors.EncoderNoRepeatNGramLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
)


def edits_of(made: Iterable[LogitsProcessor], vocabulary: int) -> LogitEdits | LogitsProcessor:
    """What these processors, made for a prompt of one token, do to single logits; or one that only its own code can do.

    Those that do something else are passed over.
    """
    found: dict[str, Any] = {}
    by_kind: dict[type[LogitsProcessor], Any] = {type(processor): processor for processor in made}
    for kind, processor in by_kind.items():
        given: dict[str, Any] = {}
        if kind in (processors.SequenceBiasLogitsProcessor, processors.NoBadWordsLogitsProcessor):
            name = "biased" if kind is processors.SequenceBiasLogitsProcessor else "forbidden"
            given[name] = tuple((tuple(map(int, ids)), float(bias)) for ids, bias in processor.sequence_bias.items())
        elif kind is processors.EncoderRepetitionPenaltyLogitsProcessor:
            given["prompt_penalty"] = float(processor.penalty)
        elif kind is processors.NoRepeatNGramLogitsProcessor:
            given["no_repeat"] = int(processor.ngram_size)
        elif kind is processors.EncoderNoRepeatNGramLogitsProcessor:
            given["no_repeat_of_prompt"] = int(processor.ngram_size)
        elif kind is processors.ForcedBOSTokenLogitsProcessor:
            given["first"] = int(processor.bos_token_id)
        elif kind is processors.ForcedEOSTokenLogitsProcessor:
            given["last"] = _ids(processor.eos_token_id)
        elif kind is processors.InfNanRemoveLogitsProcessor:
            given["repaired"] = True
        elif kind is processors.ExponentialDecayLengthPenalty:
            start = processor.regulation_start - 1  # without the prompt's one token
            given |= {"ends": _ids(processor.eos_token_id), "growth": (start, float(processor.regulation_factor))}
        elif kind is processors.SuppressTokensLogitsProcessor:
            given["suppressed"] = _ids(processor.suppress_tokens)
        elif kind is processors.SuppressTokensAtBeginLogitsProcessor:
            given["suppressed_first"] = _ids(processor.begin_suppress_tokens)
        found |= given
        if not _inside(given, vocabulary):
            return cast(LogitsProcessor, processor)
    edits = LogitEdits(**found)
    # Some versions of transformers make NaN of an end that is forbidden already.
    if edits.ends and any(kind in _MAY_FORBID_ENDS for kind in by_kind):
        return cast(LogitsProcessor, by_kind[processors.ExponentialDecayLengthPenalty])
    if edits.first >= 0 and edits.suppressed_first:  # which of the first tokens that is hangs on the prompt
        return cast(LogitsProcessor, by_kind[processors.SuppressTokensAtBeginLogitsProcessor])
    return edits


def _ids(tokens: torch.Tensor) -> tuple[int, ...]:
    return tuple(dict.fromkeys(torch.as_tensor(tokens, dtype=torch.long, device="cpu").reshape(-1).tolist()))


def _inside(given: dict[str, Any], vocabulary: int) -> bool:
    """Whether all tokens are of the vocabulary. Suppressing others changes nothing; otherwise transformers says why."""
    ids: list[int] = []
    for name, value in given.items():
        if name in ("biased", "forbidden"):
            ids += [token for tokens, _ in value for token in tokens]
        elif name in ("last", "ends"):
            ids += value
        elif name == "first":
            ids.append(value)
    return all(0 <= token < vocabulary for token in ids)


@cache
def _prefix_may_be_all() -> bool:
    """Whether a bias counts where what comes before its last token is all that a sequence has. Versions differ."""
    bias: Any = {(0, 1): 1.0}
    processor = processors.SequenceBiasLogitsProcessor(bias)
    ids, scores = (
        torch.zeros(1, 1, dtype=torch.long, device="cpu"),
        torch.zeros(1, 3, dtype=torch.float32, device="cpu"),
    )
    return bool(processor(ids, scores)[0, 1] > 0)


class EditTables:
    """The edits of several kinds of rows, on a device. Each attribute is None where no kind needs it.

    longest: new tokens of the longest row.
    """

    def __init__(self, kinds: Sequence[LogitEdits], vocabulary: int, longest: int, device: torch.device) -> None:
        self.kinds = kinds
        self.biased = _sequences([each.biased for each in kinds], device)
        self.prompt_penalties: RecipeTable | None = None
        if any(each.prompt_penalty != 1 for each in kinds):
            self.prompt_penalties = RecipeTable([Recipe(each.prompt_penalty) for each in kinds], vocabulary, device)
        self.no_repeat: torch.Tensor | None = None
        sizes = [[each.no_repeat for each in kinds], [each.no_repeat_of_prompt for each in kinds]]
        if any(map(any, sizes)):
            self.no_repeat = _sent(np.array(sizes, dtype=np.int32), device)
        self.forbidden = _sequences([each.forbidden for each in kinds], device)
        self.forced: Forced | None = None
        if any(each.first >= 0 or each.last for each in kinds):
            first = _sent(np.array([each.first for each in kinds], dtype=np.int32), device)
            self.forced = Forced(first, _plain([each.last for each in kinds], device))
        self.repaired: torch.Tensor | None = None
        if any(each.repaired for each in kinds):
            self.repaired = _sent(np.array([each.repaired for each in kinds]), device)
        self.decays = _decays(kinds, longest, device)
        self.suppressed = _suppressed(kinds, vocabulary, device)
        with_sequences = [each for each in (self.biased, self.forbidden) if each is not None]
        self.looks_back = self.no_repeat is not None or any(each.looks_back for each in with_sequences)

    @property
    def any(self) -> bool:
        return any(each.any for each in self.kinds)


def _decays(kinds: Sequence[LogitEdits], longest: int, device: torch.device) -> Decays | None:
    if not any(each.ends for each in kinds):
        return None
    starts, factors = zip(*(each.growth for each in kinds), strict=True)
    with np.errstate(over="ignore"):
        table = np.power(np.array(factors, dtype=np.float64)[:, None], np.arange(1, longest + 1)) - 1
    growth = _sent(table.astype(np.float32), device)
    ends = _plain([each.ends for each in kinds], device)
    return Decays(ends, _sent(np.array(starts, dtype=np.int32), device), growth)


def _suppressed(kinds: Sequence[LogitEdits], vocabulary: int, device: torch.device) -> TargetLists | None:
    lists = [
        [Target(token, _FORBIDDEN) for token in each.suppressed if 0 <= token < vocabulary]
        + [Target(token, _FORBIDDEN, at=0) for token in each.suppressed_first if 0 <= token < vocabulary]
        for each in kinds
    ]
    return TargetLists.of(lists, device) if any(lists) else None


def _plain(kinds: Sequence[Sequence[int]], device: torch.device) -> TargetLists:
    return TargetLists.of([[Target(token) for token in tokens] for tokens in kinds], device)


def _sequences(kinds: Sequence[Sequences], device: torch.device) -> TargetLists | None:
    if not any(kinds):
        return None
    lists: list[list[Target]] = []
    for sequences in kinds:
        alone: dict[int, float] = {}
        after: dict[int, dict[tuple[int, ...], float]] = {}
        for tokens, bias in sequences:
            if len(tokens) == 1:
                alone[tokens[0]] = bias
            else:
                after.setdefault(tokens[-1], {})[tokens[:-1]] = bias
        every = dict.fromkeys([*alone, *after])
        lists.append([Target(token, alone.get(token, 0.0), sequences=after.get(token)) for token in every])
    return TargetLists.of(lists, device, spare=0 if _prefix_may_be_all() else 1)


def _sent(array: np.ndarray, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # steps may run outside of it
        return to_device(array, device)
