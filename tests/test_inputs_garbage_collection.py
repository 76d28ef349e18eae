"""Python's full garbage collections stay away while a call runs, and only then."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from support_families import build

from hf_batchllm import BatchGenerator
from hf_batchllm.inputs.garbage_collection import FullCollectionsPaused


def thresholds_inside(change: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
    """The collector's thresholds while a call runs the model; ``change``: set there by a hook of the user's."""
    model = build("llama")
    seen: list[tuple[int, int, int]] = []

    def look(*_: Any) -> None:
        seen.append(gc.get_threshold())
        if change is not None:
            gc.set_threshold(*change)

    hook = model.register_forward_pre_hook(look)
    try:
        BatchGenerator(model).generate([[3, 4, 5]], max_new_tokens=1)
    finally:
        hook.remove()  # other tests share the model
    return seen[-1]


@pytest.fixture(autouse=True)
def usual_thresholds() -> Any:
    before = gc.get_threshold()
    gc.set_threshold(600, 9, 8)
    yield
    gc.set_threshold(*before)


def test_a_call_has_young_collections_alone() -> None:
    first, second, third = thresholds_inside()
    assert (first, second) == (600, 9) and third > 1_000_000
    assert gc.get_threshold() == (600, 9, 8)


def test_a_failed_call_gives_the_thresholds_back() -> None:
    with pytest.raises(ZeroDivisionError), FullCollectionsPaused():
        _ = 1 // 0
    assert gc.get_threshold() == (600, 9, 8)


def test_what_the_user_sets_meanwhile_stays() -> None:
    thresholds_inside(change=(500, 5, 5))
    assert gc.get_threshold() == (500, 5, 5)


def test_young_cycles_are_freed() -> None:
    class Node:
        alive = 0

        def __init__(self) -> None:
            self.itself = self
            Node.alive += 1

        def __del__(self) -> None:
            Node.alive -= 1

    with FullCollectionsPaused():
        for _ in range(5000):
            Node()
        assert Node.alive < 2500
