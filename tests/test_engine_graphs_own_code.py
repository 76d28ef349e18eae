"""Graphs replay what an owner's code computed when they were captured: what it reads must not have changed since."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_decode_graphs import captured as captured  # a fixture
from support_decode_graphs import graphs as graphs  # a fixture
from support_decode_graphs import replays_noted
from support_families import FAMILIES
from support_kernels import plain
from torch import nn

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs

pytestmark = plain

SCALE = 1.0
SETTINGS = {"mlp": {"scale": 1.0}}
UNREAD = 1
CALLS: list[int] = []


def from_beside() -> float:
    return SCALE


class Settings:
    scale = 1.0


def closed_over() -> tuple[Callable[[], float], Callable[[float], None]]:
    scale = 1.0

    def put(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda: scale, put


READ, PUT = closed_over()


class Scaled(nn.Module):
    scale = 1.0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.number = 1.0
        self.held = SimpleNamespace(scales=(1.0, [1.0]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)  # which the owner has not done
        held = self.held.scales[1][0] * self.number * self.scale * SETTINGS["mlp"]["scale"]
        return self.inner(hidden) * held * from_beside() * Settings.scale * READ()


def in_a_number(module: Scaled, patch: pytest.MonkeyPatch) -> None:
    module.number = 0.2


def in_an_object(module: Scaled, patch: pytest.MonkeyPatch) -> None:
    module.held.scales[1][0] = 0.2


def in_its_class(module: Scaled, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scaled, "scale", 0.2)


def in_another_class(module: Scaled, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Settings, "scale", 0.2)


def in_its_file(module: Scaled, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "SCALE", 0.2)


def in_a_dictionary(module: Scaled, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(SETTINGS["mlp"], "scale", 0.2)


def in_a_closure(module: Scaled, patch: pytest.MonkeyPatch) -> None:
    PUT(READ() * 0.2)


def nowhere(module: Scaled, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[__name__], "UNREAD", 2)


def _ends_one(rows: list[list[int]]) -> int:
    """A token that ends one row early, when a graph has been replayed, and the others not for a while."""
    for token in set().union(*rows):
        first, second, *_ = sorted(row.index(token) if token in row else len(row) for row in rows)
        if 10 <= first <= 16 and second - first > 10:
            return token
    raise AssertionError("no such token")


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "change",
    [
        in_a_number,
        in_an_object,
        in_its_class,
        in_another_class,
        in_its_file,
        in_a_dictionary,
        in_a_closure,
        nowhere,
    ],
)
def test_graphs_know_what_an_owners_code_reads(
    change: Callable[[Scaled, pytest.MonkeyPatch], None], graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = FAMILIES["llama"]()
    model.model.layers[0].mlp = module = Scaled(model.model.layers[0].mlp)
    rng = random.Random(3)
    prompts = [[rng.randrange(1, 97) for _ in range(4)] for _ in range(7)]
    rows = BatchGenerator(model, cuda_graphs=False).generate(prompts, max_new_tokens=30).token_ids
    stream = BatchGenerator(model, steps_per_sync=2).stream(prompts, max_new_tokens=30, eos_token_id=_ends_one(rows))
    next(stream)
    assert graphs[-1].steps
    before = set(map(id, graphs[-1]._graphs.values()))
    replayed = replays_noted(monkeypatch)
    change(module, monkeypatch)
    list(stream)
    assert bool(before & set(replayed)) == (change is nowhere)
