"""How large the KV cache becomes on a device, and what happens where memory runs short.

A stand-in for a GPU's memory shows it on a CPU: it counts the cache's own tensors, and gives as much as a test says.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import build
from harness import assert_parity, pages_of_memory
from harness import watched as watched  # a fixture
from interpreted import plain
from test_interrupts import Stop, fingerprint
from test_kernel_attention import TWINS
from test_parity import mixed_prompts
from torch import nn

from hf_batchllm import BatchConfig, BatchGenerator, BatchResult, GenerationInterrupted, rehearsal
from hf_batchllm.device_memory import Used, device_memory
from hf_batchllm.errors import BatchLLMError, CacheMemoryError
from hf_batchllm.kernel_attention import AttentionKernels, KernelBackend
from hf_batchllm.lineup import pages_at_once
from hf_batchllm.memory import CacheHome
from hf_batchllm.notices import Notices
from hf_batchllm.rehearsal import LargestStep, Rehearsals, _made_up, _rounded, largest_step, picking_bytes
from hf_batchllm.runner import ModelRunner
from hf_batchllm.storage import AttentionShape, KVStorage

pytestmark = plain
FAMILY = "llama"
NEW_TOKENS = 6
PAGE = 4
PARTS = rehearsal._PARTS


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

    def used(self) -> Used:
        return Used(self.taken, self.taken)

    def start(self) -> None:
        self._highest = self.taken

    def mark(self) -> None:
        pass

    def peak(self) -> Used:
        return Used(self.taken + self.step, self.taken + self.step // 2)

    def highest(self) -> int:
        return self._highest


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """In the place of a GPU, with the kernels' twins. What is left free in any case is more than there is: left out."""
    made = Device(1 << 20)
    monkeypatch.setattr("hf_batchllm.memory.device_memory", lambda device: made)
    monkeypatch.setattr("hf_batchllm.storage._new", made.empty)
    monkeypatch.setattr("hf_batchllm.rehearsal._UNSEEN", 0)
    monkeypatch.setattr("hf_batchllm.rehearsal._PARTS", 0)
    monkeypatch.setattr("hf_batchllm.rehearsal._ROUNDING", 0)
    monkeypatch.setattr("hf_batchllm.call.make_backend", over_twins(TWINS))
    yield made
    gc.collect()
    assert not made.tensors, "tensors of the cache are left"


def over_twins(kernels: AttentionKernels) -> Callable[..., KernelBackend]:
    return lambda config, device, storage, notices: KernelBackend(kernels, storage, device, notices, (4, 2))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step of the model had, rehearsals among them."""
    seen: list[int] = []
    step = ModelRunner.step

    def noted(self: ModelRunner, batch: Any) -> Any:
        seen.append(len(batch.tokens.input_ids))
        return step(self, batch)

    monkeypatch.setattr(ModelRunner, "step", noted)
    return seen


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step that was run beforehand."""
    seen: list[int] = []
    run = rehearsal._rehearsed

    def noted(runner: Any, storage: Any, step: LargestStep, memory: Any) -> int | None:
        seen.append(step.tokens)
        return run(runner, storage, step, memory)

    monkeypatch.setattr("hf_batchllm.rehearsal._rehearsed", noted)
    return seen


def generate(generator: BatchGenerator, prompts: list[list[int]], **options: Any) -> BatchResult:
    return generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False, **options)


def tight(device: Device, prompts: list[list[int]], part: float, model: Any = None) -> None:
    """So much memory that all of the prompts would take ``1 / part`` of it."""
    with BatchGenerator(model or build(FAMILY), page_size=PAGE) as generator:
        listed: list[Any] = [SimpleNamespace(ids=prompt) for prompt in prompts]
        pages = pages_at_once(listed, generator.plan(prompts), [NEW_TOKENS] * len(prompts), PAGE)
        device.size = int(pages * generator._home.page_bytes * part)
    device.trims = 0


# -- how large it becomes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True])
def test_the_cache_takes_what_steps_leave(
    graphs: bool, device: Device, rehearsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = mixed_prompts(6)
    tight(device, prompts, 0.9)
    monkeypatch.setattr("hf_batchllm.call.picking_bytes", lambda *_, **__: 0)
    monkeypatch.setattr("hf_batchllm.call.picked_by_host", lambda *_: None)
    device.step = device.size // 4
    generator = BatchGenerator(build(FAMILY), page_size=PAGE, max_batch_tokens=100, cuda_graphs=graphs)
    result = generate(generator, prompts)
    left = device.size - 1.1 * device.step * (1 + graphs)
    assert left - generator._home.page_bytes < result.report.kv_memory <= left
    assert rehearsed[0] == 100 and (len(rehearsed) > 1) == graphs
    assert_parity(FAMILY, prompts, result, NEW_TOKENS)


def test_what_no_rehearsal_shows_is_left_room_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results of attention in each graph's rows, the graph's own memory, scores on their way to a token."""
    monkeypatch.setattr("hf_batchllm.rehearsal._PARTS", PARTS)
    generator = BatchGenerator(build(FAMILY))
    backend = KernelBackend(TWINS, KVStorage(1, PAGE), torch.device("cpu"), generator._notices)
    runner = ModelRunner(generator.model, generator.architecture, backend)
    monkeypatch.setattr("hf_batchllm.rehearsal._rehearsed", lambda runner, storage, step, memory: 1000 * step.tokens)

    def beside(samples: int, graphs: bool = False, picking: int = 0) -> int:
        made = Rehearsals().beside_the_cache(runner, LargestStep(500, samples, 8), graphs, picking, device)
        assert made is not None
        return made

    parts = PARTS * 4 * sum({each.heads * each.v_dim for each in generator.architecture.attention})
    assert beside(1) > 500 * 1000
    assert beside(200) - beside(100) >= 100 * parts
    assert beside(200, graphs=True) - beside(200) >= 200 * 1000
    assert beside(200, picking=10**6) - beside(200) >= 10**6
    plain = picking_bytes(10, 97, 0, copied=False, by_host=False)
    assert picking_bytes(10, 97, 0, copied=True, by_host=False) >= 4 * 10 * 97 > plain
    assert picking_bytes(10, 97, 800, copied=False, by_host=False) - plain == 97 * 100
    assert picking_bytes(10, 97, 0, copied=False, by_host=True) > 5 * 4 * 10 * 97


@pytest.mark.parametrize("each", [0, 500, 5000, 50_000])
def test_steps_grow_with_the_sequences_that_the_cache_holds(
    each: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is more taken than is left, nor as much left as all sequences at once would take."""
    monkeypatch.setattr("hf_batchllm.call.picking_bytes", lambda *_, **__: 0)
    prompts = mixed_prompts(20)
    tight(device, prompts, 0.9)
    monkeypatch.setattr("hf_batchllm.rehearsal._rehearsed", lambda runner, storage, step, memory: each * step.samples)
    generator = BatchGenerator(build(FAMILY), page_size=PAGE)
    asked: list[tuple[int, int]] = []
    found = CacheHome._found

    def noted(self: CacheHome, beside: Any, held: int) -> int | None:
        def asking(pages: int) -> int | None:
            asked.append((pages, beside(pages)))
            return asked[-1][1]

        return found(self, asking, held)

    monkeypatch.setattr(CacheHome, "_found", noted)
    memory = generate(generator, prompts).report.kv_memory
    if each in (0, 500):
        assert len(asked) == 1
    if each == 5000:
        pages = memory // generator._home.page_bytes
        assert pages > (device.size - asked[0][1]) // generator._home.page_bytes
        assert memory + max(taken for most, taken in asked if most <= pages + 1) <= device.size


def test_what_is_known_is_not_tried_again(
    device: Device, rehearsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_batchllm.call.picked_by_host", lambda *_: None)
    prompts = mixed_prompts(6)
    tight(device, prompts, 1.5)
    generator = BatchGenerator(build(FAMILY), page_size=PAGE)
    generate(generator, prompts)
    assert len(rehearsed) >= 2, "steps of prompts, and those that graphs hold"
    rehearsed.clear()
    generate(generator, prompts)
    assert not rehearsed


def test_small_calls_do_not_pay(device: Device, steps: list[int]) -> None:
    prompts = mixed_prompts(3)
    tight(device, prompts, 2.1)
    steps.clear()
    result = generate(BatchGenerator(build(FAMILY), page_size=PAGE), prompts)
    assert len(steps) == result.report.steps
    assert device.trims == 0


def test_what_the_user_sets_counts(device: Device, steps: list[int]) -> None:
    prompts, model = mixed_prompts(6), build(FAMILY)
    tight(device, prompts, 0.5)
    steps.clear()
    memory = pages_of_memory(model, 20, PAGE)
    result = generate(BatchGenerator(model, page_size=PAGE, kv_memory=memory), prompts)
    assert result.report.kv_memory == memory
    assert len(steps) == result.report.steps


def test_a_step_that_leaves_nothing_leaves_room_for_the_longest_sequence(device: Device) -> None:
    prompts = mixed_prompts(4)
    tight(device, prompts, 0.9)
    device.step = 2 * device.size
    generator = BatchGenerator(build(FAMILY), page_size=PAGE)
    result = generate(generator, prompts)
    longest = max(map(len, prompts)) + NEW_TOKENS - 1
    pages = result.report.kv_memory // generator._home.page_bytes
    assert pages == -(-longest // PAGE) + result.report.plan.depth
    assert_parity(FAMILY, prompts, result, NEW_TOKENS)


def test_a_step_that_does_not_fit_at_all_is_said(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = mixed_prompts(4)
    tight(device, prompts, 0.9)
    step, calls = ModelRunner.step, []

    def first_fails(self: ModelRunner, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("injected")
        return step(self, batch)

    monkeypatch.setattr(ModelRunner, "step", first_fails)
    generator = BatchGenerator(build(FAMILY), page_size=PAGE)
    with pytest.warns(UserWarning, match="largest step .* set a smaller `max_batch_tokens`"):
        result = generate(generator, prompts)
    assert result.report.kv_memory <= 0.45 * device.size
    assert_parity(FAMILY, prompts, result, NEW_TOKENS)


def test_the_largest_step() -> None:
    def of(lengths: list[int], budget: int = 8192, pages: tuple[int, int] = (1 << 20, 1 << 20), **config: Any) -> Any:
        prompts: Any = [SimpleNamespace(ids=[index] * length) for index, length in enumerate(lengths)]
        plan: Any = SimpleNamespace(segments=(), parents=[-1] * len(prompts))
        return largest_step(prompts, plan, budget, BatchConfig(page_size=16, **config), pages)

    assert of([40] * 100) == LargestStep(8192, 104, 32)
    assert of([40] * 100, budget=50) == LargestStep(50, 50, 32)
    assert of([4000]) == LargestStep(8192, 1, 1024)
    assert of([40] * 100, pages=(300, 30)) == LargestStep(300 * 16 + 32 * 10, 10, 32), "of three pages each"
    assert of([40] * 100, pages=(300, 30), keep_prefixes=1).samples == 30, "they may need one page each"
    assert of([16] * 3 + [160] * 9, pages=(300, 25)).samples == 5, "the short ones first"
    for count in range(1, 5000):
        assert count <= _rounded(count) <= 1.13 * count + 1


@pytest.mark.parametrize("given", [(50, 50, 1), (300, 3, 16), (300, 7, 64), (9, 1, 1), (64, 1, 64), (1, 1, 8)])
def test_what_is_rehearsed_has_the_size_that_was_asked_for(given: tuple[int, int, int]) -> None:
    step = LargestStep(*given)
    made = _made_up(step, -(-step.longest // PAGE), PAGE)
    assert made.tokens == step.tokens
    assert len(made.sampling()) >= step.samples
    assert all(chunk.end <= step.longest for chunk in made.chunks)
    assert sum(chunk.end == 1 for chunk in made.chunks) > 0 or step.tokens > step.samples


# -- nobody notices --------------------------------------------------------------------------------------------


def test_a_rehearsal_changes_nothing(device: Device, steps: list[int], watched: list[Any]) -> None:
    prompts, model = mixed_prompts(6), build("gpt_oss")
    tight(device, prompts, 0.8, model)
    before = {name: id(value) for name, value in vars(model.config).items()}
    steps.clear()
    with torch.enable_grad():
        noise = torch.get_rng_state()
        result = generate(BatchGenerator(model, page_size=PAGE), prompts, seed=3)
        assert torch.equal(noise, torch.get_rng_state())
        assert torch.is_grad_enabled()
    assert len(steps) > result.report.steps
    assert {name: id(value) for name, value in vars(model.config).items()} == before
    assert_parity("gpt_oss", prompts, result, NEW_TOKENS)
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")
@pytest.mark.parametrize("kind", ["hook", "pre-hook", "forward", "training"])
def test_models_that_would_notice_are_not_rehearsed(kind: str, device: Device, steps: list[int]) -> None:
    prompts, model = mixed_prompts(6), copy.deepcopy(build(FAMILY))
    tight(device, prompts, 0.8, model)
    calls: list[int] = []
    mlp = model.model.layers[1].mlp
    if kind == "hook":
        mlp.register_forward_hook(lambda *_: calls.append(1))
    elif kind == "pre-hook":
        mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    elif kind == "forward":
        forward = mlp.forward
        mlp.forward = lambda *given: calls.append(1) or forward(*given)
    else:
        model.train()
    steps.clear()
    result = generate(BatchGenerator(model, page_size=PAGE), prompts)
    assert len(steps) == result.report.steps
    assert kind == "training" or len(calls) == len(steps)
    page = pages_of_memory(model, 1, PAGE)
    assert result.report.kv_memory == int(0.9 * device.size) // page * page


@pytest.mark.filterwarnings("ignore:attention of LlamaAttention runs in plain PyTorch")
def test_layers_in_plain_torch_are_not_reckoned_with(
    device: Device, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = AttentionKernels(**(vars(TWINS) | {"unsupported": lambda *shape: "too odd"}))
    prompts, model = mixed_prompts(6), build(FAMILY)
    tight(device, prompts, 0.8)
    monkeypatch.setattr("hf_batchllm.call.make_backend", over_twins(odd))
    generator, page = BatchGenerator(model, page_size=PAGE), pages_of_memory(model, 1, PAGE)
    rehearsed = []
    for _ in range(2):
        steps.clear()
        result = generate(generator, prompts)
        rehearsed.append(len(steps) - result.report.steps)
        assert result.report.kv_memory == int(0.9 * device.size) // page * page
    assert rehearsed == [1, 0], "what came of it is known"


def test_an_error_in_a_rehearsal_is_left_to_the_real_step(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, model = mixed_prompts(6), copy.deepcopy(build(FAMILY))
    tight(device, prompts, 0.8)
    forward = nn.Embedding.forward

    def particular(self: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if ids.numel() > 2 and not ids.any():
            raise ValueError("nothing but padding")
        return forward(self, ids)

    monkeypatch.setattr(nn.Embedding, "forward", particular)
    result = generate(BatchGenerator(model, page_size=PAGE), prompts)
    page = pages_of_memory(model, 1, PAGE)
    assert result.report.kv_memory == int(0.9 * device.size) // page * page
    monkeypatch.undo()
    assert_parity(FAMILY, prompts, result, NEW_TOKENS)


def test_an_interrupt_in_a_rehearsal_leaves_nothing(
    device: Device, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, model = mixed_prompts(6), build(FAMILY)
    tight(device, prompts, 0.8)
    generator = BatchGenerator(model, page_size=PAGE, max_batch_tokens=300)
    steps.clear()
    with monkeypatch.context() as patch:
        patch.setattr(nn.Embedding, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(GenerationInterrupted):
            generate(generator, prompts)
    assert steps == [300], "the rehearsal"
    gc.collect()
    assert not device.tensors
    assert model.config._attn_implementation != "hf_batchllm"
    assert_parity(FAMILY, prompts, generate(generator, prompts), NEW_TOKENS)


def test_an_interrupt_anywhere_about_memory(device: Device) -> None:
    prompts, model = mixed_prompts(3), build(FAMILY)
    tight(device, prompts, 0.8)
    before = fingerprint(model)
    files = ("memory.py", "rehearsal.py", "storage.py", "device_memory.py")

    def once(at: int) -> tuple[Stop, Any]:
        stop = Stop(at, files)
        with warnings.catch_warnings():  # a smaller cache is taken on the way
            warnings.simplefilter("ignore")
            device.failures, generator = 2, BatchGenerator(model, page_size=PAGE, keep_prefixes=2)
            try:
                return stop, stop.during(lambda: generate(generator, prompts))
            except GenerationInterrupted as interrupted:
                return stop, interrupted

    lines = once(0)[0].count
    for at in random.Random(1).sample(range(1, lines), 12):
        stop, outcome = once(at)
        assert isinstance(outcome, GenerationInterrupted), stop.place
        device.failures = 0
        del outcome
        gc.collect()
        assert not device.tensors, stop.place
        assert fingerprint(model) == before, stop.place
    assert_parity(FAMILY, prompts, generate(BatchGenerator(model, page_size=PAGE), prompts), NEW_TOKENS)


# -- memory that runs short ------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [1, 2])
def test_a_smaller_cache_is_taken_and_that_is_said_once(failures: int, device: Device) -> None:
    prompts = mixed_prompts(6)
    generator = BatchGenerator(build(FAMILY), page_size=PAGE)
    whole = generate(generator, prompts).report.kv_memory
    device.failures = failures
    with pytest.warns(UserWarning, match=r"KV cache has .* instead of the .* that were planned: cpu had no") as warned:
        result = generate(generator, prompts)
    assert len(warned) == 1
    pages = whole // generator._home.page_bytes
    for _ in range(failures):
        pages = int(0.9 * pages)
    assert result.report.kv_memory == pages * generator._home.page_bytes
    assert_parity(FAMILY, prompts, result, NEW_TOKENS)
    device.failures = failures
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generate(generator, prompts).token_ids == result.token_ids


@pytest.mark.parametrize("rehearsed", [False, True])
def test_memory_that_somebody_else_takes_meanwhile(
    rehearsed: bool, device: Device, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment in which it was counted and that in which it is taken."""
    monkeypatch.setattr("hf_batchllm.call.picking_bytes", lambda *_, **__: 0)
    prompts = mixed_prompts(6)
    tight(device, prompts, 1.5 if rehearsed else 3)
    rest = device.size // 3 if rehearsed else device.size // 10
    device.step = rest // 4
    steps.clear()
    reserve = KVStorage.reserve

    def others_come(self: KVStorage, *given: Any) -> None:
        device.others = device.size - rest
        reserve(self, *given)

    monkeypatch.setattr(KVStorage, "reserve", others_come)
    with pytest.warns(UserWarning, match="KV cache has"):
        result = generate(BatchGenerator(build(FAMILY), page_size=PAGE), prompts)
    left = rest - 1.1 * device.step if rehearsed else 0.9 * rest
    assert 0.9 * left < result.report.kv_memory <= left, "steps find as much as before"
    assert len(steps) == result.report.steps + rehearsed
    assert_parity(FAMILY, prompts, result, NEW_TOKENS)


@pytest.mark.filterwarnings("ignore:the largest step that this call may come to")
def test_no_memory_for_a_single_sequence_is_an_error_that_says_so(device: Device) -> None:
    prompts = mixed_prompts(6)
    generator = BatchGenerator(build(FAMILY), page_size=PAGE)
    device.on_allocation = lambda: setattr(device, "others", device.size - 1000)
    message = r"no memory for the KV cache on cpu: .* were planned, and .* longest sequence.*Free what else"
    with pytest.raises(CacheMemoryError, match=message) as caught:
        generate(generator, prompts)
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, BatchLLMError)
    gc.collect()
    assert not device.tensors, "not even while the error is kept"
    device.on_allocation, device.others = None, 0
    assert_parity(FAMILY, prompts, generate(generator, prompts), NEW_TOKENS)


def test_more_than_there_is_may_be_asked_for(device: Device) -> None:
    prompts = mixed_prompts(6)
    tight(device, prompts, 0.5)
    with pytest.warns(UserWarning, match="KV cache has"):
        result = generate(BatchGenerator(build(FAMILY), page_size=PAGE, kv_memory="1TiB"), prompts)
    assert result.report.kv_memory <= device.size
    assert_parity(FAMILY, prompts, result, NEW_TOKENS)


def test_other_errors_are_not_taken_for_it(device: Device) -> None:
    def broken() -> None:
        raise RuntimeError("of another kind")

    device.on_allocation = broken
    with pytest.raises(RuntimeError, match="another kind"):
        generate(BatchGenerator(build(FAMILY), page_size=PAGE), mixed_prompts(2))


def test_layers_that_take_their_memory_later_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is taken beforehand."""
    for error in (torch.OutOfMemoryError("injected"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        new, made = torch.empty, []

        def third_fails(
            shape: Any, dtype: Any, device: Any, new: Any = new, made: list[int] = made, error: Exception = error
        ) -> torch.Tensor:
            made.append(1)
            if len(made) == 3:
                raise error
            return new(shape, dtype=dtype, device=device)

        monkeypatch.setattr("hf_batchllm.storage._new", third_fails)
        generator = BatchGenerator(build(FAMILY), page_size=PAGE)
        with pytest.raises(CacheMemoryError, match="after 1 layers: set a smaller `kv_memory`"):
            generate(generator, mixed_prompts(2))
        assert len(generate(generator, mixed_prompts(2))) == len(mixed_prompts(2))


def test_a_warning_from_inside_a_layer_holds_no_memory() -> None:
    gc.disable()
    try:
        tensor = torch.empty(3)
        gone = weakref.ref(tensor)

        def layer(states: torch.Tensor) -> None:
            with pytest.warns(UserWarning, match="odd"):
                Notices()("kind", "odd")

        layer(tensor)
        del tensor
        assert gone() is None
    finally:
        gc.enable()


# -- prefixes kept ---------------------------------------------------------------------------------------------


def questions(count: int, seed: int) -> list[list[int]]:
    return [[*range(3, 63), 7 + seed, *range(40, 43 + index)] for index in range(count)]


def test_kept_prefixes_stay_while_the_cache_grows(device: Device, watched: list[Any]) -> None:
    generator = BatchGenerator(build(FAMILY), page_size=PAGE, keep_prefixes=2)
    generate(generator, questions(2, 0))
    for seed in (1, 2):
        result = generate(generator, questions(5, seed))
        assert result.report.cached_tokens == 60
        assert_parity(FAMILY, questions(5, seed), result, NEW_TOKENS)
    generator.close()
    gc.collect()
    assert not device.tensors


def test_kept_prefixes_go_where_there_is_no_memory_to_grow(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = BatchGenerator(build(FAMILY), page_size=PAGE, keep_prefixes=2)
    generate(generator, questions(2, 0))

    def no_memory(self: KVStorage, num_pages: int) -> None:
        raise torch.OutOfMemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(KVStorage, "grow", no_memory)
        with pytest.warns(UserWarning, match="kept from earlier calls are computed again"):
            result = generate(generator, questions(5, 1))
    assert result.report.cached_tokens == 0
    assert_parity(FAMILY, questions(5, 1), result, NEW_TOKENS)
    assert generate(generator, questions(5, 2)).report.cached_tokens == 60
    generator.close()


# -- the tensors -----------------------------------------------------------------------------------------------


def test_layers_are_given_what_was_reserved() -> None:
    storage, cpu = KVStorage(2, 3), torch.device("cpu")
    storage.reserve([AttentionShape(4, 2, 5, 7), AttentionShape(4, 1, 5, 5)], torch.float32, cpu)
    whole = storage.bytes
    assert whole == 4 * 6 * (2 * (5 + 7) + 1 * (5 + 5))
    layers = [nn.Identity() for _ in range(3)]
    k, v = storage.of(layers[0], torch.empty(9, 1, 5), torch.empty(9, 1, 5))
    assert k.shape == v.shape == (6, 1, 5), "in whatever order they come"
    k, v = storage.of(layers[1], torch.empty(9, 2, 5), torch.empty(9, 2, 7))
    assert (k.shape, v.shape) == ((6, 2, 5), (6, 2, 7))
    assert storage.bytes == whole, "nothing new was made"
    assert storage.of(layers[1], k, v)[0] is k
    storage.of(layers[2], k, v)
    assert storage.bytes > whole


def test_a_layer_of_another_type_gets_its_own() -> None:
    storage, shape = KVStorage(2, 3), AttentionShape(4, 2, 5, 5)
    storage.reserve([shape, shape], torch.bfloat16, torch.device("cpu"))
    for _ in range(2):
        k, _ = storage.of(nn.Identity(), torch.empty(1, 2, 5), torch.empty(1, 2, 5))
        assert k.dtype == torch.float32
    assert storage.bytes == 2 * 2 * 4 * 6 * 2 * 5, "what was meant for them is gone"


def test_allocators_that_keep_no_books(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    for backend, counted in (("native", True), ("cudaMallocAsync", True), ("pluggable", False)):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda backend=backend: backend)
        assert device_memory(cuda).taken_at_once == counted
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
    assert device_memory(cuda).free() == 5


# -- the report, and the end -----------------------------------------------------------------------------------


def test_the_report_says_what_the_device_held(device: Device) -> None:
    report = generate(BatchGenerator(build(FAMILY), page_size=PAGE), mixed_prompts(3)).report
    assert report.device_memory == report.kv_memory
    assert "\nmemory     " in str(report) and " at most on the device" in str(report)
    assert max(map(len, str(report).splitlines())) <= 80


def test_on_a_cpu_it_says_nothing_of_a_device() -> None:
    report = generate(BatchGenerator(build(FAMILY)), mixed_prompts(1)).report
    assert report.device_memory == 0
    assert "memory  " not in str(report)


def test_however_a_call_ends_all_of_it_goes_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = mixed_prompts(4)
    generator = BatchGenerator(build(FAMILY), page_size=PAGE)
    generate(generator, prompts)
    assert not device.tensors
    stream = generator.stream(prompts, max_new_tokens=NEW_TOKENS)
    next(stream)
    assert device.tensors
    stream.close()
    assert not device.tensors
    for error in (ValueError, KeyboardInterrupt):
        with monkeypatch.context() as patch:
            patch.setattr(nn.Embedding, "forward", lambda *_, error=error: (_ for _ in ()).throw(error()))
            with pytest.raises((ValueError, GenerationInterrupted)):
                generate(generator, prompts)
        assert not device.tensors
    trims = device.trims
    generator.close()
    assert device.trims == trims + 1, "what the allocator keeps goes back to the device"


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1",
    reason="takes all memory of the device: run this file alone, with -n 0 or -n 1",
)
class TestOnAGpu:
    def model(self) -> Any:
        gc.collect()  # what earlier tests have left is not this one's
        model = copy.deepcopy(build(FAMILY)).to("cuda", torch.bfloat16)
        with BatchGenerator(model) as generator:  # what products of matrices need for themselves stays
            generator.generate([[5, 6, 7]], max_new_tokens=12)
        return model

    @pytest.fixture
    def little(self) -> Iterator[Callable[[int], int]]:
        """As if the GPU had only so much free: the rest is taken as long as the test runs."""
        taken: list[torch.Tensor] = []

        def leave(size: int) -> int:
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
            taken.append(torch.empty(free - size, dtype=torch.uint8, device="cuda"))
            return torch.cuda.mem_get_info()[0]

        yield leave
        taken.clear()
        torch.cuda.empty_cache()

    @pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 1}])
    def test_the_largest_cache_leaves_room_for_the_call(self, little: Callable[[int], int], options: Any) -> None:
        model = self.model()
        free = little(3 << 30)
        prompts = [[5 + index % 80, 6 + index // 80, *range(7, 60)] for index in range(2000)]
        new_tokens = 4000  # so that all of them could use far more than there is; the end comes soon
        stops = list(range(0, 97, 3))
        before = torch.cuda.memory_allocated()
        with BatchGenerator(model, page_size=16) as generator:
            for _ in range(2):
                result = generator.generate(prompts, max_new_tokens=new_tokens, eos_token_id=stops, **options)
                report = result.report
                beside = report.device_memory - before - report.kv_memory
                print(f"\nfree {free:,} cache {report.kv_memory:,} beside {beside:,} {report.graphs}")
                assert report.kv_memory > 0.6 * free
                assert report.device_memory - before < free
                assert beside <= free - report.kv_memory, "more was taken than was left"
        assert torch.cuda.memory_allocated() == before

    def test_a_rehearsal_moves_no_noise(self, little: Callable[[int], int]) -> None:
        model = self.model()
        little(2 << 30)
        before = torch.cuda.get_rng_state(), torch.get_rng_state()
        BatchGenerator(model).generate([[5, 6, 7]] * 3000, max_new_tokens=3000, eos_token_id=list(range(97)))
        assert all(map(torch.equal, before, (torch.cuda.get_rng_state(), torch.get_rng_state())))

    def test_memory_taken_meanwhile(self, monkeypatch: pytest.MonkeyPatch, little: Callable[[int], int]) -> None:
        model, reserve, taken = self.model(), KVStorage.reserve, []
        free = little(3 << 30)

        def late(self: KVStorage, *given: Any) -> None:
            if not taken:
                torch.cuda.empty_cache()
                taken.append(torch.empty(torch.cuda.mem_get_info()[0] - (1 << 30), dtype=torch.uint8, device="cuda"))
            reserve(self, *given)

        monkeypatch.setattr(KVStorage, "reserve", late)
        prompts = [[5 + index % 80, 6, 7] for index in range(2000)]
        generator = BatchGenerator(model)
        with pytest.warns(UserWarning, match="KV cache has .* instead of") as warned:
            result = generator.generate(prompts, max_new_tokens=4000, eos_token_id=list(range(0, 97, 3)))
        assert sum("KV cache has" in str(each.message) for each in warned) == 1
        assert 0.2 * (1 << 30) < result.report.kv_memory < 1 << 30 < free
        assert len(result) == len(prompts)

    def test_close_gives_reserved_memory_back(self) -> None:
        model = self.model()
        torch.cuda.empty_cache()
        free, before = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        generator = BatchGenerator(model, keep_prefixes=4)
        prompts = [[*range(5, 90), index % 90] for index in range(2000)]
        generator.generate(prompts, max_new_tokens=2000, eos_token_id=list(range(97)))
        stream = generator.stream(prompts, max_new_tokens=20)
        list(islice(stream, 1))
        stream.close()
        generator.close()
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.mem_get_info()[0] > free - (256 << 20), "but for kernels that have been loaded"
