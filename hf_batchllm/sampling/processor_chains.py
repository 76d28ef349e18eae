"""The chain of logits processors that a row's scores go through: transformers' in its order, and the user's.

``generate`` makes them for its whole batch. Here each request has a chain of its own, as if it were alone. Requests
whose chains would be the same share one, and processors that can take several rows at once are given them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessor, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import logits_process as processors

from ..errors import OptionValueError
from ..inputs.base_model import base_model
from ..inputs.call_arguments import CallArguments
from ..inputs.options import Options, make_processors
from ..inputs.processors_and_criteria import PROCESSORS, call_factory, factory_of, say_where, shared_list
from ..notices import Notices
from ..planning.requests_and_prefixes import Request
from .user_processors import UserProcessor

# These read scores alone, never the tokens before: they can be given all rows at once.
BLIND_TO_HISTORY = (
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TemperatureLogitsWarper,
    processors.TopHLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.SuppressTokensLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
)

# These forbid EOS until a sequence is long enough.
MINIMUM_LENGTHS = (processors.MinLengthLogitsProcessor, processors.MinNewTokensLengthLogitsProcessor)

# These look for stretches of tokens, wherever they stand in a sequence.
_LOOKING_FOR_STRETCHES = (
    processors.NoRepeatNGramLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
)

# These depend on options alone: one of each serves prompts of all lengths, as some are large.
_SAME_FOR_ALL_LENGTHS = (*_LOOKING_FOR_STRETCHES, processors.ForcedBOSTokenLogitsProcessor)

# These read each row's own tokens and keep no state: they can be given rows of equal length at once.
_STATELESS = (
    *_SAME_FOR_ALL_LENGTHS,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.ExponentialDecayLengthPenalty,
    processors.SuppressTokensAtBeginLogitsProcessor,
)


class ProcessorKind(Enum):
    """Which rows a processor may be given at once."""

    BLIND = auto()  # all rows
    PENALTY = auto()  # all rows: how often tokens came, and in which order, makes no difference to it
    MINIMUM = auto()  # all rows: it is not called, and EOS is forbidden in those that are too short
    GRAMMAR = auto()  # all rows: it is not called, and what grammars do not allow is forbidden
    LATEST = auto()  # all rows: of tokens it looks at each row's latest alone
    ALLOWED = auto()  # all rows: each with the function that tells which tokens it may have next
    ALIKE = auto()  # rows that have this very processor and the same length
    ALONE = auto()  # one row at a time


_CALLED_AS_THE_USERS = (ProcessorKind.ALONE, ProcessorKind.LATEST)
_SAYS = "supports_continuous_batching"


@dataclass(frozen=True, eq=False)
class ChainLayout:
    """What similar chains have in common. Requests whose chains have the same layout can be processed together."""

    options: Options
    kinds: tuple[ProcessorKind, ...]
    blind: int  # all processors from this one on are blind to history, and the same for all requests

    @property
    def reads_histories(self) -> bool:
        return not {ProcessorKind.ALLOWED, ProcessorKind.ALIKE, ProcessorKind.ALONE}.isdisjoint(self.kinds)


@dataclass(frozen=True, eq=False, slots=True)
class ProcessorChain:
    """The processors of a request in transformers' order: first those that may look back, then those that do not."""

    looking_back: list[LogitsProcessor]
    blind: list[LogitsProcessor]
    layout: ChainLayout


class GrammarPlace(LogitsProcessor):
    """Marks where grammars forbid tokens: behind the user's own processors, before all that samples."""


class ProcessorChains:
    """The chains of a call. ``options``: of each prompt, by a request's ``index``. ``grammars``: if there are any."""

    def __init__(
        self,
        model: nn.Module,
        options: Sequence[Options],
        notices: Notices | None = None,
        grammars: bool = False,
    ) -> None:
        inner, notices = base_model(model), notices or Notices()
        # For a beam search ``generate`` counts one row for each prompt, however many answers it gives.
        counts = [1 if each.num_beams > 1 else each.num_return_sequences for each in options]
        first_rows = list(accumulate(counts, initial=0))  # each prompt's first row, as ``generate`` counts them
        warn = (lambda message: notices("stateful", message)) if first_rows[-1] > 1 else None
        watermarks: dict[tuple[type, str], _SharedWatermark] = {}
        makers = {
            each: _ChainMaker(inner, each, warn, first_rows, watermarks, grammars) for each in dict.fromkeys(options)
        }
        self._makers = [makers[each] for each in options]
        self._of_prompt: list[ProcessorChain | None] = [None] * len(options)  # the one that its samples share
        self._own: dict[Request, ProcessorChain] = {}  # of requests that share theirs with no other
        arguments = [each.arguments for each in makers]
        self.calls_custom_code = any(each.logits_processor or each.prefix_allowed_tokens_fn for each in arguments)

    def of(self, request: Request) -> ProcessorChain:
        shared = self._of_prompt[request.index]
        if shared is not None:
            return shared
        maker = self._makers[request.index]
        if not maker.one_for_each:
            shared = self._of_prompt[request.index] = maker.shared(request)
            return shared
        if request not in self._own:
            self._own[request] = maker.make(request)
        return self._own[request]

    def may_repeat(self, requests: Sequence[Request]) -> bool:
        """Whether the processors of these requests give the same again if they are called for the same step twice.

        Those that are called alone, and the user's own, may keep state from step to step.
        """
        layouts = {self.of(request).layout for request in requests}
        return not any(kind in layout.kinds for layout in layouts for kind in _CALLED_AS_THE_USERS)

    def forget_done(self) -> None:
        """Free the chains of requests that have ended."""
        for request in [request for request in self._own if request.done]:
            del self._own[request]


class _ChainMaker:
    """Makes the chains of requests that have the same options."""

    def __init__(
        self,
        model: Any,
        options: Options,
        warn: Callable[[str], None] | None,
        first_rows: Sequence[int],
        watermarks: dict[tuple[type, str], _SharedWatermark],
        grammars: bool,
    ) -> None:
        config, given = options.config, options.arguments
        self._grammar = [GrammarPlace()] if grammars else []
        self._model = model
        self._positions: int | None = getattr(model.config, "max_position_embeddings", None)  # slow to read
        self._first_rows = first_rows
        self._from_prompt = config.encoder_repetition_penalty not in (None, 1.0) or config.encoder_no_repeat_ngram_size
        watermark = config.watermarking_config
        self.one_for_each = bool(
            self._from_prompt
            or config.guidance_scale not in (None, 1)
            or (watermark is not None and type(watermark) is not WatermarkingConfig)
            or given.prefix_allowed_tokens_fn is not None
            or factory_of(given.logits_processor) is not None
        )
        if type(watermark) in (WatermarkingConfig, SynthIDTextWatermarkingConfig):
            config = copy.copy(config)
            key = type(watermark), watermark.to_json_string()
            config.watermarking_config = watermarks.setdefault(key, _SharedWatermark(watermark))
            options = replace(options, config=config)
        self._options = options
        self._wrapped = {id(each): UserProcessor(each, warn) for each in shared_list(given.logits_processor)}
        self._of_all_lengths: dict[type[LogitsProcessor], LogitsProcessor] = {}
        self._layouts: dict[tuple[ProcessorKind, ...], ChainLayout] = {}
        self._shared: dict[tuple[int, int], ProcessorChain] = {}

    def shared(self, request: Request) -> ProcessorChain:
        """The chain of all requests with as many tokens in the prompt, and as many new ones at most."""
        key = (request.prompt_tokens, self._longest(request))
        if key not in self._shared:
            self._shared[key] = self._chain(*key, self._options.arguments)
        return self._shared[key]

    def make(self, request: Request) -> ProcessorChain:
        """A chain for this request alone."""
        prompt = torch.tensor(request.prompt_ids[None], dtype=torch.long, device="cpu") if self._from_prompt else None
        return self._chain(request.prompt_tokens, self._longest(request), self._given_to(request), prompt)

    def _longest(self, request: Request) -> int:
        """The most new tokens by the options alone: ``generate`` ignores a MaxLengthCriteria for its processors."""
        return self._options.max_new_tokens(request.prompt_tokens, self._positions)

    def _chain(
        self, prompt_tokens: int, max_new_tokens: int, given: CallArguments, prompt: torch.Tensor | None = None
    ) -> ProcessorChain:
        own, shared = shared_list(given.logits_processor), factory_of(self._options.arguments.logits_processor) is None
        given, users = replace(given, logits_processor=[*own, *self._grammar]), {id(each) for each in own}
        made = make_processors(
            self._model, self._options, prompt_tokens, max_new_tokens, arguments=given, prompt=prompt
        )
        every, kinds = [], []
        for processor in made:
            kind = _kind(processor, id(processor) in users)
            if kind is ProcessorKind.LATEST and not shared:  # made for a sequence alone
                kind = ProcessorKind.ALONE
            if kind in _CALLED_AS_THE_USERS and id(processor) in users:
                processor = self._wrapped.get(id(processor)) or UserProcessor(processor)
            elif id(processor) not in users and type(processor) in _SAME_FOR_ALL_LENGTHS:
                processor = self._of_all_lengths.setdefault(type(processor), processor)
            every.append(processor)
            kinds.append(kind)
        layout = self._layout(tuple(kinds))
        return ProcessorChain(every[: layout.blind], every[layout.blind :], layout)

    def _layout(self, kinds: tuple[ProcessorKind, ...]) -> ChainLayout:
        if kinds not in self._layouts:
            blind = len(kinds)
            while blind and kinds[blind - 1] is ProcessorKind.BLIND:
                blind -= 1
            self._layouts[kinds] = ChainLayout(self._options, kinds, blind)
        return self._layouts[kinds]

    def _given_to(self, request: Request) -> CallArguments:
        """The part of the arguments given for all sequences that belongs to this one."""
        given, index = self._options.arguments, request.index
        factory = factory_of(given.logits_processor)
        own = given.logits_processor
        if factory is not None:
            own = call_factory(PROCESSORS, factory, index, request.prompt_ids.tolist())
        row = self._first_rows[index] + request.sample
        allowed = given.prefix_allowed_tokens_fn
        return replace(
            given,
            logits_processor=own,
            prefix_allowed_tokens_fn=None if allowed is None else _allowed_in(row, allowed, index),
            negative_prompt_ids=self._row_of(given.negative_prompt_ids, index),
            negative_prompt_attention_mask=self._row_of(given.negative_prompt_attention_mask, index),
        )

    def _row_of(self, given: Any, index: int) -> torch.Tensor | None:  # [1, width]
        return None if given is None else torch.as_tensor(given, device=self._model.device)[index : index + 1]


class _SharedWatermark:
    """Takes the place of a watermark's config. All processors that it makes share the same large tables."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._made: LogitsProcessor | None = None

    def construct_processor(self, vocab_size: int, device: Any) -> LogitsProcessor:
        if self._made is None:
            self._made = self._config.construct_processor(vocab_size, device)
        return copy.copy(self._made)  # this one is never called, so the copy gets a state of its own


def _allowed_in(
    row: int, allowed: Callable[[int, torch.Tensor], Any], index: int
) -> Callable[[int, torch.Tensor], Any]:
    def allowed_in_row(_: int, ids: torch.Tensor) -> Any:
        try:
            tokens = allowed(row, ids)
        except Exception as error:
            say_where(error, "`prefix_allowed_tokens_fn`", index)
            raise
        if len(tokens) == 0:
            why = f"gave no token for batch_id {row} (after {len(ids):,} tokens): nothing could follow"
            raise OptionValueError("prefix_allowed_tokens_fn", why)
        return tokens

    return allowed_in_row


def _kind(processor: LogitsProcessor, is_the_users: bool) -> ProcessorKind:
    kind = type(processor)
    if is_the_users:
        is_known = kind in (*BLIND_TO_HISTORY, *MINIMUM_LENGTHS, *_STATELESS)
        if is_known:
            return ProcessorKind.ALIKE
        return ProcessorKind.LATEST if takes_all_rows(processor) else ProcessorKind.ALONE
    if kind is processors.RepetitionPenaltyLogitsProcessor and _penalises_prompts(processor):
        return ProcessorKind.PENALTY
    if kind in MINIMUM_LENGTHS:
        return ProcessorKind.MINIMUM
    if kind is processors.PrefixConstrainedLogitsProcessor:
        return ProcessorKind.ALLOWED
    if kind is GrammarPlace:
        return ProcessorKind.GRAMMAR
    if kind in BLIND_TO_HISTORY:
        return ProcessorKind.BLIND
    return ProcessorKind.ALIKE if kind in _STATELESS else ProcessorKind.ALONE


def takes_all_rows(processor: Any) -> bool:
    """Whether it says, in transformers' words, that it takes all sequences' rows at once, with their latest tokens.

    A class that has its own ``__call__`` has to say so itself: it may look at more than the one that it derives from.
    """
    for held in (getattr(processor, "__dict__", {}), *map(vars, type(processor).__mro__)):
        if _SAYS in held:
            return held[_SAYS] is True
        if "__call__" in held:
            return False
    return False


def looks_at_each_row_alone(processor: Any) -> bool:
    """Whether a row's scores are the same in a batch and alone."""
    alone = (*BLIND_TO_HISTORY, *MINIMUM_LENGTHS, *_STATELESS, processors.RepetitionPenaltyLogitsProcessor)
    return type(processor) in alone


def looks_at_no_padding(processor: Any) -> bool:
    """Whether a row's scores are the same with padding before the prompt. Other processors count tokens."""
    blind = (*BLIND_TO_HISTORY, *_LOOKING_FOR_STRETCHES, processors.RepetitionPenaltyLogitsProcessor)
    return type(processor) in blind and _penalises_prompts(processor)


def _penalises_prompts(processor: Any) -> bool:
    """Only a repetition penalty can be told to leave the prompt's tokens out."""
    return getattr(processor, "prompt_ignore_length", None) is None
