"""The memory that a call takes beside the KV cache, measured by running its largest step once, for nothing.

The step runs over a few pages of its own. Of a step of many tokens only a part is run: memory grows with tokens and
samples, and a step for nothing takes time from the call. CUDA graphs and the picking of tokens cannot be measured
beforehand: their memory is worked out from the size of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from ..config import BatchConfig
from ..errors import RanksError
from ..inputs.base_model import base_model
from ..inputs.prompts import Prompt
from ..model.attention.kv_storage import KVStorage
from ..model.attention.triton_attention import TritonBackend
from ..model.batch_builder import BatchBuilder
from ..model.device_memory import DeviceMemory, is_out_of_memory
from ..model.inspection.user_state import not_in_graphs
from ..model.runner import ModelRunner
from ..patches.attention_interface import autocast_dtype
from ..patches.uncompiled import every_module
from ..planning.requests_and_prefixes import Request
from ..planning.step import Chunk, Step
from ..results.sharing_plan import SharingPlan
from ..sampling.host_sampler import SCORES_AT_ONCE
from .device_loop.graph_sizes import size_of, sizes_up_to

_LONGEST = 1024  # tokens of a sequence in the rehearsal, which needs as many slots of a cache
_MARGIN = 1.1  # steps differ in size, and what one leaves does not always fit the next
_UNSEEN = 512 << 20  # bytes that the driver takes for kernels and graphs
_ROUNDING = 2 << 20  # bytes to which the allocator rounds up each large tensor
# Bytes of hidden states in the part of a step that is run. Smaller tensors would share the allocator's blocks of
# 20 MiB, and their memory would say little about that of large ones.
_PART_BYTES = 16 << 20
_PARTS = 8  # partial results of attention that each decode row has, at most
_COPIES = 48  # bytes that transformers' own code takes for each score while it picks tokens


@dataclass(frozen=True)
class LargestStep:
    tokens: int
    samples: int  # tokens whose logits are asked for
    longest: int  # the most tokens of a sequence

    def part(self, token_bytes: int) -> LargestStep:
        """A part of the step that is enough to show its memory. ``token_bytes``: of a token's hidden state."""
        tokens = 1 << (-(-_PART_BYTES // token_bytes) - 1).bit_length()  # equal for steps of nearly the same size
        if tokens >= self.tokens:
            return self
        return replace(self, tokens=tokens, samples=-(-self.samples * tokens // self.tokens))


def largest_step(
    prompts: Sequence[Prompt], plan: SharingPlan, budget: int, config: BatchConfig, pages: tuple[int, int]
) -> LargestStep:
    """``budget``: the most tokens of a step. ``pages``: those that the call could use, and those that could exist."""
    (wanted, most), page_size = pages, config.page_size
    lengths = np.array([len(prompt.ids) for prompt in prompts], dtype=np.int64)
    own = np.ones_like(lengths)  # pages: with kept prefixes, a sequence may own a single one
    if not config.keep_prefixes:
        ends = np.array([segment.end for segment in plan.segments] + [0], dtype=np.int64)  # the last entry: no segment
        own = -(-(lengths - ends[plan.parents]) // page_size)
    at_once = int(np.searchsorted(np.cumsum(np.sort(own)), min(wanted, most), side="right"))
    # After a preemption, everything in the cache may have to be computed again.
    tokens = min(budget, _rounded(wanted * page_size))
    samples = min(tokens, _rounded(max(at_once, 1)))
    longest = min(int(lengths.max(initial=1)), _LONGEST)  # the model may not have more positions
    return LargestStep(tokens, samples, 1 << (longest.bit_length() - 1))


def _rounded(count: int) -> int:
    """Rounded up by an eighth at most: calls of nearly the same size then share a measurement."""
    unit = 1 << max(count.bit_length() - 4, 0)
    return -(-count // unit) * unit


def cannot_rehearse(model: nn.Module) -> bool:
    """Whether a step run for nothing would be noticed: by hooks, or by layers that draw random numbers."""
    return not_in_graphs(model) is not None or any(module.training for module in every_module(model))


_kept: WeakKeyDictionary[nn.Module, dict[object, int]] = WeakKeyDictionary()


class Rehearsals:
    """Measurements, kept for later calls, of other generators of the same model too."""

    def __init__(self, model: nn.Module, config: BatchConfig) -> None:
        self._known = _kept.setdefault(model, {})
        self._unknown: set[object] = set()  # where nothing could be measured: another generator tries again
        self._settings = config.fuse, config.backend, config.page_size, config.invariant

    def beside_the_cache(
        self, runner: ModelRunner, step: LargestStep, graphs: bool, picking: int, memory: DeviceMemory
    ) -> int | None:
        """Bytes; None where they cannot be measured. ``picking``: bytes that picking tokens takes, logits included."""
        architecture, backend = runner.architecture, runner.backend
        if not isinstance(backend, TritonBackend):
            return None  # in plain PyTorch, the memory of a step grows with the sequences that it attends to
        most = self._step(runner, backend, step, memory)
        if most is None:
            return None
        rows = size_of(step.samples)
        part = sum(4 * heads * v_dim for heads, v_dim in {(each.heads, each.v_dim) for each in architecture.attention})
        # Partial results: a step of prompts has its own, and so has each size of decode steps.
        places = sum(size + backend.multiprocessors + 1 for size in (rows, *sizes_up_to(rows)))
        total = most + picking + _PARTS * places * part
        if graphs:
            decode = self._step(runner, backend, LargestStep(rows, rows, 1), memory)
            if decode is None:
                return None
            total += decode + picking
        return int(_MARGIN * total) + _UNSEEN + 2 * architecture.layers * _ROUNDING

    def _step(self, runner: ModelRunner, backend: TritonBackend, step: LargestStep, memory: DeviceMemory) -> int | None:
        """Bytes that a step takes only while it runs."""
        part = step
        width = _width(base_model(runner.model))
        if width is not None and not _takes_more_than_tokens_do(runner):
            part = step.part(width)
        found = self._part(runner, backend, part, memory)
        return None if found is None else -(-found * step.tokens // part.tokens)

    def _part(self, runner: ModelRunner, backend: TritonBackend, step: LargestStep, memory: DeviceMemory) -> int | None:
        model, architecture = base_model(runner.model), runner.architecture
        cast = autocast_dtype(architecture.device)
        rows = architecture.selects_rows, architecture.head_rows, architecture.vocab_size
        built = architecture.device, architecture.attention, architecture.states, rows, _build_of(runner.model)
        key = self._settings, built, step, model.dtype, cast
        if key in self._known:
            return self._known[key]
        if key in self._unknown:
            return None
        found = _rehearsed(runner, backend.storage, step, memory)
        if not backend.does_all:
            found = None  # some layers run in plain PyTorch, whose memory depends on the sequences
        if cast is None:  # autocast keeps copies of weights until its block ends; the next block makes them again
            if found is None:
                self._unknown.add(key)
            else:
                self._known[key] = found
        return found


def _width(model: PreTrainedModel) -> int | None:
    """Bytes of a token's hidden state; None where that cannot be told."""
    width = getattr(model.config.get_text_config(decoder=True), "hidden_size", None)
    if width is None:
        width = getattr(getattr(model.get_input_embeddings(), "weight", None), "shape", (None,))[-1]
    return None if width is None else int(width) * model.dtype.itemsize


def _takes_more_than_tokens_do(runner: ModelRunner) -> bool:
    """Whether weights are unpacked or cast while a step runs: that memory does not grow with the step."""
    model = base_model(runner.model)
    packed = any(not each.is_floating_point() or each.dtype.itemsize < 2 for each in model.parameters())
    quantised = getattr(model.config, "quantization_config", None) is not None
    return packed or quantised or autocast_dtype(runner.architecture.device) is not None


def _build_of(model: nn.Module) -> tuple[object, ...]:
    """What a step's memory depends on: the classes of modules, the form of their weights, and adapters in use."""
    found: list[object] = []
    for module in every_module(model):
        found.append(type(module))
        found += [(name, each.shape, each.dtype) for name, each in module._parameters.items() if each is not None]
        # PEFT's layers: a merged adapter takes no memory of its own.
        for name in ("merged_adapters", "_active_adapter", "_disable_adapters"):
            if name in module.__dict__:
                found.append((name, repr(module.__dict__[name])))
    return tuple(found)


def _rehearsed(runner: ModelRunner, storage: KVStorage, step: LargestStep, memory: DeviceMemory) -> int | None:
    # The sequences have no slots: each begins with no state and leaves none.
    carries_states = bool(runner.architecture.states)
    builder = BatchBuilder(storage.page_size, short_chunk=runner.backend.short_chunk, carries_states=carries_states)
    batch = builder.build(_made_up(step, storage.num_pages, storage.page_size))
    memory.trim()
    memory.mark()
    try:
        runner.try_step(batch)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, RanksError):
            raise
        return None  # the model objects to these made-up tokens: only its errors about real ones count
    return memory.taken_since_mark()


def pages_of(step: LargestStep, page_size: int) -> int:
    """Pages that the rehearsed step needs."""
    return -(-min(step.longest, step.tokens) // page_size)


def _made_up(step: LargestStep, pages: int, page_size: int) -> Step:
    """Sequences of zeros, most of one token: one for each sample, and more where these would become too long."""
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
        # All use the same pages: each slot that is read was written in this step, so it holds a number.
        request.pages = list(range(-(-length // page_size)))
        request.computed = length
        made.chunks.append(Chunk(request, 0, length))
    return made


def picking_bytes(samples: int, vocabulary: int, looked_back_at: int, *, copies: int, by_host: bool) -> int:
    """Bytes that picking tokens takes beside the logits.

    looked_back_at: those for tokens that sequences have had. copies: of the logits, in which something is changed.
    """
    scores = samples * vocabulary
    kept = 4 * scores * max(copies, by_host) or scores // 2  # in float32; else the best of each few
    return kept + looked_back_at + (_COPIES * min(scores, SCORES_AT_ONCE) if by_host else 0)
