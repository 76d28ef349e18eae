"""All runs on a device without float64 (Apple's, some of Intel's) as on a CPU. A stand-in has the place of one.

The real devices compute with kernels of their own, which nothing here says anything about.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_device_without_float64 import NoFloat64Error, There, brought, device_without_float64
from support_families import build
from support_host_sampler import noise_for, requests_of
from support_kernels import plain
from support_parity import assert_parity, mixed_prompts
from torch import nn
from transformers import GenerationConfig
from transformers.generation import logits_process as processors

from hf_batchllm import BatchGenerator
from hf_batchllm.model.float64 import has_float64, in_float64, place_of_float64
from hf_batchllm.model.inspection.fingerprint import fingerprint
from hf_batchllm.sampling.host_sampler import drawn

pytestmark = plain
NEW_TOKENS = 6
MIB = 1 << 20
DOCUMENT = [5 + 7 * place % 80 for place in range(24)]
PROMPTS = [[*DOCUMENT, 3], [*DOCUMENT, 4, 5], [*DOCUMENT[:9], 6, 7], [8, 9, 10]]
SMALL_PAGES: dict[str, Any] = {"page_size": 4, "min_shared_tokens": 4}


@pytest.fixture(params=["mps", "xpu"])
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    yield from stand_in(request.param, monkeypatch)


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    yield from stand_in("mps", monkeypatch)


def stand_in(kind: str, monkeypatch: pytest.MonkeyPatch, free: int = 64 * MIB) -> Iterator[torch.device]:
    properties = SimpleNamespace(total_memory=64 * MIB, has_fp64=False, is_integrated_gpu=False)
    of_xpu = {"get_device_properties": properties, "mem_get_info": (free, 64 * MIB)}
    of_xpu |= {"_lazy_init": None, "get_per_process_memory_fraction": 1.0}
    of_xpu |= {"empty_cache": None, "reset_peak_memory_stats": None}
    of_xpu |= dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), 0)
    of_mps = {"recommended_max_memory": free, "empty_cache": None}
    of_mps |= dict.fromkeys(("driver_allocated_memory", "current_allocated_memory"), 0)
    for module, figures in ((torch.xpu, of_xpu), (torch.mps, of_mps)):
        for name, figure in figures.items():
            monkeypatch.setattr(module, name, lambda *_, figure=figure: figure, raising=False)
    device = torch.device(kind, 0)
    has_float64.cache_clear()
    with device_without_float64(device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Triton kernels need")
        yield device
    has_float64.cache_clear()


# -- the stand-in ----------------------------------------------------------------------------------------------


def test_what_the_stand_in_refuses(there: torch.device) -> None:
    numbers = torch.ones(3, device=there)
    assert isinstance(numbers, There) and numbers.device == there and (numbers + 1).tolist() == [2, 2, 2]
    exact = torch.ones(3, dtype=torch.float64)
    attempts: list[Callable[[], object]] = [
        numbers.double,
        lambda: numbers.to(torch.float64),
        lambda: exact.to(there),
        lambda: exact.to(there, torch.float32),
        lambda: numbers.to("cpu", torch.float64),
        lambda: torch.zeros(3, dtype=torch.float64, device=there),
        lambda: torch.tensor([1.0], dtype=torch.float64, device=there),
        lambda: numbers.sum(dtype=torch.float64),
    ]
    for attempt in attempts:
        with pytest.raises(NoFloat64Error):
            attempt()
    with pytest.raises(RuntimeError, match="same device"):
        numbers + torch.ones(3)
    with pytest.raises(AssertionError, match="does not wait"):
        torch.ones(3).to(there, non_blocking=True)


def test_which_devices_have_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    has_float64.cache_clear()
    properties = {0: SimpleNamespace(has_fp64=True), 1: SimpleNamespace(has_fp64=False)}
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties[device.index])
    found = {name: has_float64(torch.device(name)) for name in ("cpu", "cuda:0", "xpu:0", "xpu:1", "mps", "mps:0")}
    has_float64.cache_clear()
    assert found == {"cpu": True, "cuda:0": True, "xpu:0": True, "xpu:1": False, "mps": False, "mps:0": False}


def test_float64_is_on_the_host(there: torch.device) -> None:
    assert place_of_float64(there) == torch.device("cpu")
    exact = in_float64(torch.ones(2, device=there))
    assert exact.dtype == torch.float64 and exact.device.type == "cpu"
    on_cpu = torch.ones(2, dtype=torch.float64)
    assert in_float64(on_cpu) is on_cpu, "no copy"


# -- calls -----------------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "mamba"])
def test_greedy_is_what_generate_gives(mps: torch.device, family: str) -> None:
    prompts = mixed_prompts(2 if family == "llama" else 1)
    result = BatchGenerator(brought(build(family), mps), **SMALL_PAGES).generate(
        prompts, max_new_tokens=NEW_TOKENS, progress=False
    )
    assert_parity(family, prompts, result, NEW_TOKENS)


SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 3}
MIXED = [
    GenerationConfig(do_sample=False),
    GenerationConfig(do_sample=True, temperature=0.7, top_k=9),
    GenerationConfig(do_sample=False, repetition_penalty=1.4),
    GenerationConfig(do_sample=True, top_p=0.8, min_p=0.05),
]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 2},
    "penalty": {"repetition_penalty": 1.3, "min_new_tokens": 3},
    "sampled": {**SAMPLED, "num_return_sequences": 3},
    "temperature": {**SAMPLED, "temperature": 0.6, "logprobs": 1},
    "top_k": {**SAMPLED, "top_k": 5},
    "top_p": {**SAMPLED, "top_p": 0.8, "temperature": 1.3},
    "min_p": {**SAMPLED, "min_p": 0.1, "repetition_penalty": 1.2},
    "seeds": {"do_sample": True, "seed": [3, 1, 4, 1]},
    "mixed": {"generation_config": MIXED, "seed": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {**SAMPLED, "num_beams": 3},
}


def assert_alike(found: BatchGenerator, wanted: BatchGenerator, **options: Any) -> None:
    results = [each.generate(PROMPTS, max_new_tokens=NEW_TOKENS, progress=False, **options) for each in (found, wanted)]
    for one, other in zip(*results, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        # Steps of a GPU are of another size, and sums in another order.
        for some, others in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert (some is None) == (others is None)
            for given, expected in zip(some or [], others or [], strict=True):
                assert given == (expected and pytest.approx(expected, abs=1e-4))


@pytest.mark.some_cases
@pytest.mark.filterwarnings("ignore:.*no float64")
@pytest.mark.parametrize(
    ("kind", "case"), [*(("mps", case) for case in CASES), *(("xpu", case) for case in ("greedy", "top_p"))]
)
def test_calls_give_what_they_give_on_a_cpu(monkeypatch: pytest.MonkeyPatch, kind: str, case: str) -> None:
    model = build("llama")
    for device in stand_in(kind, monkeypatch):
        assert_alike(BatchGenerator(brought(model, device)), BatchGenerator(model), **CASES[case])


@pytest.mark.some_cases
@pytest.mark.parametrize("case", ["penalty", "sampled", "mixed"])
def test_with_steps_launched_ahead(mps: torch.device, case: str) -> None:
    model = build("llama")
    assert_alike(BatchGenerator(brought(model, mps), steps_per_sync=4), BatchGenerator(model), **CASES[case])


def test_states_of_sampled_beams(mps: torch.device) -> None:
    model = build("qwen3_next")
    with pytest.warns(UserWarning, match="mps:0 has no float64.*on the host"):
        assert_alike(BatchGenerator(brought(model, mps)), BatchGenerator(model), **CASES["sampled beams"])


def test_tensors_and_their_scores(mps: torch.device) -> None:
    model = build("llama")
    ids = torch.tensor([DOCUMENT, DOCUMENT[::-1]])
    options: dict[str, Any] = {"max_new_tokens": 4, "output_scores": True, "return_dict_in_generate": True, **SAMPLED}
    found = BatchGenerator(brought(model, mps)).generate(
        input_ids=ids.to(mps), attention_mask=torch.ones_like(ids).to(mps), **options
    )
    wanted = BatchGenerator(model).generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    assert found.sequences.device == mps and torch.equal(found.sequences.cpu(), wanted.sequences)
    for one, other in zip(found.scores, wanted.scores, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=0)


def test_scores(mps: torch.device) -> None:
    model, choices = build("llama"), [[3, 4], [5]]
    found, wanted = (
        BatchGenerator(each).score(PROMPTS, [choices] * len(PROMPTS), progress=False)
        for each in (brought(model, mps), model)
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.is_greedy == other.is_greedy and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


# -- between calls ---------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Code of a user's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return 1.25 * self.inner(states)


@pytest.mark.some_cases
@pytest.mark.parametrize("owners", [False, True])
def test_kept_prefixes_are_found_again_and_dropped_with_other_weights(mps: torch.device, owners: bool) -> None:
    model: Any = brought(build("llama"), mps)
    if owners:
        model.model.layers[1].mlp = Scaled(model.model.layers[1].mlp)
    generator = BatchGenerator(model, keep_prefixes=4, **SMALL_PAGES)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "progress": False}
    first, second = (generator.generate(PROMPTS, **options) for _ in range(2))
    assert [each.token_ids for each in first] == [each.token_ids for each in second]
    assert second.report.computed_tokens < first.report.computed_tokens, "they were kept"
    weight = model.model.layers[0].self_attn.k_proj.weight.data
    weight[:, [1, 3]] = -weight[:, [1, 3]]
    changed = generator.generate(PROMPTS, **options)
    assert changed.report.computed_tokens == first.report.computed_tokens
    assert [each.token_ids for each in changed] != [each.token_ids for each in first]


def test_a_run_over_files_knows_its_model(mps: torch.device) -> None:
    model = build("llama")
    assert fingerprint(brought(model, mps)) == fingerprint(model)


# -- large vocabularies ----------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "warpers",
    [
        [],
        [processors.TopPLogitsWarper(0.9)],
        [processors.TemperatureLogitsWarper(0.7), processors.TopPLogitsWarper(0.6), processors.MinPLogitsWarper(0.01)],
        [processors.TopKLogitsWarper(50), processors.TopPLogitsWarper(0.9)],
    ],
)
@pytest.mark.parametrize("spread", [0.5, 4.0])  # flat: the best tokens do not tell
def test_tokens_of_a_large_vocabulary(mps: torch.device, warpers: list[Any], spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = spread * torch.randn(40, 30_000, generator=generator)
    some = requests_of(40)
    found = drawn(scores.to(mps), noise_for(some, 30_000, device=mps), warpers)
    assert found.device == mps and found.tolist() == drawn(scores, noise_for(some, 30_000), warpers).tolist()


# -- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.some_cases
@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_the_cache_has_the_size_that_the_device_says(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    prompts = [[1 + number, *DOCUMENT] for number in range(40)]
    for device in stand_in(kind, monkeypatch, free=MIB // 4):
        generator = BatchGenerator(brought(build("llama"), device), page_size=4)
        result = generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False)
    assert MIB // 16 < result.report.kv_memory < MIB // 4
    assert_parity("llama", prompts, result, NEW_TOKENS)
