"""Prompts -> ``SharingPlan``: which tokens are computed once for several prompts, and in which order prompts run.

Sorted prompts form one radix tree, as prompts with a common prefix are neighbours. A node of the tree that saves enough
becomes a ``Segment``; any other node dissolves into the nodes below it. No model and no torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import BatchConfig
from ..errors import ConfigError
from ..inputs.garbage_collection import garbage_collection_paused
from ..inputs.preparing import planning_bar
from ..inputs.prompts import Prompt, prepare_prompts
from ..inputs.short_tracebacks import with_short_tracebacks
from ..inputs.token_ids import bytes_of
from ..results.sharing_plan import Segment, SharingPlan
from .worthwhile_prefixes import build_tree, nearest_kept, shared_lengths

MIN_SHARED_TOKENS: int = BatchConfig.min_shared_tokens


@with_short_tracebacks
def plan_prompts(prompts: Any, tokenizer: Any = None, *, min_shared_tokens: int = MIN_SHARED_TOKENS) -> SharingPlan:
    """The plan for a list of prompts, without a model: ``print(plan_prompts(prompts, tokenizer))``.

    ``prompts`` may be anything that ``BatchGenerator.generate`` takes. Strings and chats need the ``tokenizer``.
    """
    loader = None if tokenizer is None else lambda: tokenizer
    prepared = prepare_prompts(prompts, tokenizer=loader)
    plan = plan_sharing(prepared, min_shared_tokens=min_shared_tokens)
    if tokenizer is not None:
        plan.add_labels(prepared, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    return plan


def plan_sharing(
    prompts: Sequence[Prompt],
    *,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
    share: bool = True,
    new_tokens: int | Sequence[int] = 1,
    multiple: int = 1,
) -> SharingPlan:
    """The plan with the fewest tokens to compute, where each segment costs ``min_shared_tokens`` more than it has.

    So a segment is kept if it saves at least as many. ``new_tokens``, of each prompt or of all, decide only the order.
    With ``share=False`` there are no segments; the order follows the same rule. To plan several samples of a prompt,
    list it as many times. Segments end at positions that are a ``multiple``.
    """
    if not isinstance(min_shared_tokens, (int, np.integer)) or isinstance(min_shared_tokens, bool):
        raise ConfigError(f"min_shared_tokens is {min_shared_tokens!r}; it is a number of tokens, 0 or more")
    if min_shared_tokens < 0:
        raise ConfigError(f"min_shared_tokens is {min_shared_tokens}; it must be 0 or more")
    count = len(prompts)
    lengths = np.fromiter((len(prompt.ids) for prompt in prompts), np.int64, count)
    decode = np.broadcast_to(np.asarray(new_tokens, np.int64), (count,))
    if count == 0:
        nothing = np.zeros(0, np.int64)
        return SharingPlan((), nothing, nothing, 0, 0, nothing)
    if lengths.min() == 0:
        raise ValueError(f"prompt {int(lengths.argmin())} is empty")

    with garbage_collection_paused(), planning_bar(count):
        return _plan(prompts, lengths, decode, share, int(min_shared_tokens), multiple)


def _plan(
    prompts: Sequence[Prompt], lengths: np.ndarray, decode: np.ndarray, share: bool, fee: int, multiple: int
) -> SharingPlan:
    count = len(prompts)
    # by_prefix holds prompt indices in sorted order; a "place" is a position there.
    by_prefix, shared = _sorted_by_prefix(prompts) if share else (np.arange(count), [0] * count)
    longest = max(shared)
    shared = [length - length % multiple for length in shared]
    tree = build_tree(shared)
    nearest = np.asarray([*nearest_kept(tree, lengths[by_prefix], fee), -1], np.int64)
    # Index -1 stands for "no node": it finds the -1 added at the end here, and the 0 added at the end of `depth`.
    depth = np.asarray([*tree.depth, 0], np.int64)
    kept = np.flatnonzero(nearest[:-1] == np.arange(len(tree.depth)))
    kept_above = nearest[np.asarray(tree.parent, np.int64)[kept]]
    first = np.asarray(tree.first, np.int64)[kept]
    members = np.asarray(tree.last, np.int64)[kept] - first + 1
    row_above = nearest[np.asarray(tree.leaf_parent, np.int64)]

    # The cost of each place: the row's own tokens, and those of the segments that begin there.
    cost = lengths[by_prefix] - depth[row_above]
    np.add.at(cost, first, depth[kept] - depth[kept_above])
    at_top = kept_above < 0
    run = _run_order(by_prefix, cost, decode[by_prefix], first[at_top], members[at_top])
    run_place = np.empty(count, np.int64)
    run_place[run] = np.arange(count)

    # In run order, and above before below where both begin with the same row: depth-first.
    listed = np.lexsort((depth[kept], run_place[first]))
    number = np.full(len(tree.depth) + 1, -1, np.int64)
    number[kept[listed]] = np.arange(len(kept))
    order = by_prefix[run]
    parents = np.empty(count, np.int64)
    parents[by_prefix] = number[row_above]
    columns = (
        number[kept_above],
        by_prefix[first],
        depth[kept_above],
        depth[kept],
        members,
    )
    segments = tuple(map(Segment, range(len(kept)), *(column[listed].tolist() for column in columns)))
    for result in (parents, order, lengths):
        result.flags.writeable = False
    longest = 0 if segments else longest
    total, computed = int(lengths.sum()), int(cost.sum())
    return SharingPlan(
        segments, parents, order, total, computed, lengths, longest_unshared=longest, min_shared_tokens=fee,
        multiple=multiple,
    )  # fmt: skip


def _sorted_by_prefix(prompts: Sequence[Prompt]) -> tuple[np.ndarray, list[int]]:
    """An order that makes prompts with a common prefix neighbours, and how many tokens each shares with the last.

    Any total order on tokens will do: the bytes of the ids sort fastest. Equal prompts stay in their order. Prompts
    with different keys share nothing.
    """
    by_key: dict[Hashable, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_key.setdefault(prompt.key, []).append(index)
    packed = [bytes_of(prompt.keys) for prompt in prompts]
    order: list[int] = []
    shared: list[int] = []
    for indices in by_key.values():
        indices.sort(key=packed.__getitem__)
        order += indices
        shared += shared_lengths([packed[index] for index in indices])
    return np.asarray(order, np.int64), shared


def _run_order(
    by_prefix: np.ndarray, cost: np.ndarray, decode: np.ndarray, first: np.ndarray, members: np.ndarray
) -> np.ndarray:
    """Places in the order to run them: group by group, the most new tokens for each token to compute first.

    Their long decodes then overlap the prefill of the others. A group is the ``members`` places from a ``first`` on; a
    place outside of all groups is one by itself. On a tie the group with the smallest prompt index comes first.
    """
    count = len(by_prefix)
    inside = np.zeros(count + 1, np.int64)
    np.add.at(inside, first + 1, 1)
    np.add.at(inside, first + members, -1)
    begins = np.flatnonzero(np.cumsum(inside[:-1]) == 0)
    sizes = np.diff(begins, append=count)
    ratio = np.add.reduceat(decode, begins) / np.add.reduceat(cost, begins)
    rank = np.lexsort((np.minimum.reduceat(by_prefix, begins), -ratio))
    sizes, begins = sizes[rank], begins[rank]
    return np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(count)


def make_plan(
    prompts: list[Prompt],
    config: BatchConfig,
    new_tokens: int | list[int],
    state_price: int = 0,
    whole_pages: bool = False,
) -> SharingPlan:
    """The plan for ``prompts`` by the settings of ``config``.

    state_price: tokens that a segment must save besides, for the place that its state takes.
    whole_pages: with ``invariant=True`` segments end with pages. Otherwise what is beyond the last whole one is copied.
    """
    plan = plan_sharing(
        prompts,
        min_shared_tokens=config.min_shared_tokens + state_price,
        share=config.share_prefixes,
        new_tokens=new_tokens,
        multiple=config.page_size if config.invariant and whole_pages else 1,
    )
    aligned = config.page_size if config.invariant else 1
    return replace(plan, min_shared_tokens=config.min_shared_tokens, state_price=state_price, aligned=aligned)
