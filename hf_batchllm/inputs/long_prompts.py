"""Prompts that are too long: cut off where ``max_prompt_tokens`` asks for it, warned of beyond the model's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..notices import Notices
from ..wording import counted


def shortened(ids: np.ndarray, most: int, side: str | None, around: Sequence[int], ends: bool) -> np.ndarray:
    """``most`` of the tokens. Those that the tokenizer puts ``around`` a text stay, such as its BOS.

    ``ends``: whether those at the end stay, too.
    """
    first = 0
    while first < min(len(around), len(ids)) and ids[first] == around[first]:
        first += 1
    last = len(around) - first if ends and first < len(around) else 0
    if last and ids[-last:].tolist() != list(around[first:]):
        last = 0
    if first + last >= most:
        first = last = 0
    body, room = ids[first : len(ids) - last], most - first - last
    kept = body[:room] if side == "right" else body[len(body) - room :]
    return np.concatenate([ids[:first], kept, ids[len(ids) - last :]])


def warn_of_cuts(lengths: Mapping[int, int], count: int, notices: Notices) -> None:
    """``lengths``: of the prompts that were cut, before they were; ``count``: all prompts of the call."""
    if not lengths:
        return
    longest = max(lengths.values())
    if len(lengths) == 1:
        what = f"{notices.places([*lengths])} has {longest:,} tokens, more than `max_prompt_tokens`, and was cut"
    else:
        what = (
            f"{len(lengths):,} of {count:,} prompts have more tokens than `max_prompt_tokens` and were cut "
            f"({notices.places(sorted(lengths))}; the longest has {longest:,})"
        )
    notices.of_prompts("cut", what)


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
    beyond: Sequence[Reach], count: int, context: int, name: str, notices: Notices, what: str = "prompt"
) -> None:
    """``beyond``: the prompts that may come beyond the ``context`` of the model called ``name``."""
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
