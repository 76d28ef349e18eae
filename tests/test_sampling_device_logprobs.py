"""``logprobs`` and ``prompt_logprobs`` where the device picks tokens: those of a plain forward, however it was run."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_distributions import processors_of
from support_families import random_prompts
from support_kernels import DEVICE, kernel, plain
from support_logprobs import assert_right
from support_parity import pages_of_memory
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, Generation
from hf_batchllm.engine.loop import Engine
from hf_batchllm.kernels.reference import top_logprobs_torch
from hf_batchllm.kernels.triton import top_logprobs_triton

PROMPTS = random_prompts(random.Random(3), 97, "mixed", 18)[:10]


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each call launched ahead of the host."""
    depths: list[int] = []
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda self, *given: depths.append(self.depth) or run(self, *given))
    return depths


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize(
    ("family", "k", "options"),
    [
        ("llama", 0, {}),
        ("llama", 3, {"do_sample": True, "temperature": 1.5, "seed": 4, "num_return_sequences": 2}),
        ("gemma3", 5, {"eos_token_id": list(range(0, 97, 9)), "pad_token_id": 0, "max_new_tokens": 25}),
        ("llama", 2, {"repetition_penalty": 1.4, "prompt_logprobs": 1}),
        ("gpt_oss", 97, {"max_new_tokens": 3}),
    ],
)
def test_as_a_plain_forward_gives_them(
    device: str, family: str, k: int, options: dict[str, Any], steps: int, recwarn: pytest.WarningsRecorder
) -> None:
    model = model_on(device, family)
    memory = pages_of_memory(model, 40, 8)
    with BatchGenerator(model, steps_per_sync=steps, page_size=8, kv_memory=memory) as generator:
        given = {"max_new_tokens": 9, "logprobs": k, **options}
        result = generator.generate(PROMPTS, progress=False, **given)
        plain = generator.generate(PROMPTS, progress=False, **{**given, "logprobs": None, "prompt_logprobs": None})
    assert result.token_ids == plain.token_ids
    assert_right(model, result, options.get("prompt_logprobs"), k)
    warned = any("more than 32" in str(each.message) for each in recwarn)
    assert warned == (k > 32 and device == "cuda")  # a CPU has no slower way to be warned of


@plain
def test_the_host_does_not_wait(device: str, depths: list[int]) -> None:
    with BatchGenerator(model_on(device, "llama"), steps_per_sync=6) as generator:
        generator.generate(PROMPTS, max_new_tokens=8, logprobs=2, prompt_logprobs=2, progress=False)
    assert depths == [6]


class OfScores(BatchGenerator):
    _logprobs_of_scores = True  # as generate_batch and rollouts have them


@plain
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("steps", [1, 6])
def test_after_processors_they_are_those_that_tokens_were_drawn_with(
    device: str, k: int, steps: int, depths: list[int]
) -> None:
    kinds: list[dict[str, Any]] = [
        {"do_sample": True, "temperature": 0.7, "top_k": 0},
        {"do_sample": True, "temperature": 1.6, "top_p": 0.8, "top_k": 0},
        {"do_sample": False, "suppress_tokens": [3, 4], "repetition_penalty": 1.3},
        {"do_sample": True, "top_k": 12, "min_p": 0.05, "renormalize_logits": True},
        {"do_sample": True, "top_h": 0.6, "temperature": 1.3, "top_k": 0},
    ]
    model, prompts = model_on(device, "llama"), random_prompts(random.Random(5), 97, "mixed", 18)[:8]
    with OfScores(model, steps_per_sync=steps, page_size=16) as ours:
        for some in (kinds[:1], kinds):
            options = [{"eos_token_id": 1, **some[place % len(some)]} for place in range(len(prompts))]

            def scores(
                row: Generation, ids: torch.Tensor, logits: torch.Tensor, options: list[dict[str, Any]] = options
            ) -> torch.Tensor:
                return processors_of(model, len(row.prompt_token_ids), **options[row.index])(ids, logits)

            configs = [GenerationConfig(max_new_tokens=6, **each) for each in options]
            result = ours.generate(prompts, configs, logprobs=k, seed=4, progress=False)
            assert_right(model, result, None, k, scores, near=3e-4)
    assert depths == [steps, steps]


# -- the kernel ------------------------------------------------------------------------------------------------


def check_kernel(seed: int, rows: int, vocabulary: int, k: int, places: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary + 3, generator=generator) * 4).to(dtype)[:, :vocabulary]
    logits[torch.rand(rows, vocabulary, generator=generator) < 0.2] = -float("inf")
    logits[:, vocabulary // 2] = 9.0
    picked = torch.randint(0, vocabulary, (rows,), generator=generator)
    picked[rows // 2] = -1
    made = torch.randint(0, 50, (rows,), generator=generator).to([torch.int32, torch.int64][seed % 2])
    results = []
    for module, where in ((top_logprobs_torch, "cpu"), (top_logprobs_triton, DEVICE)):
        ids = torch.full((rows, places, k), -7, dtype=torch.int32, device=where)
        values = torch.full((rows, places, k + 1), -7.0, device=where)
        given = made.to(where) if places > 1 else None
        module.note_top_logprobs(logits.to(where), picked.to(where), ids, values, given)
        results.append((ids.cpu(), values.cpu()))
    (their_ids, theirs), (our_ids, ours) = results
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)
    for row in range(rows):
        place = int(made[row]) % places if places > 1 else 0
        untouched = [other for other in range(places) if other != place]
        assert (ours[row, untouched] == -7).all() and (our_ids[row, untouched] == -7).all()
        finite = theirs[row, place, :k].isfinite()
        assert torch.equal(our_ids[row, place][finite], their_ids[row, place][finite])
        assert len(set(our_ids[row, place].tolist())) == k and (our_ids[row, place] >= 0).all()
        assert (our_ids[row, place] < vocabulary).all()


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("vocabulary", [40, 97, 4097, 9000])
@pytest.mark.parametrize("k", [0, 1, 5, 32])
def test_the_kernel(vocabulary: int, k: int) -> None:
    for seed, (places, dtype) in enumerate([(1, torch.float32), (4, torch.float16)]):
        check_kernel(seed, 3, vocabulary, k, places, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_the_kernel_natively(seed: int) -> None:
    rng = random.Random(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    vocabulary = rng.choice([97, 5003, 32_000, 151_936, 262_144])
    check_kernel(seed, rng.randint(1, 300), vocabulary, rng.choice([0, 1, 2, 5, 20, 32]), rng.choice([1, 8]), dtype)
