"""Whether a prompt and its new tokens fit into the model: refused in words that follow "prompt 3", or warned of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..notices import Notices
from ..wording import counted
from .options import Options


class Limits(Protocol):
    """Those of a model's architecture; None where there is none."""

    @property
    def name(self) -> str: ...
    @property
    def max_positions(self) -> int | None: ...  # learned positions
    @property
    def rope_limit(self) -> int | None: ...  # beyond it the rotary embedding is scaled by the length
    @property
    def vocab_size(self) -> int: ...  # ids that the model can read
    @property
    def head_rows(self) -> int | None: ...  # ids that have logits; None where the head does not tell


def id_without_logits(ids: np.ndarray, limits: Limits) -> str | None:
    """Why a log-probability cannot be given to each of ``ids`` ([tokens]): a head may be narrower than the table."""
    rows = limits.head_rows
    if rows is None or rows >= limits.vocab_size or not (ids >= rows).any():
        return None
    token = int(ids[ids >= rows][0])
    return (
        f"has token id {token:,}, which has no log-probability: {limits.name} reads {limits.vocab_size:,} ids, and its "
        f"head gives logits of the first {rows:,}"
    )


def length_problem(
    tokens: int, new_tokens: int, options: Options, limits: Limits, default_limit: int | None
) -> str | None:
    """Why a prompt of so many ``tokens`` may not grow by ``new_tokens``.

    ``default_limit``: the positions that bound ``generate``'s default length.
    """
    if new_tokens <= 0 and options.has_default_length:
        return f"has {tokens:,} tokens, and {limits.name} has {default_limit:,} positions"
    if new_tokens <= 0:
        return (
            f"has {tokens:,} tokens already and `max_length` is {options.config.max_length:,}: "
            "increase `max_length` or, better, set `max_new_tokens`"
        )
    described = f"has {tokens:,} tokens and may grow by {new_tokens:,}"
    positions = tokens + new_tokens - 1  # the last token is never run
    return position_problem(described, positions, limits, "shorten it, or lower `max_new_tokens`")


def position_problem(described: str, positions: int, limits: Limits, remedy: str) -> str | None:
    """Why so many positions cannot be run. ``described``: the sequence in words; ``remedy``: what to do about it."""
    limit = limits.max_positions
    if limit is not None and positions > limit:
        return f"{described}, but {limits.name} has learned {limit:,} positions: {remedy}"
    limit = limits.rope_limit
    if limit is not None and positions > limit:
        return (
            f"{described}: beyond {limit:,} {limits.name} scales its rotary embedding by the length, which is not "
            "supported yet"
        )
    return None


# -- the context -------------------------------------------------------------------------------------------------------


class Reach(NamedTuple):
    """How far a prompt may come."""

    place: int  # in the list passed in
    tokens: int
    new_tokens: int  # the most that it may grow by


def context_of(config: Any) -> int | None:
    """The tokens that a model was made for, as ``generate`` knows them; None where its config does not say."""
    own = getattr(config, "max_position_embeddings", None)
    found = own or getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def warn_beyond_context(
    config: Any, reaches: Iterable[Reach], count: int, name: str, notices: Notices, what: str = "prompt"
) -> None:
    """``config``: of the model called ``name``. ``reaches``: of those among ``count`` prompts that will run."""
    context = context_of(config)
    if context is None:
        return
    beyond = [each for each in reaches if each.tokens + each.new_tokens - 1 > context]  # the last token is never run
    if not beyond:
        return
    long = [each for each in beyond if each.tokens > context]
    may_grow = [each for each in beyond if each.tokens <= context]
    made_for = f"the {context:,} tokens that {name} was made for (`max_position_embeddings`)"
    parts: list[str] = []
    if long:
        longest = max(each.tokens for each in long)
        whose = notices.places([each.place for each in long], what)
        if len(long) == 1:
            parts.append(f"{whose} has {longest:,} tokens, more than {made_for}")
        else:
            parts.append(
                f"{len(long):,} of {count:,} {what}s are longer than {made_for}: {whose}; the longest has "
                f"{longest:,} tokens"
            )
    if may_grow:
        whose = notices.places([each.place for each in may_grow], what)
        most = max(may_grow, key=lambda each: each.tokens + each.new_tokens)
        than = "them" if long else made_for
        if len(may_grow) == 1:
            parts.append(
                f"{whose} has {counted(most.tokens, 'token')} and may grow by {most.new_tokens:,}, beyond {than}"
            )
        else:
            parts.append(
                f"{len(may_grow):,} of {count:,} {what}s may grow beyond {than}: {whose}; the longest may have "
                f"{most.tokens + most.new_tokens:,} tokens"
            )
    notices.of_prompts("context", f"{'. '.join(parts)}. Results may be poor there: {_remedy(beyond, context)}")


def _remedy(beyond: Sequence[Reach], context: int) -> str:
    new_tokens = max(each.new_tokens for each in beyond)
    if new_tokens >= context:
        return "lower `max_new_tokens`"
    if new_tokens == 0:  # they are scored
        return "shorten what is too long"
    most = f"set `max_prompt_tokens` (to {context - new_tokens + 1:,}, say) or shorten what is too long"
    return most if any(each.tokens > context for each in beyond) else f"lower `max_new_tokens`, or {most}"
