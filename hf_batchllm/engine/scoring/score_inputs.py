"""From the arguments of ``score`` to ``ScoreItem``s: tokens, and the first that is scored. All of it is checked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ...errors import OptionValueError, PromptError
from ...inputs.as_passed import AsPassed, as_passed
from ...inputs.base_model import base_model
from ...inputs.chats import is_chat, warn_of_one_chat
from ...inputs.images.prompt_images import PromptImages
from ...inputs.not_prompts import why_not_a_list
from ...inputs.option_checks import check_on_error
from ...inputs.prompt_lengths import Limits, Reach, id_without_logits, position_problem, warn_beyond_context
from ...inputs.prompt_reader import PromptReader
from ...inputs.prompts import Prompt, as_list, check_prompts, read_all
from ...inputs.unknown_options import checked_score_names
from ...model.inspection.architecture import Architecture
from ...model.inspection.user_warnings import warn_of_random_parts
from ...notices import Notices
from ...wording import a_kind, is_array, is_number, shown
from .lost_spaces import warn_of_lost_space

_A_CONTINUATION_IS = "a continuation is a string, a list of token ids or a 1-D tensor"
_MOST_LETTERS = 8  # of a string that may be meant as a choice of letters
_TEXTS_AT_ONCE = 4096  # that are joined, each a context and a continuation, which takes memory
_NO_CONTEXT = "nothing stands before it"

_Read = tuple[list[Prompt | None], dict[int, str]]
Place = tuple[int, int]  # (number of the context, number of the continuation among those of the context)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreItem:
    """Tokens to score: those of ``ids`` from ``first`` on, which is never 0, as a first token has none before it."""

    index: int  # number of the context, or of the text
    choice: int  # number of the continuation among those of the context
    ids: np.ndarray  # int32 [tokens]  context and continuation
    first: int
    text: str | None  # the continuation, if it was passed as text
    key: Hashable = None  # only items with equal keys share K and V
    images: PromptImages | None = None  # of context and continuation

    @property
    def keys(self) -> np.ndarray:  # int32 [tokens]
        """What tells tokens apart: see ``Prompt.keys``."""
        return self.ids if self.images is None else self.images.keys


@dataclass
class ScoreInputs:
    """What to score. Each continuation asked for is either in ``items`` or in ``problems``."""

    items: list[ScoreItem] = field(default_factory=list)
    problems: dict[Place, str] = field(default_factory=dict)
    texts: dict[Place, str] = field(default_factory=dict)  # the continuations with a problem, where they are text
    what: str = "context"  # what the first number of a place counts: "context" or "text"
    adapters: list[str | None] | None = None  # of each context, if adapters were named
    contexts: list[AsPassed] | None = None  # of each, for the results; None for whole texts

    def context_as_passed(self, index: int) -> AsPassed:
        return None if self.contexts is None else self.contexts[index]

    def take(self, found: Iterable[tuple[Place, ScoreItem]], wrong_adapters: Mapping[int, str], limits: Limits) -> None:
        """Each item, or why it cannot be scored. ``wrong_adapters``: of contexts, and why."""
        items: dict[Place, ScoreItem] = {}
        for place, item in found:
            tokens = len(item.ids) - 1  # the last token never runs through the model
            described = f"has {tokens:,} tokens to run, continuation included"
            why = wrong_adapters.get(item.index) or position_problem(described, tokens, limits, "shorten it")
            why = why or id_without_logits(item.ids[item.first :], limits)
            if why is None:
                items[place] = item
            else:
                self.problems[place] = why
        self.items = [items[place] for place in sorted(items)]
        if self.adapters is not None:  # K and V of one adapter are wrong for another
            self.items = [replace(item, key=self.adapters[item.index]) for item in self.items]

    def places(self) -> Iterator[Place]:
        """The places of all continuations asked for."""
        yield from ((item.index, item.choice) for item in self.items)
        yield from self.problems

    @property
    def longest(self) -> dict[int, int]:
        """The tokens of each context (or text) with its longest continuation."""
        found: dict[int, int] = {}
        for item in self.items:
            found[item.index] = max(found.get(item.index, 0), len(item.ids))
        return found

    def error(self) -> PromptError:
        """One error for all problems."""
        by_context: dict[int, str] = {}
        for (index, _), why in sorted(self.problems.items()):
            by_context.setdefault(index, why)
        return PromptError(by_context, self.what)


@dataclass(frozen=True)
class _Reading:
    """Makes tokens of prompts, and finds the problems of those that cannot be read."""

    reader: PromptReader
    vocab_size: int
    chat_options: Mapping[str, Any]  # of contexts

    def __call__(self, given: list[Any], special_tokens: bool = True) -> _Read:
        required = self.reader.tokenizer.required
        return self._read(given, tokenizer=required if special_tokens else lambda: _without_special_tokens(required()))

    def contexts(self, given: list[Any]) -> _Read:
        reader = self.reader
        return self._read(given, tokenizer=reader.tokenizer.required, options=self.chat_options, images=reader.images)

    def _read(self, given: list[Any], **how: Any) -> _Read:
        return check_prompts(given, vocab_size=self.vocab_size, notices=_NotOfEmpty(self.reader.notices), **how)


def checked_scores(
    reader: PromptReader,
    architecture: Architecture,
    contexts: Any,
    continuations: Any,
    choices: Any,
    on_error: str,
    adapter: Any,
    chat_options: dict[str, Any],
) -> ScoreInputs:
    """The checked call of ``score``. Arguments that make no sense as a whole raise an error."""
    read = _Reading(reader, architecture.vocab_size, checked_score_names(contexts, chat_options))
    check_on_error(on_error)
    warn_of_random_parts(reader.model, reader.notices)
    given, entries = _paired(contexts, continuations, choices)
    if given is not None:
        warn_of_one_chat(contexts, given, reader.notices)
    inputs = ScoreInputs(what="text" if given is None else "context")
    inputs.adapters, wrong_adapters = reader.adapters(adapter, len(entries), on_error)
    inputs.contexts = None if given is None else as_passed(given)
    asked = dict(_readable(entries, inputs))
    found = _whole_texts(asked, read, inputs) if given is None else _continued(given, asked, read, inputs)
    inputs.take(found, wrong_adapters, architecture)
    inputs.texts = {place: text for place in inputs.problems if isinstance(text := asked.get(place), str)}
    if inputs.problems and on_error == "raise":
        raise inputs.error()
    reaches, config = [Reach(*each, 0) for each in sorted(inputs.longest.items())], base_model(reader.model).config
    warn_beyond_context(config, reaches, len(reaches), architecture.name, reader.notices, inputs.what)
    return inputs


# -- which continuation belongs to which context ---------------------------------------------------------------


def _paired(contexts: Any, continuations: Any, choices: Any) -> tuple[Sequence[Any] | None, list[list[Any]]]:
    """The contexts (None for whole texts), and the continuations of each context, or each text."""
    if (continuations is None) == (choices is None):
        both = "both were given" if choices is not None else "neither was given"
        hint = "" if choices is not None else ". To score whole texts pass score(None, texts)"
        raise OptionValueError(
            "continuations",
            f"(one for each context) or `choices` (the same for all of them) must be given: {both}{hint}",
        )
    if isinstance(choices, Mapping):
        raise OptionValueError(
            "choices", f"is {a_kind(choices)}: pass a list of what it holds, choices=list(answers.values())"
        )
    if contexts is None:
        if choices is not None:
            raise OptionValueError("choices", "goes with contexts: to score whole texts pass score(None, texts)")
        return None, [_several(entry) or [entry] for entry in as_list(continuations, "continuations")]
    given = as_list(contexts, "contexts")
    if choices is not None:
        if isinstance(choices, str):
            split = f", {shown(list(choices))} for one of each letter" if 1 < len(choices) <= _MOST_LETTERS else ""
            hint = f"pass a list of choices, {shown([choices])} for a single one{split}"
            raise OptionValueError("choices", f"is the string {shown(choices)}: {hint}")
        if not (isinstance(choices, (list, tuple)) or is_array(choices) or why_not_a_list(choices)):
            choices = read_all(choices)
        shared = list(as_list(choices, "choices"))
        if len(shared) == 1 and shared[0] is choices and not is_chat(choices):
            # A list of ids, most likely meant as one choice for each id; it would run as a single choice.
            raise OptionValueError(
                "choices", "must be a list of choices, not of numbers: [[5], [6]] are two of a token, [[5, 6]] is one"
            )
        if not shared:
            raise OptionValueError("choices", "is empty: there is nothing to score")
        if any(_several(choice) for choice in shared):
            raise OptionValueError(
                "choices",
                "are the same for every context, and one of them is a list of several: pass continuations that differ "
                "between contexts as `continuations`",
            )
        return given, [shared] * len(given)
    listed = as_list(continuations, "continuations")
    if len(given) == 1 and given[0] is contexts and len(listed) > 1:
        return given, [list(listed)]  # several continuations of one context that is not in a list
    if len(given) != len(listed):
        hint = "`choices=[...]` takes the same ones for every context"
        if len(given) == 1:
            hint = "several of one context are a list of their own: [[..., ...]]"
        raise OptionValueError(
            "continuations",
            f"has {len(listed):,} for {len(given):,} context{'' if len(given) == 1 else 's'}: it must have one, or a "
            f"list of several, for each; {hint}",
        )
    return given, [_several(entry) or [entry] for entry in listed]


def _several(entry: Any) -> list[Any] | None:
    """The continuations in an entry that is a list of them; None if it is a single one."""
    if isinstance(entry, np.ndarray) and entry.ndim == 1 and entry.dtype.kind in "UTO":  # a cell of a table's column
        entry = entry.tolist()
    if not isinstance(entry, (list, tuple)) or not entry:
        return None
    first = entry[0]
    inner = isinstance(first, (str, list, tuple)) or (is_array(first) and not is_number(first))
    return list(entry) if inner else None


def _readable(entries: list[list[Any]], inputs: ScoreInputs) -> Iterator[tuple[Place, Any]]:
    """The continuations of a type that can be read; the others go to ``inputs.problems``."""
    of_texts = inputs.what == "text"
    for index, several in enumerate(entries):
        for choice, given in enumerate(several):
            why = None
            if isinstance(given, str):
                why = "is an empty string" if given == "" and not of_texts else None
            elif is_chat(given):
                why = f"is a chat; {_A_CONTINUATION_IS}"
            elif not isinstance(given, (list, tuple)) and not is_array(given):
                why = f"is {a_kind(given)}; {_A_CONTINUATION_IS}"
            if why is None:
                yield (index, choice), given
            else:
                inputs.problems[index, choice] = why if of_texts else _of_continuation(why, choice, len(several))


def _of_continuation(why: str, choice: int, count: int) -> str:
    return f"has a continuation{f' ({choice})' if count > 1 else ''} that {why}"


# -- tokens ----------------------------------------------------------------------------------------------------


def _whole_texts(asked: dict[Place, Any], read: _Reading, inputs: ScoreInputs) -> Iterator[tuple[Place, ScoreItem]]:
    prompts, problems = read(list(asked.values()))
    for number, (place, given) in enumerate(asked.items()):
        prompt = prompts[number]
        if prompt is None:
            inputs.problems[place] = problems[number]
        elif len(prompt.ids) == 1:
            inputs.problems[place] = f"is a single token, and {_NO_CONTEXT}: give it a context, or a BOS token"
        else:
            yield place, ScoreItem(*place, prompt.ids, 1, given if isinstance(given, str) else None, prompt.key)


def _continued(
    contexts: Sequence[Any], asked: dict[Place, Any], read: _Reading, inputs: ScoreInputs
) -> Iterator[tuple[Place, ScoreItem]]:
    """Items of continuations of contexts.

    A token that spans context and continuation is scored as the continuation's first token.
    """
    before, problems = read.contexts(list(contexts))
    counts: dict[int, int] = {}
    for index, _ in [*asked, *inputs.problems]:
        counts[index] = counts.get(index, 0) + 1
    joined: list[Place] = []  # text after text: the tokenizer reads both as one text
    separate: list[Place] = []
    for place, given in asked.items():
        index = place[0]
        if before[index] is None:
            inputs.problems[place] = _of_context(problems[index])
        elif isinstance(given, str) and isinstance(contexts[index], str):
            joined.append(place)
            warn_of_lost_space(place[0], contexts[index], given, read.reader.notices)
        else:
            separate.append(place)

    def refuse(place: Place, why: str) -> None:
        inputs.problems[place] = _of_continuation(why, place[1], counts[place[0]])

    for begin in range(0, len(joined), _TEXTS_AT_ONCE):
        some = joined[begin : begin + _TEXTS_AT_ONCE]
        whole, problems = read([contexts[place[0]] + asked[place] for place in some])
        for number, place in enumerate(some):
            prompt, context = whole[number], before[place[0]]
            assert context is not None
            if prompt is None:
                alone = read([asked[place]], special_tokens=False)[1]  # the context alone was read
                refuse(place, alone.get(0, problems[number]))
                continue
            if np.array_equal(prompt.ids, context.ids[: len(prompt.ids)]):  # white space that is stripped, say
                refuse(place, "adds no tokens: the tokenizer gives the same tokens with it and without it")
                continue
            first = _first_difference(context.ids, prompt.ids)
            if first == 0:
                refuse(place, f"begins inside the first token of the context, so {_NO_CONTEXT}: begin with a BOS token")
                continue
            yield place, ScoreItem(*place, prompt.ids, first, asked[place], context.key)

    # The same continuations of many contexts are read once.
    distinct = {_identity(asked[place]): asked[place] for place in separate}
    after, problems = read(list(distinct.values()), special_tokens=False)
    number_of = {identity: number for number, identity in enumerate(distinct)}
    for place in separate:
        given, context = asked[place], before[place[0]]
        assert context is not None
        number = number_of[_identity(given)]
        continuation = after[number]
        if continuation is None:
            refuse(place, problems[number])
            continue
        ids = np.concatenate([context.ids, continuation.ids])
        images = None if context.images is None else context.images.followed_by(continuation.ids)
        text = given if isinstance(given, str) else None
        yield place, ScoreItem(*place, ids, len(context.ids), text, context.key, images)


def _identity(given: Any) -> Hashable:
    return given if isinstance(given, str) else id(given)


def _of_context(why: str) -> str:
    if why.endswith("makes no tokens"):
        return f"{why}: to score whole texts pass `None` in place of contexts, else token ids that begin with a BOS"
    return why


def _first_difference(context: np.ndarray, whole: np.ndarray) -> int:
    """The first token at which a context alone and the whole text differ; at most the last token of the whole."""
    most = min(len(context), len(whole) - 1)
    differ = np.flatnonzero(context[:most] != whole[:most])
    return int(differ[0]) if len(differ) else most


def _without_special_tokens(tokenizer: Any) -> Callable[[list[str]], Any]:
    # A processor for several media takes images as its first argument, and holds the tokenizer.
    return partial(getattr(tokenizer, "tokenizer", tokenizer), add_special_tokens=False)


class _NotOfEmpty(Notices):
    """No warning about an empty prompt: an empty context asks how likely a text is at the beginning."""

    def __init__(self, others: Notices) -> None:
        super().__init__()
        self._others = others

    def __call__(self, kind: str, message: str) -> None:
        if kind != "empty":
            self._others(kind, message)
