"""A vocabulary of 32,768 is drawn from as it should be, its rarest tokens included: by the sampling kernel alone, and
through whole calls, where a step's noise must not be that of another step, row or sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support_device_loop import device as device  # a fixture
from support_distributions import SIDES, critical_value
from support_families import FAMILIES
from support_kernels import plain

from hf_batchllm import BatchGenerator
from hf_batchllm.kernels import sample_torch

pytestmark = plain
VOCABULARY = 32_768
LEAST = 5.0  # draws expected of a bin


def zipf_logits(exponent: float) -> torch.Tensor:
    """Of the n-th most frequent token 1 / n ** exponent, in no order."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(9))
    logits = torch.empty(VOCABULARY)
    logits[order] = -exponent * torch.arange(1, VOCABULARY + 1, dtype=torch.float64).log().float()
    return logits


def bins_of(expected: np.ndarray) -> np.ndarray:
    """The bin of each token: its own where enough draws are expected of it, or else one of the rare ones' bins."""
    bins = np.zeros(len(expected), dtype=int)
    rare = np.flatnonzero(expected < LEAST)
    rare = rare[np.argsort(expected[rare], kind="stable")]
    reached = np.cumsum(expected[rare])
    # A bin ends with the token that fills it; a last one that stays too small is joined to the one before.
    full = np.floor(reached / (2 * LEAST)).astype(int)
    bins[rare] = np.minimum(full, max(int(reached[-1] / (2 * LEAST)) - 1, 0)) if len(rare) else 0
    often = np.flatnonzero(expected >= LEAST)
    bins[often] = np.arange(len(often)) + (bins[rare].max() + 1 if len(rare) else 0)
    return np.unique(bins, return_inverse=True)[1]


def assert_follows(probability: np.ndarray, counts: np.ndarray) -> None:
    """Chi-square from both sides, and the rarest half of the vocabulary by itself, within a binomial's bounds."""
    draws = counts.sum()
    expected = probability * draws
    bins = bins_of(expected)
    wanted, found = np.bincount(bins, expected), np.bincount(bins, counts)
    assert wanted.min() >= 0.99 * LEAST or len(wanted) < 3
    statistic, freedom = float(((found - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    told = f"chi-square {statistic:,.0f} with {freedom:,} degrees of freedom, {draws:,} draws"
    assert critical_value(freedom, -SIDES) < statistic < critical_value(freedom, SIDES), told
    rarest = np.argsort(probability)[: len(probability) // 2]
    share = probability[rarest].sum()
    spread = (draws * share * (1 - share)) ** 0.5
    assert abs(counts[rarest].sum() - draws * share) < SIDES * spread, f"{counts[rarest].sum():,} of {draws:,}"


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


@pytest.mark.parametrize(("exponent", "temperature"), CASES)
def test_the_twin_draws_from_all_of_a_large_vocabulary(exponent: float, temperature: float) -> None:
    logits = zipf_logits(exponent)
    counts = drawn(sample_torch.gumbel_sample, "cpu", logits, temperature, 3_000, 200)
    assert_follows((logits.double() / temperature).softmax(0).numpy(), counts)


@pytest.mark.gpu
@pytest.mark.parametrize(("exponent", "temperature"), [*CASES, (0.0, 1.0)])
def test_the_kernel_draws_from_all_of_a_large_vocabulary(exponent: float, temperature: float) -> None:
    from hf_batchllm.kernels import sample_triton

    logits = zipf_logits(exponent)
    counts = drawn(sample_triton.gumbel_sample, "cuda", logits, temperature, 8_000_000, 500_000)
    assert_follows((logits.double() / temperature).softmax(0).numpy(), counts)


class Forgetful:
    """A model that says the same whatever it has read: all of its tokens have one vector, so that in each layer
    attention gives what every key's value is."""

    def __init__(self, device: str) -> None:
        family = FAMILIES["llama"]
        wide = type(family)(family.name, family.model_type, family.config | {"vocab_size": VOCABULARY})
        self.model = wide()
        with torch.no_grad():
            vectors = self.model.get_input_embeddings().weight
            vectors.copy_(vectors[:1].clone().expand_as(vectors))
            head = self.model.get_output_embeddings().weight
            state = self._states([[1, 2, 3]])[0]
            # The head gives each token its logit: along the one state there is.
            head.copy_(zipf_logits(1.2)[:, None] * (state / state.square().sum())[None])
            self.model = self.model.to(device)
            self.logits = self.model(torch.tensor([[5] * 9], device=device)).logits[0, -1].double().cpu()

    def _states(self, prompts: list[list[int]]) -> torch.Tensor:
        return self.model.model(torch.tensor(prompts)).last_hidden_state[:, -1]


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
