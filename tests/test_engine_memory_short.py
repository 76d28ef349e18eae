"""What happens where a device's memory runs short, and that all of it goes back (support_memory_device.py)."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from support_calls import failing
from support_families import build
from support_kernels import plain
from support_memory_device import FAMILY, NEW_TOKENS, PAGE, Device, generate, run, tight
from support_memory_device import device as device  # a fixture
from support_memory_device import rehearsed as rehearsed  # a fixture
from support_memory_device import steps as steps  # a fixture
from support_parity import assert_parity, mixed_prompts
from support_parity import watched as watched  # a fixture
from torch import nn

from hf_batchllm import BatchGenerator, GenerationInterrupted
from hf_batchllm.errors import BatchLLMError, CacheMemoryError
from hf_batchllm.model.attention import kv_storage
from hf_batchllm.model.attention.kv_storage import AttentionShape, KVStorage
from hf_batchllm.model.device_memory import device_memory
from hf_batchllm.notices import Notices

pytestmark = plain


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
    pages = whole // generator._resources.kv.page_bytes
    for _ in range(failures):
        pages = int(0.9 * pages)
    assert result.report.kv_memory == pages * generator._resources.kv.page_bytes
    assert_parity(FAMILY, prompts, result, NEW_TOKENS)
    device.failures = failures
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generate(generator, prompts).token_ids == result.token_ids


def test_scores_that_are_kept_have_room(device: Device) -> None:
    """What is handed out is no part of what the KV cache may have."""
    ids, given = torch.arange(1, 81).reshape(8, 10), {"max_new_tokens": NEW_TOKENS}
    generator = BatchGenerator(build(FAMILY), page_size=PAGE)
    kept = 8 * NEW_TOKENS * 101 * 4
    pages = -(-(10 + NEW_TOKENS - 1) // PAGE)
    device.size = generator._resources.kv.page_bytes * pages * 9 + 2 * kept
    room = 0.9 * (device.size - kept)
    plain = generator.generate(ids, **given)
    caches = [generator.last_report.kv_memory]
    scores = {"return_dict_in_generate": True, "output_scores": True}
    assert torch.equal(generator.generate(ids, **given, **scores).sequences, plain)
    caches.append(generator.last_report.kv_memory)
    device.size = generator._resources.kv.page_bytes * pages * 4 + kept
    with pytest.warns(UserWarning, match=r"the scores and logits of this call take .* more than half of what is free"):
        generator.generate(ids, **given, **scores, output_logits=True)
    caches.append(generator.last_report.kv_memory)
    assert caches[2] < caches[1] <= min(caches[0], room)


@pytest.mark.parametrize("rehearsed", [False, True])
def test_memory_that_somebody_else_takes_meanwhile(
    rehearsed: bool, device: Device, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment in which it was counted and that in which it is taken."""
    monkeypatch.setattr("hf_batchllm.engine.call_memory.picking_bytes", lambda *_, **__: 0)
    prompts = tight(device, mixed_prompts(6), 1.5 if rehearsed else 3)
    rest = device.size // 3 if rehearsed else device.size // 10
    device.step = rest // 4
    steps.clear()
    reserve = KVStorage.reserve

    def others_come(self: KVStorage, *given: Any) -> None:
        device.others = device.size - rest
        reserve(self, *given)

    monkeypatch.setattr(KVStorage, "reserve", others_come)
    with pytest.warns(UserWarning, match="KV cache has"):
        result = run({}, prompts)
    left = rest - 1.1 * device.step if rehearsed else 0.9 * rest
    assert 0.9 * left < result.report.kv_memory <= left, "steps find as much as before"
    assert len(steps) == result.report.steps + rehearsed


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
    prompts = tight(device, mixed_prompts(6), 0.5)
    with pytest.warns(UserWarning, match="KV cache has"):
        assert run({"kv_memory": "1TiB"}, prompts).report.kv_memory <= device.size


def test_other_errors_are_not_taken_for_it(device: Device) -> None:
    def broken() -> None:
        raise RuntimeError("of another kind")

    device.on_allocation = broken
    with pytest.raises(RuntimeError, match="another kind"):
        generate(BatchGenerator(build(FAMILY), page_size=PAGE), mixed_prompts(2))


def test_layers_that_take_their_memory_later_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is taken beforehand."""
    for error in (torch.OutOfMemoryError("injected"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        failing(monkeypatch, kv_storage, "_new", {3}, error)
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


def test_a_call_that_has_ended_well_keeps_its_results(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KVStorage, "keep_only", range(99), torch.OutOfMemoryError("injected"))
    with pytest.warns(UserWarning, match="no prefixes are kept for the next call.*smaller `kv_memory`"):
        run({"keep_prefixes": 4, "min_shared_tokens": 1}, questions(6, 1))
    assert not device.tensors


def test_kept_prefixes_go_where_there_is_no_memory_to_grow(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = BatchGenerator(build(FAMILY), page_size=PAGE, keep_prefixes=2)
    generate(generator, questions(2, 0))

    with monkeypatch.context() as patch:
        failing(patch, KVStorage, "grow", range(99), torch.OutOfMemoryError("injected"))
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


def test_the_report_says_what_the_device_held(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    report = generate(BatchGenerator(build(FAMILY), page_size=PAGE), mixed_prompts(3)).report
    assert report.device_memory == report.kv_memory
    assert "\nmemory     " in str(report) and " at most on the device" in str(report)
    assert max(map(len, str(report).splitlines())) <= 80
    monkeypatch.undo()  # a CPU's
    report = generate(BatchGenerator(build(FAMILY)), mixed_prompts(1)).report
    assert report.device_memory == 0 and "memory  " not in str(report)


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
            failing(patch, nn.Embedding, "forward", range(99), error)
            with pytest.raises((ValueError, GenerationInterrupted)):
                generate(generator, prompts)
        assert not device.tensors
    trims = device.trims
    generator.close()
    assert device.trims == trims + 1, "what the allocator keeps goes back to the device"
