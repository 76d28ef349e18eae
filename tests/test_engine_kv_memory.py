"""How large the KV cache becomes on a device, over a stand-in for its memory (support_memory_device.py)."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_attention_references import REFERENCES
from support_calls import failing
from support_cases import up_to
from support_families import build
from support_interrupts import Stop
from support_kernels import plain
from support_memory_device import FAMILY, NEW_TOKENS, PAGE, Device, generate, over_references, run, tight
from support_memory_device import device as device  # a fixture
from support_memory_device import rehearsed as rehearsed  # a fixture
from support_memory_device import steps as steps  # a fixture
from support_parity import assert_parity, mixed_prompts, pages_of_memory
from support_parity import watched as watched  # a fixture
from support_untouched import fingerprint
from torch import nn

from hf_batchllm import BatchConfig, BatchGenerator, GenerationInterrupted
from hf_batchllm.engine import memory_rehearsal
from hf_batchllm.engine.kv_memory import KVMemory
from hf_batchllm.engine.memory_rehearsal import LargestStep, Rehearsals, _made_up, _rounded, largest_step, picking_bytes
from hf_batchllm.model.attention.kv_storage import KVStorage
from hf_batchllm.model.attention.triton_attention import AttentionKernels, TritonBackend
from hf_batchllm.model.runner import ModelRunner

pytestmark = plain
REHEARSAL = "hf_batchllm.engine.memory_rehearsal"
NO_PICKING = "hf_batchllm.engine.call_memory.picking_bytes", lambda *_, **__: 0
ON_THE_DEVICE = "hf_batchllm.sampling.token_picking.why_picked_by_host", lambda *_, **__: None
PARTS = memory_rehearsal._PARTS


# -- how large it becomes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True])
def test_the_cache_takes_what_steps_leave(
    graphs: bool, device: Device, rehearsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tight(device, mixed_prompts(6), 0.9)
    monkeypatch.setattr(*NO_PICKING)
    monkeypatch.setattr(*ON_THE_DEVICE)
    device.step = device.size // 4
    generator = BatchGenerator(build(FAMILY), page_size=PAGE, max_batch_tokens=100, cuda_graphs=graphs)
    result = generate(generator, prompts)
    left = device.size - 1.1 * device.step * (1 + graphs)
    assert left - generator._resources.kv.page_bytes < result.report.kv_memory <= left
    assert rehearsed[0] == 100 and (len(rehearsed) > 1) == graphs
    assert_parity(FAMILY, prompts, result, NEW_TOKENS)


def test_what_no_rehearsal_shows_is_left_room_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results of attention in each graph's rows, the graph's own memory, scores on their way to a token."""
    monkeypatch.setattr(f"{REHEARSAL}._PARTS", PARTS)
    generator = BatchGenerator(build(FAMILY))
    backend = TritonBackend(REFERENCES, KVStorage(1, PAGE), torch.device("cpu"), generator._notices)
    runner = ModelRunner(generator.model, generator.architecture, backend)
    monkeypatch.setattr(f"{REHEARSAL}._rehearsed", lambda runner, storage, step, memory: 1000 * step.tokens)

    def beside(samples: int, graphs: bool = False, picking: int = 0) -> int:
        made = Rehearsals(copy.deepcopy(generator.model), generator.config).beside_the_cache(
            runner, LargestStep(500, samples, 8), graphs, picking, device
        )
        assert made is not None
        return made

    parts = PARTS * 4 * sum({each.heads * each.v_dim for each in generator.architecture.attention})
    assert beside(1) > 500 * 1000
    assert beside(200) - beside(100) >= 100 * parts
    assert beside(200, graphs=True) - beside(200) >= 200 * 1000
    assert beside(200, picking=10**6) - beside(200) >= 10**6
    plain = picking_bytes(10, 97, 0, copies=0, by_host=False)
    assert picking_bytes(10, 97, 0, copies=1, by_host=False) >= 4 * 10 * 97 > plain
    assert picking_bytes(10, 97, 800, copies=0, by_host=False) - plain == 800
    assert picking_bytes(10, 97, 0, copies=0, by_host=True) > 5 * 4 * 10 * 97


@pytest.mark.some_cases
@pytest.mark.parametrize("each", [0, 500, 5000, 50_000])
def test_steps_grow_with_the_sequences_that_the_cache_holds(
    each: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is more taken than is left, nor as much left as all sequences at once would take."""
    monkeypatch.setattr(*NO_PICKING)
    prompts = tight(device, mixed_prompts(20), 0.9)
    monkeypatch.setattr(f"{REHEARSAL}._rehearsed", lambda runner, storage, step, memory: each * step.samples)
    generator = BatchGenerator(build(FAMILY), page_size=PAGE)
    asked: list[tuple[int, int]] = []
    found = KVMemory._found

    def noted(self: KVMemory, beside: Any, held: int) -> int | None:
        def asking(pages: int) -> int | None:
            asked.append((pages, beside(pages)))
            return asked[-1][1]

        return found(self, asking, held)

    monkeypatch.setattr(KVMemory, "_found", noted)
    memory = generate(generator, prompts).report.kv_memory
    if each in (0, 500):
        assert len(asked) == 1
    if each == 5000:
        pages = memory // generator._resources.kv.page_bytes
        assert pages > (device.size - asked[0][1]) // generator._resources.kv.page_bytes
        assert memory + max(taken for most, taken in asked if most <= pages + 1) <= device.size


def test_what_is_known_is_not_tried_again(
    device: Device, rehearsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*ON_THE_DEVICE)
    prompts = tight(device, mixed_prompts(6), 1.5)
    model = copy.deepcopy(build(FAMILY))
    generator = BatchGenerator(model, page_size=PAGE)
    generate(generator, prompts)
    assert len(rehearsed) >= 2, "steps of prompts, and those that graphs hold"
    rehearsed.clear()
    generate(generator, prompts)
    generate(BatchGenerator(model, page_size=PAGE), prompts)
    assert not rehearsed
    generate(BatchGenerator(model, page_size=PAGE, fuse=False), prompts)
    assert rehearsed, "other kernels take other memory"


@pytest.mark.parametrize(("part", "pages"), [(2.1, None), (0.5, 20)], ids=["small", "set by the user"])
def test_calls_that_need_no_rehearsal(part: float, pages: int | None, device: Device, steps: list[int]) -> None:
    prompts, config = tight(device, mixed_prompts(6 if pages else 3), part), {}
    if pages:
        config = {"kv_memory": pages_of_memory(build(FAMILY), pages, PAGE)}
    steps.clear()
    report = generate(BatchGenerator(build(FAMILY), page_size=PAGE, **config), prompts).report
    assert len(steps) == report.steps and device.trims == 0
    assert report.kv_memory == config.get("kv_memory", report.kv_memory)


@pytest.mark.parametrize("fits", [True, False])
def test_a_step_that_might_take_everything_leaves_half_and_that_is_said(
    fits: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tight(device, mixed_prompts(4), 0.9)
    device.step = 2 * device.size if fits else 0
    why = "steps of this call may take most of the memory .* smaller `max_batch_tokens`"
    if not fits:
        failing(monkeypatch, ModelRunner, "step", {1}, torch.OutOfMemoryError("injected"))
        why = "largest step .* set a smaller `max_batch_tokens`"
    with pytest.warns(UserWarning, match=why):
        result = run({}, prompts)
    assert 0.4 * device.size < result.report.kv_memory <= 0.45 * device.size


def test_a_prompt_that_does_not_fit_anyway_changes_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = failing(monkeypatch, KVStorage, "reserve", {1}, torch.OutOfMemoryError("injected"))
    prompts = tight(device, mixed_prompts(6), 0.8)
    device.step = int(0.3 * device.size)
    sizes = []
    for more in ([], [[5] * 20_000]):
        failed[0] = 0  # the smaller cache that is then taken has room for the others
        generator = BatchGenerator(build(FAMILY), page_size=PAGE, max_batch_tokens=300)
        with pytest.warns(UserWarning, match="instead of"):
            result = generate(generator, [*prompts, *more], on_error="record")
        sizes.append(result.report.kv_memory)
        assert [bool(generation.error) for generation in result] == [False] * len(prompts) + [True] * len(more)
    assert sizes[1] <= 1.1 * sizes[0]


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


def assert_all_but_a_tenth(device: Device, result: Any) -> None:
    """As where nothing is known of what steps take."""
    page = pages_of_memory(build(FAMILY), 1, PAGE)
    assert result.report.kv_memory == int(0.9 * device.size) // page * page


@pytest.mark.some_cases
@pytest.mark.filterwarnings("ignore:decode steps run without CUDA graphs")
@pytest.mark.parametrize("kind", ["hook", "pre-hook", "forward", "training"])
def test_models_that_would_notice_are_not_rehearsed(kind: str, device: Device, steps: list[int]) -> None:
    prompts, model = mixed_prompts(6), copy.deepcopy(build(FAMILY))
    tight(device, prompts, 0.8, model)
    calls: list[int] = []
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    notes: dict[str, Any] = {
        "hook": lambda: mlp.register_forward_hook(lambda *_: calls.append(1)),
        "pre-hook": lambda: mlp.register_forward_pre_hook(lambda *_: calls.append(1)),
        "forward": lambda: setattr(mlp, "forward", lambda *given: calls.append(1) or forward(*given)),
        "training": model.train,
    }
    notes[kind]()
    generator = BatchGenerator(model, page_size=PAGE)
    steps.clear()
    calls.clear()  # of a forward of one's own, which is tried on a few tokens
    result = generate(generator, prompts)
    assert len(steps) == result.report.steps
    assert kind == "training" or len(calls) == len(steps)
    assert_all_but_a_tenth(device, result)


@pytest.mark.filterwarnings("ignore:attention of LlamaAttention runs in plain PyTorch")
def test_layers_in_plain_torch_are_not_reckoned_with(
    device: Device, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = AttentionKernels(**(vars(REFERENCES) | {"unsupported": lambda *shape: "too odd"}))
    prompts, model = tight(device, mixed_prompts(6), 0.8), build(FAMILY)
    monkeypatch.setattr("hf_batchllm.model.model_in_use.make_backend", over_references(odd))
    generator = BatchGenerator(model, page_size=PAGE)
    rehearsed = []
    for _ in range(2):
        steps.clear()
        result = generate(generator, prompts)
        rehearsed.append(len(steps) - result.report.steps)
        assert_all_but_a_tenth(device, result)
    assert rehearsed == [1, 0], "what came of it is known"


def test_an_error_in_a_rehearsal_is_left_to_the_real_step(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, model = tight(device, mixed_prompts(6), 0.8), copy.deepcopy(build(FAMILY))
    forward = nn.Embedding.forward

    def particular(self: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if ids.numel() > 2 and not ids.any():
            raise ValueError("nothing but padding")
        return forward(self, ids)

    monkeypatch.setattr(nn.Embedding, "forward", particular)
    result = generate(BatchGenerator(model, page_size=PAGE), prompts)
    assert_all_but_a_tenth(device, result)
    monkeypatch.undo()
    assert_parity(FAMILY, prompts, result, NEW_TOKENS)


def test_an_interrupt_in_a_rehearsal_leaves_nothing(
    device: Device, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, model = tight(device, mixed_prompts(6), 0.8), build(FAMILY)
    generator = BatchGenerator(model, page_size=PAGE, max_batch_tokens=300)
    steps.clear()
    embedding = nn.functional.embedding

    def interrupted(*given: Any) -> torch.Tensor:
        if steps:  # not while it is tried whether this function mixes tokens
            raise KeyboardInterrupt
        return embedding(*given)

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "embedding", interrupted)
        with pytest.raises(GenerationInterrupted):
            generate(generator, prompts)
    assert steps == [300], "the rehearsal"
    gc.collect()
    assert not device.tensors
    assert model.config._attn_implementation != "hf_batchllm"
    assert_parity(FAMILY, prompts, generate(generator, prompts), NEW_TOKENS)


def test_an_interrupt_anywhere_about_memory(device: Device) -> None:
    prompts, model = tight(device, mixed_prompts(3), 0.8), build(FAMILY)
    before = fingerprint(model)
    files = ("kv_memory.py", "memory_rehearsal.py", "kv_storage.py", "device_memory.py")

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
    for at in random.Random(1).sample(range(1, lines), up_to(8)):
        stop, outcome = once(at)
        assert isinstance(outcome, GenerationInterrupted), stop.place
        device.failures = 0
        del outcome
        gc.collect()
        assert not device.tensors, stop.place
        assert fingerprint(model) == before, stop.place
    run({}, prompts)
