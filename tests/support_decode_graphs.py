"""Decode graphs without a GPU: what would be captured is run again in its place, and noted."""

from __future__ import annotations

from typing import Any

import pytest
from support_attention_references import REFERENCES
from support_device_loop import Replay
from support_parity import watched as watched  # a fixture

from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import DecodeRows
from hf_batchllm.model.attention.triton_attention import TritonBackend


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[DecodeGraphs]:
    """Calls run over the kernels' references, and their decode steps as if they were captured."""
    seen: list[DecodeGraphs] = []

    def make_backend(config: Any, device: Any, storage: Any, notices: Any) -> TritonBackend:
        return TritonBackend(REFERENCES, storage, device, notices, (4, 2))

    def graphs_for(config: Any, runner: Any, *rest: Any) -> DecodeGraphs:
        seen.append(DecodeGraphs(runner, runner.backend, *rest))
        return seen[-1]

    monkeypatch.setattr("hf_batchllm.model.model_in_use.make_backend", make_backend)
    monkeypatch.setattr("hf_batchllm.engine.devices.graphs_for", graphs_for)
    return seen


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> list[DecodeRows]:
    """In the order in which they would have been captured."""
    seen: list[DecodeRows] = []

    def capture(self: DecodeGraphs, graph: DecodeRows) -> None:
        graph._graph = Replay(graph)  # type: ignore[assignment]
        seen.append(graph)

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    return seen


def replays_noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of the graphs that are replayed from now on."""
    replayed: list[int] = []
    run = DecodeRows.run

    def noted(self: DecodeRows) -> None:
        replayed.append(id(self))
        run(self)

    monkeypatch.setattr(DecodeRows, "run", noted)
    return replayed
