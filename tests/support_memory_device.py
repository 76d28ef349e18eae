"""A stand-in for a GPU's memory: it counts the cache's own tensors, and gives as much as a test says."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from support_attention_references import REFERENCES
from support_calls import noted
from support_families import build
from support_parity import assert_parity
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.engine import memory_rehearsal
from hf_batchllm.model.attention.triton_attention import AttentionKernels, TritonBackend
from hf_batchllm.model.device_memory import MemoryUse
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.planning.lineup import pages_at_once

FAMILY = "llama"
NEW_TOKENS = 6
PAGE = 4


class Device:
    """Memory of ``size`` bytes, in which the cache's tensors live; steps take ``step`` bytes more."""

    share = 0.9
    taken_at_once = True

    def __init__(self, size: int, step: int = 0) -> None:
        self.size, self.step = size, step
        self.others = 0  # bytes that somebody else has taken
        self.failures = 0  # allocations still to fail, whatever there is
        self.tensors: dict[int, int] = {}
        self.trims = 0
        self.on_allocation: Callable[[], None] | None = None
        self._highest = 0

    @property
    def taken(self) -> int:
        return sum(self.tensors.values())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
        if self.on_allocation is not None:
            self.on_allocation()
        with torch.inference_mode(False):
            tensor = torch.empty(shape, dtype=dtype)
        if self.failures or tensor.nbytes > self.free():
            self.failures = max(self.failures - 1, 0)
            raise torch.OutOfMemoryError("injected")
        self.tensors[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, self.tensors.pop, id(tensor))
        self._highest = max(self._highest, self.taken)
        return tensor

    def free(self) -> int:
        return self.size - self.others - self.taken

    def trim(self) -> None:
        self.trims += 1

    def used(self) -> MemoryUse:
        return MemoryUse(self.taken, self.taken)

    def start(self) -> None:
        self._highest = self.taken

    def mark(self) -> None:
        pass

    def peak(self) -> MemoryUse:
        return MemoryUse(self.taken + self.step, self.taken + self.step // 2)

    def taken_since_mark(self) -> int:
        self.trim()
        return self.step

    def highest(self) -> int:
        return self._highest


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """In the place of a GPU, with the kernels' references. What is left free anyway is more than there is: left out."""
    made = Device(1 << 20)
    monkeypatch.setattr("hf_batchllm.engine.devices.device_memory", lambda device: made)
    monkeypatch.setattr("hf_batchllm.model.attention.kv_storage._new", made.empty)
    monkeypatch.setattr("hf_batchllm.engine.memory_rehearsal._kept", WeakKeyDictionary())  # tests share models
    monkeypatch.setattr("hf_batchllm.engine.memory_rehearsal._UNSEEN", 0)
    monkeypatch.setattr("hf_batchllm.engine.memory_rehearsal._PARTS", 0)
    monkeypatch.setattr("hf_batchllm.engine.memory_rehearsal._ROUNDING", 0)
    monkeypatch.setattr("hf_batchllm.model.model_in_use.make_backend", over_references(REFERENCES))
    yield made
    gc.collect()
    assert not made.tensors, "tensors of the cache are left"


def over_references(kernels: AttentionKernels) -> Callable[..., TritonBackend]:
    return lambda config, device, storage, notices: TritonBackend(kernels, storage, device, notices, (4, 2))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step of the model had, rehearsals among them."""
    return noted(monkeypatch, ModelRunner, "step", lambda self, batch, *_: len(batch.tokens.input_ids))


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step that was run beforehand."""
    return noted(monkeypatch, memory_rehearsal, "_rehearsed", lambda runner, storage, step, memory: step.tokens)


def generate(generator: BatchGenerator, prompts: list[list[int]], **options: Any) -> BatchResult:
    return generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False, **options)


def run(config: dict[str, Any], prompts: list[list[int]], /, model: Any = None, **options: Any) -> Any:
    """The answers of a generator of its own, which have to be those of ``generate``."""
    result = generate(BatchGenerator(model or build(FAMILY), page_size=PAGE, **config), prompts, **options)
    assert_parity(FAMILY, prompts, result, NEW_TOKENS)
    return result


def tight(device: Device, prompts: list[list[int]], part: float, model: Any = None) -> list[list[int]]:
    """So much memory that all of the prompts would take ``1 / part`` of it. Gives the prompts."""
    with BatchGenerator(model or build(FAMILY), page_size=PAGE) as generator:
        listed: list[Any] = [SimpleNamespace(ids=prompt) for prompt in prompts]
        pages = pages_at_once(listed, generator.plan(prompts), [NEW_TOKENS] * len(prompts), PAGE)
        device.size = int(pages * generator._resources.kv.page_bytes * part)
    device.trims = 0
    return prompts
