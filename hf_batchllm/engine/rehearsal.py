"""What a call takes on a device beside the KV cache: found out by running a step that nobody sees.

The step is the largest that the call may come to, over a few pages of its own. What cannot be seen beforehand (CUDA
graphs, and how tokens are picked) is reckoned from its size.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..config import BatchConfig
from ..inputs.base_model import base_model
from ..inputs.prompts import Prompt
from ..model.batch import BatchBuilder
from ..model.device_memory import DeviceMemory, is_out_of_memory
from ..model.kv_storage import KVStorage
from ..model.owners_state import not_in_graphs
from ..model.runner import ModelRunner, current_device
from ..model.triton_attention import TritonBackend
from ..patches.attention_interface import autocast_dtype
from ..planning.units import Chunk, Request, Step
from ..results.sharing_plan import SharingPlan
from ..sampling.host_sampler import SCORES_AT_ONCE
from .device_loop.graph_sizes import size_of, sizes_up_to

_LONGEST = 1024  # tokens of a sequence in the rehearsal, which needs as many slots of a cache
_MARGIN = 1.1  # steps differ in size, and what one leaves does not always fit the next
_UNSEEN = 512 << 20  # bytes that the driver takes for kernels and graphs
_ROUNDING = 2 << 20  # bytes to which the allocator rounds up each large tensor
_PARTS = 8  # partial results of attention that each decode row has, at most
_COPIES = 48  # bytes that transformers' own code takes for each score while it picks tokens


@dataclass(frozen=True)
class LargestStep:
    tokens: int
    samples: int  # tokens whose logits are asked for
    longest: int  # tokens of a sequence, at most


def largest_step(
    prompts: Sequence[Prompt], plan: SharingPlan, budget: int, config: BatchConfig, pages: tuple[int, int]
) -> LargestStep:
    """``budget``: of tokens in a step. ``pages``: as many as the call could use, and as many as there could be."""
    (wanted, most), page_size = pages, config.page_size
    lengths = np.array([len(prompt.ids) for prompt in prompts], dtype=np.int64)
    own = np.ones_like(lengths)  # pages: a kept prefix may leave it at that
    if not config.keep_prefixes:
        ends = np.array([segment.end for segment in plan.segments] + [0], dtype=np.int64)  # the last: of no segment
        own = -(-(lengths - ends[plan.parents]) // page_size)
    at_once = int(np.searchsorted(np.cumsum(np.sort(own)), min(wanted, most), side="right"))
    # All that is ever in the cache may have to be computed anew, after a preemption.
    tokens = min(budget, _rounded(wanted * page_size))
    samples = min(tokens, _rounded(max(at_once, 1)))
    longest = min(int(lengths.max(initial=1)), _LONGEST)  # the model may not have more positions
    return LargestStep(tokens, samples, 1 << (longest.bit_length() - 1))


def _rounded(count: int) -> int:
    """Up by an eighth at most, so that calls of nearly the same size share what is known."""
    unit = 1 << max(count.bit_length() - 4, 0)
    return -(-count // unit) * unit


def cannot_rehearse(model: nn.Module) -> bool:
    """Whether somebody would notice a step that is run for nothing: hooks, or layers that draw random numbers."""
    return not_in_graphs(model) is not None or any(module.training for module in model.modules())


class Rehearsals:
    """What has been found out is kept for later calls."""

    def __init__(self) -> None:
        self._known: dict[object, int | None] = {}

    def beside_the_cache(
        self, runner: ModelRunner, step: LargestStep, graphs: bool, picking: int, memory: DeviceMemory
    ) -> int | None:
        """Bytes, or None where they cannot be found out. ``picking``: bytes that picking tokens takes; logits count."""
        architecture, backend = runner.architecture, runner.backend
        if not isinstance(backend, TritonBackend):
            return None  # in plain PyTorch a step takes the more memory the longer the sequences before it are
        most = self._step(runner, backend, step, memory)
        if most is None:
            return None
        rows = size_of(step.samples)
        part = sum(4 * heads * v_dim for heads, v_dim in {(each.heads, each.v_dim) for each in architecture.attention})
        # A step of prompts has its own, and decode steps of ever fewer rows keep theirs, one for each size.
        places = sum(size + backend.multiprocessors + 1 for size in (rows, *sizes_up_to(rows)))
        total = most + picking + _PARTS * places * part
        if graphs:
            decode = self._step(runner, backend, LargestStep(rows, rows, 1), memory)
            if decode is None:
                return None
            total += decode + picking
        return int(_MARGIN * total) + _UNSEEN + 2 * architecture.layers * _ROUNDING

    def _step(self, runner: ModelRunner, backend: TritonBackend, step: LargestStep, memory: DeviceMemory) -> int | None:
        """Bytes that a step takes while it runs, and leaves free afterwards."""
        cast = autocast_dtype(runner.architecture.device)
        # What is fused hangs on the config, the device and the model's hooks, of which there are none.
        key = runner.architecture, step, base_model(runner.model).dtype, cast
        if key in self._known:
            return self._known[key]
        found = _rehearsed(runner, backend.storage, step, memory)
        if not backend.does_all:
            found = None  # some layers run in plain PyTorch
        if cast is None:  # autocast keeps copies of weights as long as its block lasts: the next makes them again
            self._known[key] = found
        return found


def _rehearsed(runner: ModelRunner, storage: KVStorage, step: LargestStep, memory: DeviceMemory) -> int | None:
    device = runner.architecture.device
    builder = BatchBuilder(storage.page_size, short_chunk=runner.backend.short_chunk)
    batch = builder.build(_made_up(step, storage.num_pages, storage.page_size))
    memory.trim()
    memory.mark()
    try:
        with current_device(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
            runner.step(batch)
    except Exception as error:
        runner.restore()
        traceback.clear_frames(error.__traceback__)  # they hold what the step was about
        if is_out_of_memory(error):
            raise
        return None  # a model that is particular about its tokens: what it says of real ones counts
    peak = memory.peak()
    memory.trim()
    # Against what there is afterwards: what was made on first use is not taken a second time.
    left = memory.used()
    return max(peak.allocated - left.allocated, peak.reserved - left.reserved, 0)


def stage(step: LargestStep, page_size: int) -> KVStorage:
    """The pages for it."""
    return KVStorage(-(-min(step.longest, step.tokens) // page_size), page_size)


def _made_up(step: LargestStep, pages: int, page_size: int) -> Step:
    """Sequences of zeros: as many as are sampled, and more where those would become too long; most of one token."""
    longest = min(step.longest, pages * page_size)
    lengths = [1] * step.samples
    left = step.tokens - step.samples
    for place in range(step.samples):
        more = min(left, longest - 1)
        lengths[place] += more
        left -= more
    lengths += [min(longest, left - begin) for begin in range(0, left, longest)]
    made = Step()
    for index, length in enumerate(lengths):
        request = Request(index, np.zeros(length, dtype=np.int32), 1)
        # All in the same pages: whatever one reads there, another has written in this step, so that it is a number.
        request.pages = list(range(-(-length // page_size)))
        request.computed = length
        made.chunks.append(Chunk(request, 0, length))
    return made


def picking_bytes(samples: int, vocabulary: int, sequences: int, *, copied: bool, by_host: bool) -> int:
    """What becoming tokens takes of logits, beside the logits.

    ``sequences``: of which it is known which tokens they have had. ``copied``: something is changed in the logits.
    """
    scores = samples * vocabulary
    kept = 4 * scores if copied or by_host else scores // 2  # in float32; else the best of each few
    seen = sequences * vocabulary // 8  # a bit for each token
    return kept + seen + (_COPIES * min(scores, SCORES_AT_ONCE) if by_host else 0)
