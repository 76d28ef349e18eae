"""From a plan to what runs: prefixes and requests, standing on each other and on what an earlier call kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..inputs.prompts import Prompt
from ..results.sharing_plan import SharingPlan
from .paged_cache import PagedCache
from .units import Branch, Prefix, Request, Unit

_TOKENS_TO_A_PARTING = 4  # of a beam search that parts often; of language models ten or so


@dataclass
class Lineup:
    """The requests of a call in the order of the list, attached to their prefixes."""

    requests: list[Request]
    prefixes: list[Prefix]
    cached_tokens: int = 0  # of the prompts, found in kept prefixes
    too_long: dict[int, int] = field(default_factory=dict)  # request -> pages that it would need, more than there are
    apart: int = 0  # requests that fit only without their prefixes


def pages_at_once(
    prompts: Sequence[Prompt],
    plan: SharingPlan,
    max_new_tokens: Sequence[int],
    page_size: int,
    widths: Sequence[int] | None = None,
) -> int:
    """Pages that the whole list takes when all of it is in the cache at the same time.

    That is never less than any of its requests takes without its prefixes: fewer ends of pages are left empty then.
    ``widths``: of a beam search, how many beams each prompt has. Each parting of their ways begins a page.
    """
    beams = 0
    if widths is not None:
        for width, new in zip(widths, max_new_tokens, strict=True):
            beams += width * (2 - (1 - new) // page_size) + int(new) // _TOKENS_TO_A_PARTING
        max_new_tokens = [1] * len(prompts)
    ends = np.array([segment.end for segment in plan.segments] + [0], dtype=np.int64)  # the last: of no segment
    own = np.array([len(prompt.ids) for prompt in prompts], dtype=np.int64) + np.asarray(max_new_tokens) - 1
    own -= ends[plan.parents]
    shared = np.array([len(segment) for segment in plan.segments], dtype=np.int64)
    return int((-(-own // page_size)).sum() + (-(-shared // page_size)).sum()) + beams


def most_pages_alone(
    prompts: Sequence[Prompt], max_new_tokens: Sequence[int], page_size: int, widths: Sequence[int] | None
) -> int:
    """Pages that the longest of them takes, with all of its beams."""
    most = 1
    for place, (prompt, new) in enumerate(zip(prompts, max_new_tokens, strict=True)):
        width = 0 if widths is None else widths[place]
        tokens = len(prompt.ids) + (0 if width else new - 1)
        most = max(most, -(-tokens // page_size) + width * -(-(new - 1) // page_size))
    return most


def line_up(
    prompts: Sequence[Prompt],
    plan: SharingPlan,
    max_new_tokens: Sequence[int],
    cache: PagedCache,
    samples: int | Sequence[int] = 1,
    can_stop: bool | Sequence[bool] = True,
    reach: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
) -> Lineup:
    """One request for each prompt (prompts of several samples are listed as often); prefixes before their readers.

    ``samples``: of each prompt, or of all; ``can_stop``: each request, or all of them. ``reach``: how many tokens of
    each prompt may be taken from prefixes that an earlier call has kept, of which there are no logits; None: all.
    ``widths``: of a beam search, how many beams each prompt has.
    """
    if isinstance(samples, int):
        samples = [samples] * (len(prompts) // samples)
    owners = [(index, sample) for index, count in enumerate(samples) for sample in range(count)]
    stops = [can_stop] * len(prompts) if isinstance(can_stop, bool) else can_stop
    prefixes: list[Prefix] = []
    lineup = Lineup([], prefixes)
    rank = np.empty(len(prompts), dtype=np.int64)
    rank[plan.order] = np.arange(len(prompts))
    most = None if reach is None else np.asarray(reach, dtype=np.int64)
    for segment in plan.segments:
        prompt = prompts[segment.prompt]
        below = prefixes[segment.parent] if segment.parent >= 0 else None
        prefix = Prefix(prompt.ids, segment.start, segment.end, key=prompt.key)
        limit = segment.end
        if most is not None:
            first = int(rank[segment.prompt])
            limit = min(limit, int(most[plan.order[first : first + segment.members]].min()))
        lineup.cached_tokens += _attach(prefix, below, limit, cache)
        prefixes.append(prefix)
    found: list[int] = []
    for place, prompt in enumerate(prompts):
        parent = int(plan.parents[place])
        below = prefixes[parent] if parent >= 0 else None
        request = (Request if widths is None else Branch)(
            owners[place][0],
            prompt.ids,
            int(max_new_tokens[place]),
            sample=owners[place][1],
            rank=int(rank[place]),
            start=below.end if below is not None else 0,
            key=prompt.key,
            can_stop=stops[place],
        )
        if isinstance(request, Branch) and widths is not None:
            request.width = widths[place]
        limit = len(prompt.ids) - 1
        found.append(_attach(request, below, limit if most is None else min(limit, int(most[place])), cache))
        lineup.requests.append(request)
    # A prefix that only an empty one stood on (a kept prefix took its place) has lost its readers: it goes.
    for prefix in reversed(prefixes):
        if prefix.refs == 0:
            cache.retire(prefix, keep=False)
    for place, request in enumerate(lineup.requests):
        if cache.fits_alone(request):
            lineup.cached_tokens += found[place]
        else:
            _set_apart(request, cache, lineup, place)
    return lineup


def _attach(unit: Unit, below: Prefix | None, limit: int, cache: PagedCache) -> int:
    """Put ``unit`` on the prefix below it in the plan, or on a kept one that reaches further into its tokens.

    Returns how many of its tokens were found in the kept one.
    """
    found = 0
    inside = below is None or _is_cached(below)
    if cache.kept_prefixes and inside and limit > unit.start:
        ids = unit.ids if isinstance(unit, Prefix) else unit.prompt_ids  # type: ignore[attr-defined]
        kept, reach = cache.match(ids, limit, unit.key)
        if kept is not None and reach > unit.start:
            found = reach - unit.start
            unit.start = unit.computed = reach
            below = kept
    cache.attach(unit, below)
    return found


def _is_cached(prefix: Prefix) -> bool:
    """Whether all of a planned prefix was found in kept ones, so that more may be found beyond it."""
    return prefix.start == prefix.end


def _set_apart(request: Request, cache: PagedCache, lineup: Lineup, place: int) -> None:
    """Pages are ragged: a deep tree may take a few more than the request alone. Then it goes without the tree."""
    cache.retire(request, keep=False)
    request.start = request.computed = request.lost = 0
    if cache.fits_alone(request):
        lineup.apart += 1
    else:
        lineup.too_long[place] = request.most_pages(cache.page_size)
