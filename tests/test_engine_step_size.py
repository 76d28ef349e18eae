"""How much the device is given at a time: the smaller the model, the more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_families import build

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.call import Call
from hf_batchllm.engine.step_size import times_in_a_row, tokens_in_a_step
from hf_batchllm.kernels.cards import CARDS, Card

GIB = 1 << 30
CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.engine.step_size.card_on", lambda device: CARDS[9, 0])


class Heavy:
    """A model of so many weights."""

    def __init__(self, weights: float, size: int = 2) -> None:
        self.weights = int(weights)
        self.nbytes = self.weights * size

    def numel(self) -> int:
        return self.weights

    def parameters(self) -> list[Any]:
        return [self]


def test_small_models_run_oftener(hopper: None) -> None:
    times = [times_in_a_row(Heavy(count), CUDA) for count in (0, 5e7, 6e8, 8e9, 7e10)]  # type: ignore[arg-type]
    assert times == sorted(times, reverse=True)
    assert times[0] == times[2] == 16 and times[3] in (3, 4) and times[4] == 2


def test_small_models_take_larger_steps(hopper: None) -> None:
    def tokens(weights: float, device: str = "cuda", free: int = 100 * GIB) -> int:
        return tokens_in_a_step(Heavy(weights), torch.device(device), free)  # type: ignore[arg-type]

    assert [tokens(count) for count in (0, 1e8, 6e8, 1e9, 1.7e9, 3e9, 8e9)] == [32768] * 3 + [16384] * 2 + [8192] * 2
    assert tokens(6e8, free=4 * GIB) == 8192, "memory for activations is not there in plenty"
    assert tokens(6e8, device="mps") == 8192 and tokens(6e8, device="cpu") == 512


@pytest.mark.parametrize("capability", [each for each in CARDS if each != (9, 0)])
def test_slower_cards_are_given_less(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def given(card: Card) -> tuple[int, int]:
        monkeypatch.setattr("hf_batchllm.engine.step_size.card_on", lambda device: card)
        model: Any = Heavy(1e9)
        return times_in_a_row(model, CUDA), tokens_in_a_step(model, CUDA, 100 * GIB)

    card, hopper = CARDS[capability], CARDS[9, 0]
    assert all(
        (this >= that) if card.bytes > hopper.bytes else (this <= that)
        for this, that in zip(given(card), given(hopper), strict=True)
    )


@pytest.mark.parametrize(("asked", "used"), [(None, 512), (48, 48)])
def test_what_is_asked_for_counts(asked: int | None, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[int] = []
    run = Call.run
    monkeypatch.setattr(Call, "run", lambda self, *watch: budgets.append(self._memory.step_tokens) or run(self, *watch))
    BatchGenerator(build("llama"), max_batch_tokens=asked).generate([[5, 6]], max_new_tokens=2)
    assert budgets == [used]
