"""Which graphs there are, and that those which steps to come will want are captured beforehand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_device_loop import DEVICES, model_on, run_over_twins
from support_kernels import plain

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.graph_launcher import GraphLauncher
from hf_batchllm.engine.device_loop.graph_sizes import next_smaller, size_of, sizes_to_come, sizes_up_to

pytestmark = plain


def test_sizes() -> None:
    sizes = [size_of(rows) for rows in range(1, 5000)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert all(size <= 1.5 * rows for rows, size in enumerate(sizes, 1) if rows > 64)
    assert all(size_of(size) == size for size in set(sizes))
    steps = sorted(set(sizes))
    assert len([size for size in steps if size <= 1024]) < 30
    assert [next_smaller(size) for size in steps] == [0, *steps[:-1]]
    assert sizes_up_to(steps[-1]) == steps[::-1] and sizes_up_to(0) == []


def test_sizes_that_are_to_come() -> None:
    assert sizes_to_come([], False) == []
    # All end together: nothing but the largest is wanted.
    assert sizes_to_come([512] * 256, False) == [256]
    # 25 end at each step: each size is passed.
    staggered = sizes_to_come([68 + place // 25 for place in range(800)], False)
    assert staggered == [864, 768, 640, 576, 512, 432, 384, 320, 288, 256, 240, 208, 176, 160, 128, 96]
    # Whoever may stop may do so at any time: some are prepared, and then the next.
    assert sizes_to_come([512] * 256, True) == [256, 240, 208]
    assert sizes_to_come([3] * 5, False) == [] and sizes_to_come([30] * 12, False) == [16]
    assert sizes_to_come([40] * 20 + [90] * 20, False) == [48, 32]


def _without_waiting(prepare: Any) -> Any:
    """An error if the host waits for the device meanwhile."""

    def watched(*args: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            prepare(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_graphs_are_captured_while_the_device_is_at_work(
    family: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no decode step runs without one: the tokens are the same, and all but the steps with prompts are replays."""
    if device == "cpu":
        run_over_twins(monkeypatch)
    monkeypatch.setattr(GraphLauncher, "_is_behind", lambda self: True)
    prepared, made = [], DecodeGraphs._make

    def noted(self: DecodeGraphs, kind: Any) -> Any:
        prepared.append((self.steps, kind.rows))
        return made(self, kind)

    model = model_on(device, family)
    shared = list(range(3, 30))
    prompts = [[*shared, *range(4, 9 + place % 7)] for place in range(18)]
    limits: dict[str, Any] = {"max_new_tokens": 11, "progress": False, "eos_token_id": None}
    config: dict[str, Any] = {"max_batch_tokens": 64, "steps_per_sync": 4, "min_shared_tokens": 8}
    with monkeypatch.context() as alone:
        alone.setattr(DecodeGraphs, "prepare", lambda *_: None)
        want = BatchGenerator(model, **config).generate(prompts, **limits)
    if device == "cuda":
        monkeypatch.setattr(DecodeGraphs, "prepare", _without_waiting(DecodeGraphs.prepare))
    monkeypatch.setattr(DecodeGraphs, "_make", noted)
    result = BatchGenerator(model, **config).generate(prompts, **limits)
    assert result.token_ids == want.token_ids
    assert next(size for steps, size in prepared if steps == 0) == 32, prepared
    assert [steps for steps, _ in prepared].count(0) >= 1
    assert "replayed from" in result.report.graphs
    if device == "cuda":
        assert "while other steps ran" in result.report.graphs
    replayed = int(result.report.graphs.split()[0].replace(",", ""))
    before = int(want.report.graphs.split()[0].replace(",", ""))
    assert replayed > before
