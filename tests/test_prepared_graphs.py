"""Graphs that are captured beforehand: of which sizes, with which room, and what becomes of a capture that fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_loop import model_on, run_over_twins
from interpreted import plain

from hf_batchllm import BatchGenerator
from hf_batchllm.ahead import Ahead
from hf_batchllm.decode_graphs import DecodeGraphs
from hf_batchllm.decode_rows import DecodeRows
from hf_batchllm.request import FinishReason, Request
from hf_batchllm.storage import KVStorage
from hf_batchllm.unended import Unended

pytestmark = plain
CONFIG: dict[str, Any] = {"steps_per_sync": 4, "page_size": 16, "share_prefixes": False}
OPTIONS: dict[str, Any] = {"eos_token_id": None, "progress": False}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of graphs, in the order in which they were made."""
    run_over_twins(monkeypatch)
    monkeypatch.setattr(Ahead, "_is_behind", lambda self: True)
    seen, make = [], DecodeGraphs._made

    def noted(self: DecodeGraphs, size: int) -> DecodeRows:
        seen.append(size)
        return make(self, size)

    monkeypatch.setattr(DecodeGraphs, "_made", noted)
    return seen


def short_prompts(count: int) -> list[list[int]]:
    """Of a part each, so that nothing needs a merge but idle rows."""
    return [[3 + place % 7, 5, 8 + place % 11] for place in range(count)]


def test_none_is_larger_than_a_step_may_be(made: list[int]) -> None:
    BatchGenerator(model_on("cpu", "llama"), **CONFIG, max_batch_tokens=16).generate(
        short_prompts(60), max_new_tokens=12, **OPTIONS
    )
    assert made and max(made) == 16, made


def test_each_adapter_has_graphs_for_its_own_prompts(made: list[int]) -> None:
    adapters = pytest.importorskip("adapters")
    names = ["a", "b", None] * 16
    BatchGenerator(adapters.build("lora"), **CONFIG).generate(
        short_prompts(48), adapter=names, max_new_tokens=12, **OPTIONS
    )
    assert made == [16, 16, 16]


def test_who_runs_at_a_time() -> None:
    requests = [Request(place, np.zeros(20, dtype=np.int32), 13) for place in range(6)]  # of two pages each
    everybody = Unended(requests, KVStorage(12, 16), most_rows=6)
    assert everybody.left() == ([13] * 6, True)
    for unended in (Unended(requests, KVStorage(11, 16), most_rows=6), Unended(requests, KVStorage(12, 16), 5)):
        assert unended.left() == ([], False)
        unended.begin(requests[:4])
        requests[0].pending = 3
        assert unended.left() == ([13, 13, 13, 10], True)
        requests[0].pending = 0
    requests[0].end(FinishReason.TIME)
    assert unended.left() == ([13] * 5, True), "the others fit, all of them"
