"""The rules by which sequences end, made of a prompt's options: tokens, strings, criteria of the user's own, time.

transformers makes the list of criteria, so that they mean what they mean in ``generate``. Here the list is sorted by
kind, as ``stopping`` handles each kind in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.generation import stopping_criteria as criteria
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from ..errors import OptionValueError, TokenizerError
from ..inputs.base_model import base_model
from ..inputs.options import Options, config_for_prompt
from ..inputs.processors_and_criteria import Factory, factory_of, shared_list
from ..notices import Notices
from .stop_strings import PreparedStopStrings

_LONG_PREPARATION = 4_000_000  # tokens of vocabularies to go through for stop strings: a million take about a second

# Of these it is known what they look at; all others are called for each sequence, as ``generate`` calls them.
_KNOWN = (criteria.MaxLengthCriteria, criteria.MaxTimeCriteria, criteria.EosTokenCriteria, StopStringCriteria)


@dataclass(frozen=True, eq=False)
class StopRules:
    """What ends the sequences of some prompts, besides their length."""

    stop_tokens: frozenset[int] = frozenset()  # the device has to be told the same ones
    max_lengths: tuple[int, ...] = ()  # of the user's own MaxLengthCriteria; they count prompts, and padding
    deadlines: tuple[tuple[float | None, float], ...] = ()  # (since when; None: the call's beginning, seconds)
    strings: tuple[StopStringCriteria, ...] = ()
    others: tuple[Any, ...] = ()  # criteria that are called for each sequence by itself
    factory: Factory | None = None  # makes more of those, for each sequence its own

    @property
    def looks_back(self) -> bool:
        """Whether more than a sequence's newest token has to be looked at."""
        return bool(self.strings or self.others or self.factory)

    @property
    def can_stop(self) -> bool:
        """Whether something besides time may end a sequence before it has its full length."""
        return bool(self.stop_tokens) or self.looks_back

    def limit(self, prompt_tokens: int, new_tokens: int) -> int:
        """How many new tokens there may be where the options allow ``new_tokens``.

        A MaxLengthCriteria takes the place of the options' length. It is asked after each token, so there is always
        one token.
        """
        if not self.max_lengths or new_tokens <= 0:  # without room for a token the options are refused elsewhere
            return new_tokens
        return max(1, min(self.max_lengths) - prompt_tokens)


class RulesMaker:
    """Makes the rules of prompts for one model. ``tokenizer``: a function that gives it; stop strings need it."""

    def __init__(self, model: nn.Module, tokenizer: Callable[[], Any], notices: Notices) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._notices = notices
        self._prepared = PreparedStopStrings()

    def of_each(self, options: Sequence[Options], in_tensors: bool = False) -> list[StopRules]:
        """The rules of each prompt; prompts with the same options have the same rules."""
        _warn_of_long_preparation(self._model, options, self._notices)
        made = {each: self.of(each) for each in dict.fromkeys(options)}
        rules = [made[each] for each in options]
        several = in_tensors and sum(each.num_return_sequences for each in options) > 1 and options[0].num_beams == 1
        # Each row is padded from where it ends. Without an EOS token ``generate`` runs all rows until the last ends.
        if several and options[0].pad_token_id is None and (rules[0].can_stop or rules[0].deadlines):
            raise OptionValueError("pad_token_id", "is None, and rows may end at different lengths: set it")
        return rules

    def of(self, options: Options) -> StopRules:
        """The rules of prompts with these options.

        As in ``generate``, a criterion of the user's takes the place of one of its kind that the options ask for.
        """
        inner: Any = base_model(self._model)
        users = shared_list(options.arguments.stopping_criteria)
        config = config_for_prompt(options, 1, 1)
        config.is_assistant = False  # no other model drafts tokens here
        strings = _strings_of(options)
        given_tokenizer = options.arguments.tokenizer
        if strings is not None and given_tokenizer is None:
            given_tokenizer = _tokenizer_for_strings(self._tokenizer)
        ready = None
        try:
            with torch.device("cpu"):  # strings are looked for there; they are kept under other default devices, too
                if strings is not None and not any(type(each) is StopStringCriteria for each in users):
                    ready = self._prepared.get(given_tokenizer, strings)
                    config.stop_strings = None
                merged = inner._get_stopping_criteria(config, StoppingCriteriaList(users), given_tokenizer)
        except Exception as error:
            if strings is None:
                raise
            why = f"cannot be looked for in tokens of this tokenizer ({type(error).__name__}: {error})"
            raise OptionValueError("stop_strings", why) from error
        kinds: dict[type, list[Any]] = {}
        for each in merged:  # a class derived from a known one may look at anything
            kinds.setdefault(type(each) if type(each) in _KNOWN else object, []).append(each)
        of_users = {id(each) for each in users}
        of_strings = kinds.setdefault(StopStringCriteria, [])
        if ready is not None:
            of_strings.append(ready)
        lengths, times, eos = (kinds.get(kind, []) for kind in _KNOWN[:3])
        return StopRules(
            stop_tokens=frozenset(token for each in eos for token in each.eos_token_id.reshape(-1).tolist()),
            max_lengths=tuple(each.max_length for each in lengths if id(each) in of_users),
            deadlines=tuple((one.initial_timestamp if id(one) in of_users else None, one.max_time) for one in times),
            strings=tuple(of_strings),
            others=tuple(kinds.get(object, ())),
            factory=factory_of(options.arguments.stopping_criteria),
        )


def _warn_of_long_preparation(model: nn.Module, options: Sequence[Options], notices: Notices) -> None:
    sets = {_strings_of(each) for each in dict.fromkeys(options)} - {None}
    vocabulary = base_model(model).config.get_text_config(decoder=True).vocab_size
    if len(sets) > 1 and len(sets) * vocabulary > _LONG_PREPARATION:
        notices(
            "stop_strings",
            f"prompts have {len(sets):,} different `stop_strings`, and for each of them all {vocabulary:,} tokens of "
            "the vocabulary are gone through first, which takes seconds: the same for all prompts need one pass",
        )


def _strings_of(options: Options) -> tuple[str, ...] | None:
    strings = options.config.stop_strings
    return None if strings is None else (strings,) if isinstance(strings, str) else tuple(strings)


def _tokenizer_for_strings(tokenizer: Callable[[], Any]) -> Any:
    try:
        return tokenizer()
    except TokenizerError as error:
        raise TokenizerError(f"`stop_strings` need a tokenizer: {error}, or pass `tokenizer=` here") from error


def looks_at_each_row_alone(criterion: Any) -> bool:
    """Whether a row ends at the same token in a batch and alone."""
    return type(criterion) in _KNOWN


def looks_at_no_padding(criterion: Any) -> bool:
    """Whether a row ends at the same token with padding before the prompt. Other criteria may count tokens."""
    return looks_at_each_row_alone(criterion) and type(criterion) is not criteria.MaxLengthCriteria
