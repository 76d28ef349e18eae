"""Grammars compiled by llguidance, for a tokenizer that is prepared once.

A compiled grammar is a matcher at its beginning. Each sequence gets a copy, which costs next to nothing. Copies of one
matcher still share memory, for which threads wait on each other: the masks of 256 copies took 1.3 ms on 16 cores, and
0.4 ms where they were copies of 16 matchers. So a grammar of many sequences is compiled several times.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..errors import OptionValueError
from ..inputs.grammar_options import Grammar
from ..inputs.preparing import grammar_bar, loading
from ..wording import a_kind, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_KEPT = 1024  # grammars of a tokenizer; a simple one takes a tenth of a megabyte
_MOST_CHARACTERS = 300  # of llguidance's own words
_SILENT = 0
_COPIES = 4  # of a matcher, before the grammar is compiled once more
_MOST_MATCHERS = 16  # of a grammar
_MOST_SECONDS = 0.05  # for compiling a grammar more than once
_FORMATS = {"schema": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}


@dataclass(eq=False)
class _Compiled:
    matchers: list[LLMatcher]  # at their beginning
    seconds: float  # that compiling it took
    copies: int = 0

    @property
    def has_enough(self) -> bool:
        count = len(self.matchers)
        return self.copies < _COPIES * count or count >= (os.cpu_count() or 1) or count * self.seconds > _MOST_SECONDS


class CompiledGrammars:
    """For one tokenizer. ``vocabulary``: of masks, which may be wider than the tokenizer's. Threads may share it."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.vocabulary: int = tokenizer.vocab_size
        self.end_tokens: list[int] = list(tokenizer.eos_tokens)  # as masks have them
        self._tokenizer = tokenizer
        self._kept: OrderedDict[Grammar, _Compiled | str] = OrderedDict()
        self._lock = threading.Lock()

    def problem(self, grammar: Grammar) -> str | None:
        """Why no answer can be of this grammar; None if it is a good one. To follow the option's name."""
        return self.look_at(grammar)[0]

    def look_at(self, grammar: Grammar) -> tuple[str | None, list[str]]:
        """The problem, and what llguidance warns of where there is none."""
        compiled = self._compiled(grammar)
        if isinstance(compiled, str):
            return compiled, []
        return None, [_in_short(each) for each in compiled.matchers[0].get_grammar_warnings()]

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """At its beginning, for one sequence alone."""
        compiled = self._compiled(grammar)
        if isinstance(compiled, str):
            raise OptionValueError(grammar.option, compiled)
        more = None if compiled.has_enough else self._compile(grammar)
        with self._lock:
            if more is not None and not isinstance(more, str):
                compiled.matchers.append(more)
            compiled.copies += 1
            return compiled.matchers[compiled.copies % len(compiled.matchers)].deep_copy()

    def _compiled(self, grammar: Grammar) -> _Compiled | str:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
        began = time.perf_counter()
        found = self._compile(grammar)
        made = found if isinstance(found, str) else _Compiled([found], time.perf_counter() - began)
        with self._lock:
            self._kept[grammar] = made
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return made

    def _compile(self, grammar: Grammar) -> LLMatcher | str:
        from llguidance import LLMatcher, grammar_from

        try:
            source = grammar_from(_FORMATS[grammar.option], grammar.text)  # type: ignore[arg-type]
        except ValueError as error:  # of a grammar that it takes for GBNF, and cannot translate
            return f"cannot be used: llguidance says: {_in_short(str(error))}"
        matcher = LLMatcher(self._tokenizer, source, log_level=_SILENT)
        if matcher.is_error():
            return f"cannot be used: llguidance says: {_in_short(matcher.get_error())}"
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            return f"cannot begin with any token of this tokenizer: llguidance says: {_in_short(first.get_error())}"
        return matcher


def _in_short(words: str) -> str:
    """llguidance's message in one line, without the state of its parser."""
    text = " ".join(words.partition("<state>")[0].partition("<non-verbose/>")[0].split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def error_of(matcher: LLMatcher) -> str:
    return _in_short(matcher.get_error())


# -- tokenizers --------------------------------------------------------------------------------------------------------

# By a tokenizer: its size when it was prepared, the width of masks, and the token that ends answers.
_PREPARED: WeakKeyDictionary[Any, dict[tuple[int, int, int], CompiledGrammars]] = WeakKeyDictionary()


def grammars_for(tokenizer: Any, vocabulary: int, option: str, ends: Sequence[int]) -> CompiledGrammars:
    """What compiles grammars for a tokenizer: prepared with the first one, which takes seconds for a large vocabulary.

    ``vocabulary``: of the model's logits. ``option``: the one to name in an error. ``ends``: tokens that end answers,
    for a tokenizer that knows of none.
    """
    size = len(tokenizer)
    width = max(size, vocabulary)
    own = [getattr(tokenizer, "eos_token_id", None), *ends]
    end = next((token for token in own if token is not None and token < size), None)
    if end is None:
        raise OptionValueError(
            option, "ends an answer by an EOS token, and this tokenizer has none: set its `eos_token`"
        )
    known = _PREPARED.setdefault(tokenizer, {})
    key = size, width, end
    if key not in known:
        with loading(), grammar_bar(size):
            known[key] = CompiledGrammars(_prepared(tokenizer, width, option, end))
    return known[key]


def _prepared(tokenizer: Any, width: int, option: str, end: int) -> LLTokenizer:
    try:
        from llguidance.hf import from_tokenizer
    except ModuleNotFoundError as error:
        why = "needs llguidance, which is not installed: pip install 'hf-batchllm[json]'"
        raise OptionValueError(option, why) from error
    try:
        return from_tokenizer(tokenizer, n_vocab=width, eos_token=end)
    except Exception as error:  # Rust's, of several kinds
        why = f"does not work with this tokenizer, {a_kind(tokenizer)}: llguidance says: {first_line(error)}"
        raise OptionValueError(option, why) from error
