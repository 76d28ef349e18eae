"""Why a prompt does not fit into the KV cache, and what helps."""

from __future__ import annotations

from torch import nn

from ..errors import PromptError
from ..inputs.base_model import base_model
from ..inputs.prompt_lengths import context_of
from ..planning.call_plan import CallPlan
from ..planning.lineup import Lineup
from ..planning.requests_and_prefixes import Branch, Request
from ..wording import counted, shown_size
from .kv_memory import KVMemory
from .resources import Resources


def leave_out_too_long(
    problems: dict[int, str], plan: CallPlan, lineup: Lineup, resources: Resources, strict: bool
) -> None:
    """Take prompts that do not fit out of the call. ``problems``: of its job, by the prompts' place in the list.

    strict: they are an error instead.
    """
    requests, kv, model = lineup.requests, resources.kv, resources.model
    named = {
        requests[place].index: why_too_long(requests[place], pages, kv, model)
        for place, pages in lineup.too_long.items()
    }
    if named and strict:
        raise PromptError({**problems, **named})
    problems.update(named)
    if named:
        refused = {place for place, request in enumerate(requests) if request.index in named}
        lineup.requests = [request for place, request in enumerate(requests) if place not in refused]
        plan.leave_out(refused)
    if lineup.without_prefixes:
        resources.notices(
            "apart",
            f"{lineup.without_prefixes:,} sequences share prefixes but fit into the KV cache only alone, so "
            "all of their tokens are computed: raise `kv_memory`, or set a smaller `page_size`",
        )


def why_too_long(request: Request, pages: int, kv: KVMemory, model: nn.Module) -> str:
    """``pages``: that it needs, and the units below it."""
    cache = kv.cache
    assert cache is not None
    prompt, new = request.prompt_tokens, request.max_new_tokens
    needed, have = pages * kv.page_bytes, cache.num_pages * kv.page_bytes
    slots = 0 if cache.slots is None else 1 + (request.width if isinstance(request, Branch) else 0)
    states = slots * kv.architecture.slot_bytes
    beams = request.width if isinstance(request, Branch) else 1
    room = cache.num_pages * cache.page_size
    # The last token is never run.
    most = (cache.num_pages - -(-prompt // cache.page_size)) // beams * cache.page_size + 1
    if beams == 1:
        most = room - prompt + 1
    grows = "" if new == 1 else f" and may grow by {new:,}"
    grows += f" in each of {beams:,} beams" if beams > 1 else ""
    beside = f" beside {shown_size(states, at_least=True)} for its states" if states else ""
    remedies = []
    if new > 1:
        remedies.append("lower `max_new_tokens`" + _most_new_tokens(most, prompt, kv, model))
    else:
        remedies.append("shorten it")
    if needed + states <= kv.within_reach():
        remedies.append(f'raise `kv_memory` (to "{shown_size(needed + states, at_least=True)}")')
    taken = f"{shown_size(needed, at_least=True)} of KV cache{beside}"
    return (
        f"has {counted(prompt, 'token')}{grows}, which takes {taken}, and there are {shown_size(have)}, enough for "
        f"{counted(room, 'token')}: {', or '.join(remedies)}"
    )


def _most_new_tokens(most: int, prompt: int, kv: KVMemory, model: nn.Module) -> str:
    """In words. ``most``: as many as the KV cache has room for; the model's context may be smaller."""
    context = context_of(base_model(model).config)
    if context is not None and 0 < context - prompt + 1 < most:
        name = kv.architecture.name
        return f" (to {context - prompt + 1:,} at most: {name} was made for {context:,} tokens)"
    return f" (to {most:,} at most)" if most > 0 else " and shorten it"
