"""A vocabulary of 32,768 is drawn from as it should be, its rarest tokens included: by the sampling kernel alone, and
through whole calls, where a step's noise must not be that of another step, row or sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_kernels import plain
from support_rare_tokens import LEAST, VOCABULARY, Forgetful, assert_follows, bins_of, zipf_logits

from hf_batchllm import BatchGenerator
from hf_batchllm.kernels.reference import sample_torch

pytestmark = plain


def test_bins() -> None:
    for exponent, draws in ((1.0, 20_000), (1.5, 2_000_000), (0.0, 100), (0.0, 10**6)):
        expected = zipf_logits(exponent).double().softmax(0).numpy() * draws
        bins = bins_of(expected)
        size, members = np.bincount(bins, expected), np.bincount(bins)
        assert (size >= 0.99 * LEAST).all()
        assert (members[bins[expected >= LEAST]] == 1).all()


def drawn(sample: Any, device: str, logits: torch.Tensor, temperature: float, rows: int, batch: int) -> np.ndarray:
    """How often each token came, over rows as a call would have them: prompts, samples and positions vary."""
    logits, counts = logits.to(device), torch.zeros(VOCABULARY, dtype=torch.long, device=device)
    seed = torch.tensor([-77], device=device)
    for begin in range(0, rows, batch):
        row = torch.arange(begin, min(begin + batch, rows), device=device)
        tokens = sample(logits.expand(len(row), -1), temperature, seed, row // 1000, row // 50 % 20, row % 50)
        assert int(tokens.min()) >= 0
        counts += torch.bincount(tokens, minlength=VOCABULARY)
    return counts.cpu().numpy()


CASES = [(1.0, 1.0), (0.9, 0.6), (1.6, 1.3)]  # exponents, and temperatures


@pytest.mark.parametrize(("exponent", "temperature"), CASES[1:2])
def test_the_reference_draws_from_all_of_a_large_vocabulary(exponent: float, temperature: float) -> None:
    logits = zipf_logits(exponent)
    counts = drawn(sample_torch.gumbel_sample, "cpu", logits, temperature, 3_000, 200)
    assert_follows((logits.double() / temperature).softmax(0).numpy(), counts)


@pytest.mark.gpu
@pytest.mark.parametrize(("exponent", "temperature"), [*CASES, (0.0, 1.0)])
def test_the_kernel_draws_from_all_of_a_large_vocabulary(exponent: float, temperature: float) -> None:
    from hf_batchllm.kernels.triton import sample_triton

    logits = zipf_logits(exponent)
    counts = drawn(sample_triton.gumbel_sample, "cuda", logits, temperature, 8_000_000, 500_000)
    assert_follows((logits.double() / temperature).softmax(0).numpy(), counts)


@pytest.mark.some_cases
@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 0, "temperature": 0.7, "repetition_penalty": 1.0}])
def test_whole_calls_draw_from_all_of_a_large_vocabulary(options: dict[str, Any], device: str) -> None:
    """Each row of each step is one more draw from the same distribution, however steps are launched."""
    forgetful = Forgetful(device)
    prompts, samples, new_tokens = ([[at, 7, 9][: 1 + at % 3] for at in range(100)], 10, 300)
    if device == "cpu":
        prompts, samples, new_tokens = prompts[:10], 4, 60
    with BatchGenerator(forgetful.model, steps_per_sync=8, page_size=16) as generator:
        result = generator.generate(
            prompts, do_sample=True, seed=4, max_new_tokens=new_tokens, num_return_sequences=samples, **options
        )
    counts = np.bincount(np.concatenate(result.token_ids), minlength=VOCABULARY)
    assert counts.sum() == len(prompts) * samples * new_tokens
    assert_follows((forgetful.logits / options.get("temperature", 1.0)).softmax(0).numpy(), counts)
