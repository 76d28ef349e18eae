"""The same promises on a GPU. What a CPU can prove is proved there; this looks at what only a device can get wrong."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from itertools import islice
from typing import Any

import pytest
import torch
from support_calls import as_generate
from support_families import PROMPT_KINDS, build, family_params, random_prompts
from support_parity import KINDS_OF_ATTENTION, assert_parity, pages_of_memory
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator, ConfigError

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:attention on cuda")]
NEW_TOKENS = 12


def mixed_prompts(count: int = 5) -> list[list[int]]:
    rng = random.Random(6)
    return [prompt for kind in PROMPT_KINDS for prompt in random_prompts(rng, 97, kind, count)]


def on_gpu(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(build(family)).to("cuda", dtype)


def as_on_a_cpu(family: str, prompts: Any, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    as_generate(family, prompts, NEW_TOKENS, config, model=on_gpu(family, dtype))


@pytest.mark.parametrize("family", family_params())
def test_float32_tokens_are_those_of_generate_on_a_cpu(family: str, watched: list[Any]) -> None:
    as_on_a_cpu(family, mixed_prompts(), {"page_size": 16, "max_batch_tokens": 200})
    assert all(cache.free_pages == cache.num_pages for cache in watched)


@pytest.mark.parametrize("family", family_params(KINDS_OF_ATTENTION))
@pytest.mark.parametrize(
    "config",
    [
        {"page_size": 64, "max_batch_tokens": 7},
        {"page_size": 128, "max_batch_tokens": 1 << 20},
        {"page_size": 32, "scheduler": "fifo", "max_batch_tokens": 31, "min_shared_tokens": 1},
        {"page_size": 16, "share_prefixes": False},
        {"page_size": 100},
        {"backend": "torch"},
    ],
    ids=lambda config: ",".join(f"{name}={value}" for name, value in config.items()),
)
def test_budgets_page_sizes_and_backends_change_nothing(
    family: str, config: dict[str, Any], watched: list[Any]
) -> None:
    as_on_a_cpu(family, mixed_prompts(3), config)


def test_a_page_size_that_the_kernels_cannot_do_is_said() -> None:
    with pytest.warns(UserWarning, match="attention on cuda.*slow.*`page_size` of 16, 32, 64 or 128, not 100"):
        BatchGenerator(on_gpu("llama"), page_size=100)
    with pytest.raises(ConfigError, match="not 100"):
        BatchGenerator(on_gpu("llama"), page_size=100, backend="triton")


def test_a_dtype_that_the_kernels_cannot_do_is_said() -> None:
    with pytest.warns(UserWarning, match="LlamaAttention runs in plain PyTorch.*float64"):
        as_on_a_cpu("llama", mixed_prompts(1), {"page_size": 16}, torch.float64)


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("family", family_params(["llama", "gemma2", "gpt_oss", "deepseek_v3"]))
def test_preemption_and_processors_on_the_device(family: str, page_size: int, watched: list[Any]) -> None:
    prompts = mixed_prompts(3)
    model = on_gpu(family)
    memory = pages_of_memory(model, 192 // page_size, page_size)
    generator = BatchGenerator(model, page_size=page_size, kv_memory=memory, min_shared_tokens=1)
    result = generator.generate(prompts, max_new_tokens=40, eos_token_id=1000)  # one that never comes
    assert result.report.preemptions > 0
    assert_parity(family, prompts, result, 40)
    options: dict[str, Any] = {"do_sample": True, "seed": 1, "max_new_tokens": 6, "eos_token_id": [3, 4, 5]}
    options |= {"repetition_penalty": 1.2, "min_new_tokens": 3, "top_p": 0.9, "temperature": 1.3}
    drawn = generator.generate(prompts, **options).token_ids
    assert drawn == BatchGenerator(model, share_prefixes=False).generate(prompts, **options).token_ids
    options["seed"] = seeds = [2**63 + 7 * index for index in range(len(prompts))]
    drawn = generator.generate(prompts, **options).token_ids
    options["seed"] = seeds[3:8]
    assert drawn[3:8] == BatchGenerator(model).generate(prompts[3:8], **options).token_ids


@torch.no_grad()
@pytest.mark.parametrize("family", family_params(["llama", "qwen3", "mistral", "gemma2", "granite_swa"]))
def test_bfloat16_differs_only_where_two_logits_nearly_tie(family: str) -> None:
    # No mixture of experts: there a near tie in a router sends a token elsewhere, and all of its logits jump.
    model, exact = on_gpu(family, torch.bfloat16), on_gpu(family)
    prompts = mixed_prompts()
    result = BatchGenerator(model).generate(prompts, max_new_tokens=NEW_TOKENS)
    for prompt, generation in zip(prompts, result, strict=True):
        ids = torch.tensor([prompt + generation.token_ids], device="cuda")
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        behind = logits.max(dim=-1).values - chosen
        error = (logits - exact(ids).logits[0, len(prompt) - 1 : -1]).abs().max()
        first = behind.nonzero()
        if len(first):
            assert behind[first[0]] <= 2 * error


def test_close_gives_the_memory_back() -> None:
    model = on_gpu("llama")
    with BatchGenerator(model, keep_prefixes=4) as generator:  # libraries make themselves at home, once
        generator.generate(mixed_prompts(), max_new_tokens=NEW_TOKENS)
    del generator
    gc.collect()  # what earlier tests have left is not this one's
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with BatchGenerator(model, keep_prefixes=4) as generator:
        generator.generate(mixed_prompts(), max_new_tokens=NEW_TOKENS)
        assert torch.cuda.memory_allocated() > before
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("family", family_params(["llama", "qwen3", "gemma3", "cohere2"]))
def test_graphs_and_steps_ahead_change_nothing(family: str, watched: list[Any]) -> None:
    """Nor do fused layers, where rounding does not decide. Half of all tokens end an answer."""
    prompts, stops = mixed_prompts(), list(range(0, 97, 2))
    model = on_gpu(family)
    exact: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": stops}
    drawn: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": stops, "do_sample": True, "seed": 3, "top_p": 0.9}
    results = []
    for config in (
        {"steps_per_sync": 1, "cuda_graphs": False},
        {"steps_per_sync": 8, "cuda_graphs": False},
        {"steps_per_sync": 1},
        {"steps_per_sync": 32},
        {"steps_per_sync": 3, "share_prefixes": False},
    ):
        generator = BatchGenerator(model, fuse=False, page_size=16, **config)
        reports = [generator.generate(prompts, **options) for options in (exact, drawn)]
        results.append([report.token_ids for report in reports])
        assert bool(reports[0].report.graphs) == config.get("cuda_graphs", True)
    for name, ours, theirs in zip(("exact", "drawn"), results[0], results[1], strict=True):
        assert ours == theirs, name
    assert results[1] == results[2] == results[3]
    whole = BatchGenerator(model, page_size=16).generate(prompts, max_new_tokens=40, eos_token_id=[1000])
    assert_parity(family, prompts, whole, 40)
    assert all(cache.free_pages == cache.num_pages for cache in watched)


def test_the_host_waits_for_nothing_but_tokens() -> None:
    prompts = mixed_prompts()
    generator = BatchGenerator(on_gpu("llama"), steps_per_sync=4, page_size=16)
    generator.generate(prompts, max_new_tokens=30)  # what is compiled on first use
    for options in ({}, {"do_sample": True, "seed": 1, "top_k": 20}):
        stream = generator.stream(prompts, max_new_tokens=60, **options)
        some = [next(stream)]  # the call has begun, and graphs are captured
        torch.cuda.set_sync_debug_mode("error")
        try:
            some += islice(stream, len(prompts) - 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len([*some, *stream]) == len(prompts)
        assert generator.last_report is not None and generator.last_report.graphs


def test_fifty_calls_leave_the_memory_as_it_was() -> None:
    model, prompts = on_gpu("llama"), mixed_prompts(3)
    generator = BatchGenerator(model, page_size=16)
    sizes = []
    for call in range(50):
        generator.generate(prompts, max_new_tokens=12, do_sample=bool(call % 2))
        sizes.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert sizes[-1][0] == sizes[9][0]
    assert sizes[-1][1] <= sizes[9][1]


def test_the_last_graph_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pool of memory has gone with it."""
    monkeypatch.setattr("hf_batchllm.engine.device_loop.decode_rows._ROOM_TO_GROW", 1.0)
    prompts = [[index, 5, 7, 9] for index in range(8)]  # no lists but of single rows, and the bucket is of eight
    generator = BatchGenerator(on_gpu("llama"), page_size=16, steps_per_sync=2, max_batch_tokens=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = generator.generate(prompts, max_new_tokens=200, eos_token_id=list(range(0, 97, 20)))
    assert "from 1 graph," not in result.report.graphs and " 0 B" not in result.report.graphs
