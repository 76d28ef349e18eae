"""A large vocabulary, a model that always says the same, and whether draws follow its distribution."""

from __future__ import annotations

import numpy as np
import torch
from support_device_loop import device as device  # a fixture
from support_distributions import SIDES, critical_value
from support_families import FAMILIES

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
