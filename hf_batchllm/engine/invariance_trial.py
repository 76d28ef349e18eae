"""Whether steps of a model give a row the same bits, whatever else is in them: tried, before it is promised.

In which order numbers are added up is a matter of libraries and cards. So a made-up sequence is run alone, beside
others and its own copies, and its last token once more by itself, in steps of several sizes. All must give the same
logits, and put the same K and V into the cache. The first call with a model does so: it takes as long as a few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from ..config import BatchConfig
from ..errors import UnsupportedModelError
from ..inputs.base_model import base_model
from ..model.batch import BatchBuilder
from ..model.kv_storage import KVStorage
from ..model.model_in_use import ModelInUse
from ..model.runner import ModelRunner
from ..model.trial_passes import MadeUp
from ..planning.requests_and_prefixes import Request
from ..planning.step import Chunk, Step

_TOKENS = 8  # of a sequence
# Sequences, and single rows, of the steps that are tried. A CPU has passes of the same size anyway.
_SEQUENCES = {"cpu": (5,)}
_SEQUENCES_ELSEWHERE = (3, 9, 40, 130, 520)
_ROWS = {"cpu": (1, 37)}
_ROWS_ELSEWHERE = (1, 2, 3, 5, 8, 16, 17, 32, 64, 100, 128, 200, 256, 384, 512)

_tried: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()


def refuse_by_trial(use: ModelInUse, config: BatchConfig) -> None:
    """Once for each model and way of running it."""
    device = use.device
    key = config.fuse, config.page_size, config.backend, device, torch.get_num_threads(), use.fused_summary
    done = _tried.setdefault(use.model, set())
    if not config.invariant or key in done:
        return
    storage = KVStorage(2 * -(-_TOKENS // config.page_size), config.page_size)
    try:
        runner = use.run_over(storage)
        with runner.surroundings(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            why = _first_difference(runner, storage, device)
    finally:
        storage.release()
        use.drop_runner()
    if why is not None:
        raise UnsupportedModelError(
            "`invariant=True` promises the same answers to the last bit, and here that cannot be done: on made-up "
            f"tokens {use.architecture.name} gave other bits {why} than alone (torch {torch.__version__}, {device})"
        )
    done.add(key)


def _first_difference(runner: ModelRunner, storage: KVStorage, device: torch.device) -> str | None:
    """In words that follow "gave other bits"."""
    made_up = MadeUp(base_model(runner.model), seed=2)
    ours, theirs = (np.array(made_up.tokens(_TOKENS), dtype=np.int32) for _ in range(2))
    pages = range(storage.num_pages)
    first, second = pages[: len(pages) // 2], pages[len(pages) // 2 :]
    builder = BatchBuilder(storage.page_size, short_chunk=runner.backend.short_chunk)

    def logits(chunks: Sequence[Chunk]) -> torch.Tensor:  # [ours, vocabulary]
        found = runner.step(builder.build(Step(chunks=list(chunks))))
        return found[[place for place, chunk in enumerate(chunks) if chunk.unit.tokens(0, 1)[0] == ours[0]]].clone()

    alone = logits([_whole(ours, first)])[0]
    written = _written(storage)
    for count in _SEQUENCES.get(device.type, _SEQUENCES_ELSEWHERE):
        places = made_up.places(count, (count + 1) // 2)
        some = [_whole(ours, first) if place in places else _whole(theirs, second) for place in range(count)]
        if not bool((logits(some) == alone).all()):
            return f"in a step of {count * _TOKENS} rows"
        if not all(map(torch.equal, _written(storage), written)):
            return f"in the K and V of a step of {count * _TOKENS} rows"
    for count in _ROWS.get(device.type, _ROWS_ELSEWHERE):
        if not bool((logits([_last(ours, first) for _ in range(count)]) == alone).all()):
            return f"in a step of {count} single rows" if count > 1 else "in a step of one row"
    return None


def _whole(ids: np.ndarray, pages: Sequence[int]) -> Chunk:
    """All that have these ids use the same pages: they write the same numbers, or are found out."""
    request = Request(0, ids, 1)
    request.pages = list(pages)
    request.computed = len(ids)
    return Chunk(request, 0, len(ids))


def _last(ids: np.ndarray, pages: Sequence[int]) -> Chunk:
    return Chunk(_whole(ids, pages).unit, len(ids) - 1, len(ids))


def _written(storage: KVStorage) -> list[torch.Tensor]:
    """K and V of our sequence, in each layer."""
    return [tensor[:_TOKENS].clone() for pair in storage.pairs() for tensor in pair]
