"""From a plan to units: prefixes and requests, attached to each other and to prefixes that an earlier call kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..inputs.prompts import Prompt
from ..results.sharing_plan import SharingPlan
from .paged_cache import PagedCache
from .requests_and_prefixes import Branch, Prefix, Request, Unit

_TOKENS_PER_PARTING = 4  # beams of language models part every ten tokens or so; these part often


@dataclass
class Lineup:
    """The requests of a call in the order of the list, attached to their prefixes."""

    requests: list[Request]
    prefixes: list[Prefix]
    cached_tokens: int = 0  # prompt tokens that were found in kept prefixes
    too_long: dict[int, int] = field(default_factory=dict)  # request -> the pages that it needs, more than there are
    without_prefixes: int = 0  # requests that fit into the cache only without prefixes, and so have none


def pages_at_once(
    prompts: Sequence[Prompt],
    plan: SharingPlan,
    max_new_tokens: Sequence[int],
    page_size: int,
    widths: Sequence[int] | None = None,
) -> int:
    """Pages that the whole list takes when all of it is in the cache at the same time.

    No request alone takes more than that: without prefixes it leaves fewer ends of pages empty.
    ``widths``: in a beam search, the number of beams of each prompt. Wherever beams part, one of them begins a page.
    """
    beams = 0
    if widths is not None:
        for width, new in zip(widths, max_new_tokens, strict=True):
            beams += width * (2 - (1 - new) // page_size) + int(new) // _TOKENS_PER_PARTING
        max_new_tokens = [1] * len(prompts)
    ends = np.array([segment.end for segment in plan.segments] + [0], dtype=np.int64)  # the 0 stands for no segment
    own = np.array([len(prompt.ids) for prompt in prompts], dtype=np.int64) + np.asarray(max_new_tokens) - 1
    own -= ends[plan.parents] - ends[plan.parents] % plan.aligned
    shared = np.array([segment.end - segment.start + segment.start % plan.aligned for segment in plan.segments])
    return int((-(-own // page_size)).sum() + (-(-shared.astype(np.int64) // page_size)).sum()) + beams


def most_pages_alone(
    prompts: Sequence[Prompt], max_new_tokens: Sequence[int], page_size: int, widths: Sequence[int] | None
) -> int:
    """Pages that the largest of the prompts takes by itself, with its answer or all of its beams."""
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
    samples: Sequence[int] | None = None,
    can_stop: Sequence[bool] | None = None,
    reach: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
) -> Lineup:
    """A request for each entry of ``prompts``, in which a prompt of several samples stands as many times.

    ``samples``: how many there are of each prompt; None: one. ``can_stop``: of each request; None: all of them can.
    ``reach``: how many tokens of each prompt may come from prefixes that an earlier call kept, which give no logits;
    None: all. ``widths``: in a beam search, the number of beams of each prompt.
    """
    each = [1] * len(prompts) if samples is None else samples
    owners = [(index, sample) for index, count in enumerate(each) for sample in range(count)]
    prefixes: list[Prefix] = []
    lineup = Lineup([], prefixes)
    rank = np.empty(len(prompts), dtype=np.int64)
    rank[plan.order] = np.arange(len(prompts))
    most = None if reach is None else np.asarray(reach, dtype=np.int64)
    for segment in plan.segments:
        prompt = prompts[segment.prompt]
        below = prefixes[segment.parent] if segment.parent >= 0 else None
        start = segment.start - segment.start % plan.aligned
        prefix = Prefix(prompt.keys, start, segment.end, key=prompt.key, places=prompt.places, two_way=prompt.two_way)
        prefix.begins_with(segment.start - start)
        limit = segment.end
        if most is not None:
            first = int(rank[segment.prompt])
            limit = min(limit, int(most[plan.order[first : first + segment.members]].min()))
        lineup.cached_tokens += _attach(prefix, below, limit, cache, plan.aligned)
        prefixes.append(prefix)
    found: list[int] = []  # of each request, the tokens that a kept prefix holds of its own
    for place, prompt in enumerate(prompts):
        parent = int(plan.parents[place])
        below = prefixes[parent] if parent >= 0 else None
        shared = below.end if below is not None else 0
        copied = shared % plan.aligned
        request = (Request if widths is None else Branch)(
            owners[place][0],
            prompt.ids,
            int(max_new_tokens[place]),
            sample=owners[place][1],
            rank=int(rank[place]),
            start=shared - copied,
            key=prompt.key,
            can_stop=can_stop is None or can_stop[place],
            keys=prompt.keys,
            places=prompt.places,
            two_way=prompt.two_way,
        )
        request.begins_with(copied)
        if isinstance(request, Branch) and widths is not None:
            request.width = widths[place]
        limit = len(prompt.ids) - 1
        limit = limit if most is None else min(limit, int(most[place]))
        found.append(_attach(request, below, limit, cache, plan.aligned))
        lineup.requests.append(request)
    # Retire a prefix whose only reader turned out empty because a kept prefix covers it.
    for prefix in reversed(prefixes):
        if prefix.refs == 0:
            cache.retire(prefix, keep=False)
    pages_below: dict[Unit | None, int] = {}  # a base and what it stands on, for all that stand on it
    for place, request in enumerate(lineup.requests):
        if (held := pages_below.get(request.base)) is None:
            held = pages_below[request.base] = cache.pages_below(request)
        if cache.fits_alone(request, held):
            lineup.cached_tokens += found[place]
        else:
            _run_without_prefixes(request, cache, lineup, place)
            pages_below.clear()  # less of its prefixes may be read now
    return lineup


def _attach(unit: Prefix | Request, below: Prefix | None, limit: int, cache: PagedCache, aligned: int) -> int:
    """Attach ``unit`` to the prefix below it in the plan, or to a kept prefix that holds more of its tokens.

    ``limit``: the position before which tokens may come from a kept prefix; a multiple of ``aligned`` does. Returns
    how many were found there.
    """
    found = 0
    below_is_cached = below is None or below.start == below.end  # only then a kept prefix may hold more
    if cache.kept_prefixes and below_is_cached and limit > unit.first_computed:
        ids = unit.ids if isinstance(unit, Prefix) else unit.prompt_keys
        kept, agreed = cache.match(ids, limit, unit.key)
        agreed -= agreed % aligned
        if kept is not None and agreed > unit.first_computed:
            found = agreed - unit.first_computed
            unit.start = agreed
            unit.begins_with(0)
            below = kept
    cache.attach(unit, below)
    return found


def _run_without_prefixes(request: Request, cache: PagedCache, lineup: Lineup, place: int) -> None:
    """A deep chain of prefixes takes a few more pages than its tokens alone, as each prefix begins a page."""
    cache.retire(request, keep=False)
    request.start = 0
    request.begins_with(0)
    if cache.fits_alone(request):
        lineup.without_prefixes += 1
    else:
        lineup.too_long[place] = request.most_pages(cache.page_size)
