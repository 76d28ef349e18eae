"""``logprobs`` and ``prompt_logprobs`` where the device picks tokens: those of a plain forward, however it was run."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_device_loop import model_on
from support_families import logits_of_rows, random_prompts
from support_kernels import DEVICE, kernel, plain
from support_parity import pages_of_memory

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.engine.loop import Engine
from hf_batchllm.kernels import likeliest_torch, likeliest_triton

PROMPTS = random_prompts(random.Random(3), 97, "mixed", 18)[:10]


def assert_right(model: Any, result: BatchResult, k: int, prompt_k: int | None = None) -> None:
    rows = [(*row.prompt_token_ids, *row.token_ids) for row in result]
    for row, ids, logits in zip(result, rows, logits_of_rows(model, rows), strict=True):
        wanted, prompt = logits.float().cpu().log_softmax(dim=-1), len(row.prompt_token_ids)
        assert row.logprobs is not None and len(row.logprobs) == len(row.token_ids)
        whole: list[tuple[int, Any, int]] = [(prompt + at, entry, k) for at, entry in enumerate(row.logprobs)]
        if prompt_k is not None:
            assert row.prompt_logprobs is not None and row.prompt_logprobs[0] is None
            whole += [(at, entry, prompt_k) for at, entry in enumerate(row.prompt_logprobs) if at]
        for at, entry, most in whole:
            assert ids[at] in entry and len(entry) in (most, most + 1)
            assert list(entry.values()) == sorted(entry.values(), reverse=True)
            for token, value in entry.items():
                assert type(token) is int and value == pytest.approx(wanted[at - 1, token].item(), abs=2e-4)
            best = wanted[at - 1].topk(most).values.tolist() if most else []
            assert list(entry.values())[:most] == pytest.approx(best, abs=2e-4)


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
    assert_right(model, result, k, options.get("prompt_logprobs"))
    warned = any("more than 32" in str(each.message) for each in recwarn)
    assert warned == (k > 32 and device == "cuda")  # a CPU has no slower way to be warned of


@plain
def test_the_host_does_not_wait(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[int] = []
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda self, *given: depths.append(self.depth) or run(self, *given))
    with BatchGenerator(model_on(device, "llama"), steps_per_sync=6) as generator:
        generator.generate(PROMPTS, max_new_tokens=8, logprobs=2, prompt_logprobs=2, progress=False)
    assert depths == [6]


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
    for module, where in ((likeliest_torch, "cpu"), (likeliest_triton, DEVICE)):
        ids = torch.full((rows, places, k), -7, dtype=torch.int32, device=where)
        values = torch.full((rows, places, k + 1), -7.0, device=where)
        given = made.to(where) if places > 1 else None
        module.note_likeliest(logits.to(where), picked.to(where), ids, values, given)
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
