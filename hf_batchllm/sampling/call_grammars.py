"""The grammars of a call's prompts, checked with the model's tokenizer before any work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OptionValueError, TokenizerError, UnsupportedOptionError
from ..inputs.grammar_options import GivenGrammars, Grammar, in_a_list
from ..inputs.options import Options
from ..notices import Notices
from .compiled_grammars import CompiledGrammars, grammars_for
from .grammar_masks import GrammarMasks

_FEW = 16  # grammars that are compiled without threads

# Fields of a config, besides the end tokens, that say when an answer ends: a grammar does.
_NOT_BESIDE = ("min_new_tokens", "min_length", "forced_bos_token_id", "forced_eos_token_id")


@dataclass(frozen=True, eq=False)
class CallGrammars:
    """``compiled``: None in another process than the one that has checked them."""

    each: Sequence[Grammar | None]  # [all prompts]
    compiled: CompiledGrammars | None = None

    @property
    def option(self) -> str:
        """The name of one, for what is said about all."""
        return next(grammar.option for grammar in self.each if grammar is not None)

    def __reduce__(self) -> Any:
        return CallGrammars, (self.each,)

    def here(self, options: Sequence[Options], tokenizer: Callable[[], Any], vocabulary: int) -> CallGrammars:
        """The same, compiled in this process."""
        return replace(self, compiled=_compiled(self.option, options, tokenizer, vocabulary))

    def masks(self, ends: Sequence[frozenset[int]], pinned: bool) -> GrammarMasks:
        """``ends``: the tokens that end the answer of each prompt. ``pinned``: whether masks go to a GPU."""
        assert self.compiled is not None
        return GrammarMasks(self.each, self.compiled, ends, pinned)


def checked_grammars(
    given: GivenGrammars,
    options: Sequence[Options],  # [all prompts]
    tokenizer: Callable[[], Any],
    vocabulary: int,
    notices: Notices,
) -> tuple[CallGrammars | None, dict[int, str]]:
    """The grammars of the prompts, and why some prompts cannot have theirs."""
    each, wrong = given.of_each(len(options))
    compiled = _compiled(given.option, options, tokenizer, vocabulary)
    problems = _problems(compiled, [grammar for grammar in dict.fromkeys(each) if grammar is not None], notices)
    for whole in given.for_all.values():
        if whole in problems:
            raise OptionValueError(whole.option, problems[whole])
    conflicts: dict[tuple[str, Options], UnsupportedOptionError | None] = {}
    for place, (grammar, own) in enumerate(zip(each, options, strict=True)):
        if grammar is None:
            continue
        if (key := (grammar.option, own)) not in conflicts:
            conflicts[key] = _conflict(*key)
        conflict = conflicts[key]
        if conflict is not None and given.for_all and len(set(options)) == 1:  # one call, one mistake
            raise conflict
        if conflict is not None:
            wrong[place] = in_a_list(conflict)
        elif grammar in problems:
            wrong[place] = f"has a `{grammar.option}` that {problems[grammar]}"
    each = [None if place in wrong else grammar for place, grammar in enumerate(each)]
    return (CallGrammars(each, compiled) if any(each) else None), wrong


def _problems(compiled: CompiledGrammars, grammars: Sequence[Grammar], notices: Notices) -> dict[Grammar, str]:
    if len(grammars) <= _FEW:
        found = [compiled.look_at(grammar) for grammar in grammars]
    else:  # llguidance lets go of Python while it compiles
        with ThreadPoolExecutor() as threads:
            found = list(threads.map(compiled.look_at, grammars))
    for grammar, (_, warnings) in zip(grammars, found, strict=True):
        for warning in warnings:
            notices(f"grammar: {warning}", f"`{grammar.option}`: llguidance says: {warning}")
    return {grammar: why for grammar, (why, _) in zip(grammars, found, strict=True) if why is not None}


def _compiled(
    option: str, options: Sequence[Options], tokenizer: Callable[[], Any], vocabulary: int
) -> CompiledGrammars:
    given = options[0].arguments.tokenizer if options else None
    try:
        tokenizer_here = tokenizer() if given is None else given
    except TokenizerError as error:
        raise TokenizerError(f"`{option}` needs a tokenizer: {error}, or pass `tokenizer=` here") from error
    ends = sorted(frozenset().union(*(each.eos_token_ids for each in dict.fromkeys(options))))
    return grammars_for(tokenizer_here, vocabulary, option, ends)


def _conflict(name: str, options: Options) -> UnsupportedOptionError | None:
    """An error if options say otherwise when an answer ends. ``name``: of the option that a grammar was given as."""
    if options.num_beams > 1:
        return UnsupportedOptionError(name, "does not go with `num_beams`: leave one of them out")
    if not options.eos_token_ids:
        why = "ends an answer by an EOS token, and there is none: leave out `ignore_eos` and `eos_token_id=None`"
        return OptionValueError(name, why)
    for other in _NOT_BESIDE:
        if getattr(options.config, other, None):
            why = f"does not go with `{name}`, which says itself what comes and when it ends: leave one of them out"
            return OptionValueError(other, why)
    return None
