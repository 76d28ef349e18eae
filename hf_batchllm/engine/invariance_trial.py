"""Whether steps of a model give a row the same bits, whatever else is in them: tried, before it is promised.

In which order numbers are added up is a matter of libraries and cards. So a made-up sequence is run alone, beside
others and its own copies, and its last tokens once more by themselves, in steps of several sizes. All must give the
same logits, and put the same K and V into the cache. On a CPU each token must do so at each place of a pass. The first
call with a model does all this: it takes as long as some dozen steps, and on a GPU the first of a process also times
products. On a CPU the first call with many tokens tries wide passes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from ..config import BatchConfig
from ..errors import UnsupportedModelError
from ..inputs.base_model import base_model
from ..model.attention.fixed_passes import ROWS, WIDE_ROWS
from ..model.attention.kv_storage import KVStorage
from ..model.batch_builder import BatchBuilder
from ..model.inspection.trial_passes import MadeUp
from ..model.matmul_precision import matmul_settings
from ..model.model_in_use import ModelInUse
from ..model.runner import ModelRunner
from ..notices import Notices
from ..patches.fixed_products import FixedThreads, WideProducts, kinds_that_may_be_wide
from ..patches.uncompiled import every_module
from ..planning.requests_and_prefixes import Request
from ..planning.step import Chunk, Step


@dataclass(frozen=True)
class _Steps:
    """What is tried on a kind of device."""

    tokens: int  # of the sequence
    beside: tuple[int, ...]  # sequences of a step
    last: tuple[int, ...]  # of its tokens, computed once more together
    single: tuple[int, ...]  # copies of its last token
    places: int = 0  # of a pass, at each of which each token is computed


_OTHERS_TOKENS = 8
_MOST_COPIES = 3  # of the sequence, in a step
# A CPU has passes of the same size anyway. On a GPU the sequence has keys for more than one part of attention.
_ON_CPU = _Steps(9, (5,), (), (1,), ROWS)
_ON_GPU = _Steps(300, (3, 9, 40, 130, 520), (2, 7, 70), (1, 2, 3, 5, 8, 16, 17, 32, 64, 100, 128, 200, 256, 384, 512))

# In wide passes: an odd number of tokens, so that last ones come to each place, and at most 32 of them to a pass.
_WIDE_TOKENS, _WIDE_COPIES = 5, 8
_WIDE_FROM = 8 * WIDE_ROWS  # tokens of a call: the trial of wide passes runs over six times as many rows as one has

_tried: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()
_wide: WeakKeyDictionary[nn.Module, dict[object, WideProducts | None]] = WeakKeyDictionary()


def refuse_by_trial(use: ModelInUse, config: BatchConfig) -> None:
    """Once for each model and way of running it."""
    if not config.invariant:
        return
    device, key = use.device, _key(use, config)
    done = _tried.setdefault(use.model, set())
    if key in done:
        return
    steps = _ON_CPU if device.type == "cpu" else _ON_GPU
    ours, theirs = (-(-tokens // config.page_size) for tokens in (steps.tokens, _OTHERS_TOKENS))
    copies = max(1, steps.places // 2)  # of the sequence, with pages of their own
    pages = [range(copy * ours, (copy + 1) * ours) for copy in range(copies)]
    their_pages = range(copies * ours, copies * ours + theirs)
    storage = KVStorage(their_pages.stop, config.page_size)
    try:
        runner = use.run_over(storage)
        with runner.surroundings(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            why = _first_difference(runner, storage, steps, pages, their_pages)
    finally:
        storage.release()
        use.drop_runner()
    if why is not None:
        raise UnsupportedModelError(
            "`invariant=True` promises the same answers to the last bit, and here that cannot be done: on made-up "
            f"tokens {use.architecture.name} gave other bits {why} than alone (torch {torch.__version__}, {device}"
            f"{f'; {use.fused_summary}' if use.fused_summary else ''})"
        )
    done.add(key)


def try_wide_passes(use: ModelInUse, config: BatchConfig, tokens: int, notices: Notices) -> None:
    """Whether a CPU runs prompts in wide passes, in full precision. ``tokens``: of the call's prompts, all in all."""
    use.wide_products = None
    if not config.invariant or use.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return
    if any(each.dtype.itemsize < 4 for each in use.model.parameters()):
        return
    known, key = _wide.setdefault(use.model, {}), _key(use, config)
    if key not in known:
        if tokens < _WIDE_FROM:
            return
        known[key] = _wide_products(use, config.page_size)
    use.wide_products = known[key]
    if use.wide_products is None:
        notices(
            "narrow passes",
            f"`invariant=True` runs prompts in passes of {ROWS} rows here. Passes of {WIDE_ROWS} would be faster, but "
            f"{use.architecture.name} gave other bits in one (torch {torch.__version__})",
        )


def _wide_products(use: ModelInUse, page_size: int) -> WideProducts | None:
    """None where wide passes give other bits, whichever products are computed in pieces."""
    narrow = _of_a_wide_step(use, page_size, None)
    if not narrow:  # all of it was one pass
        return WideProducts(ROWS, WIDE_ROWS, ())
    threads = FixedThreads()
    try:
        threads.begin()
        with torch.no_grad():
            kinds = kinds_that_may_be_wide(base_model(use.model), ROWS, WIDE_ROWS, threads)
    finally:
        threads.restore()
    wide = WideProducts(ROWS, WIDE_ROWS, kinds)
    logits, *written = _of_a_wide_step(use, page_size, wide, _WIDE_COPIES)
    same = bool((logits.view(_WIDE_COPIES, *narrow[0].shape) == narrow[0]).all())
    return wide if same and all(map(torch.equal, written, narrow[1:])) else None


def _of_a_wide_step(use: ModelInUse, page_size: int, wide: WideProducts | None, copies: int = 1) -> list[torch.Tensor]:
    """The logits of some sequences, and the K and V of each. With all copies there is one last token at each place.

    Nothing where the backend has no passes: a GPU's loop on a CPU.
    """
    count, pages = WIDE_ROWS // _WIDE_COPIES, -(-_WIDE_TOKENS // page_size)
    made_up = np.array(MadeUp(base_model(use.model), seed=3).tokens(count * _WIDE_TOKENS), dtype=np.int32)
    storage = KVStorage(count * pages, page_size)
    use.wide_products = wide
    try:
        runner = use.run_over(storage)
        if not runner.backend.has_passes:
            return []
        builder = BatchBuilder(page_size, short_chunk=runner.backend.short_chunk)
        sequences = [*enumerate(made_up.reshape(count, _WIDE_TOKENS))] * copies
        chunks = [_whole(ids, range(at * pages, (at + 1) * pages)) for at, ids in sequences]
        with runner.surroundings(), torch.random.fork_rng([]):
            logits = runner.step(builder.build(Step(chunks=chunks))).clone()
        written = [each.view(count, pages * page_size, -1) for pair in storage.pairs() for each in pair]
        return [logits, *(each[:, :_WIDE_TOKENS].clone() for each in written)]
    finally:
        use.wide_products = None
        storage.release()
        use.drop_runner()


def _key(use: ModelInUse, config: BatchConfig) -> object:
    """What the order of sums may depend on."""
    kind = use.device.type
    return (
        (config.fuse, config.page_size, config.backend, use.device, torch.get_num_threads(), use.fused_summary),
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        (torch.are_deterministic_algorithms_enabled(), *map(str, matmul_settings(use.device))),
        (torch.backends.mkldnn.is_available(), torch.backends.mkldnn.enabled),
        tuple(
            (each.shape, each.dtype)
            for module in every_module(use.model)
            for each in module._parameters.values()
            if each is not None
        ),
    )


def _first_difference(
    runner: ModelRunner, storage: KVStorage, steps: _Steps, pages: Sequence[range], their_pages: range
) -> str | None:
    """In words that follow "gave other bits"."""
    made_up = MadeUp(base_model(runner.model), seed=2)
    ours, theirs = (np.array(made_up.tokens(tokens), dtype=np.int32) for tokens in (steps.tokens, _OTHERS_TOKENS))
    our_pages, *_ = pages
    builder = BatchBuilder(storage.page_size, short_chunk=runner.backend.short_chunk)

    def logits(chunks: Sequence[Chunk]) -> torch.Tensor:  # [ours, vocabulary]
        found = runner.step(builder.build(Step(chunks=list(chunks))))
        return found[[place for place, chunk in enumerate(chunks) if chunk.unit.tokens(0, 1)[0] == ours[0]]].clone()

    def written() -> list[torch.Tensor]:
        """K and V of our sequence, in each layer."""
        return [tensor[: steps.tokens].clone() for pair in storage.pairs() for tensor in pair]

    def last(count: int) -> Chunk:
        return Chunk(_whole(ours, our_pages).unit, len(ours) - count, len(ours))

    alone = logits([_whole(ours, our_pages)])[0]
    first_written = written()
    for count in steps.beside:
        places = made_up.places(count, min((count + 1) // 2, _MOST_COPIES))
        some = [_whole(ours, our_pages) if place in places else _whole(theirs, their_pages) for place in range(count)]
        rows = sum(chunk.end - chunk.begin for chunk in some)
        if not bool((logits(some) == alone).all()):
            return f"in a step of {rows:,} rows"
        if not all(map(torch.equal, written(), first_written)):
            return f"in the K and V of a step of {rows:,} rows"
    for count in steps.last:
        if not torch.equal(logits([last(count)])[0], alone):
            return f"in a step of its last {count} rows"
        if not all(map(torch.equal, written(), first_written)):
            return f"in the K and V of its last {count} rows"
    for count in steps.single:
        where = f"a step of {count} single rows" if count > 1 else "a step of one row"
        if not bool((logits([last(1)] * count) == alone).all()):
            return f"in {where}"
        if not all(map(torch.equal, written(), first_written)):
            return f"in the K and V of {where}"
    if steps.places:
        # Rows of a pass must not write to the same place, so there are copies of the keys and values.
        kept = [tensor for pair in storage.pairs() for tensor in pair]
        begins = [copy.start * storage.page_size for copy in pages]
        for tensor in kept:
            for begin in begins[1:]:
                tensor[begin : begin + steps.tokens] = tensor[: steps.tokens]
        first = None
        # An odd number of tokens, so that each comes to each place. One pass at a time, as logits take memory.
        for begin in range(0, steps.places * steps.tokens, steps.places):
            turns = range(begin, begin + steps.places)
            tokens = [turn % steps.tokens for turn in turns]
            mine = [_whole(ours[: at + 1], pages[turn % len(pages)]) for turn, at in zip(turns, tokens, strict=True)]
            found = logits([Chunk(each.unit, each.end - 1, each.end) for each in mine])
            first = found[: steps.tokens] if first is None else first
            if not torch.equal(found, first[tokens]) or not torch.equal(first[-1], alone):
                return "at another place of a step"
        for tensor, wanted in zip(kept, first_written, strict=True):
            if not all(torch.equal(tensor[begin : begin + steps.tokens], wanted) for begin in begins):
                return "in the K and V at another place of a step"
    return None


def _whole(ids: np.ndarray, pages: Sequence[int]) -> Chunk:
    """All that have these ids use the same pages: they write the same numbers, or are found out."""
    request = Request(0, ids, 1)
    request.pages = list(pages)
    request.computed = len(ids)
    return Chunk(request, 0, len(ids))
