"""Autocast keeps copies of weights as long as its block lasts, and captured graphs read them: graphs of a block that
was left are not run in the next one."""

from __future__ import annotations

import pytest
import torch
from device_loop import model_on, run_over_twins
from interpreted import plain
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.ahead import Ahead
from hf_batchllm.autocast_block import AutocastBlock
from hf_batchllm.decode_graphs import DecodeGraphs

pytestmark = plain


def on(dtype: torch.dtype = torch.bfloat16, cached: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, cache_enabled=cached)


def test_a_block_that_was_left_is_another_one() -> None:
    block = AutocastBlock(torch.device("cpu"))
    assert block.state() is None
    with on():
        first = block.state()
        with on(torch.float16):  # the copies are of the dtype that was asked for first
            assert block.state() not in (first, None)
        with torch.autocast("cpu", enabled=False):
            assert block.state() is None
        with torch.inference_mode():
            assert block.state() == first
        with torch.enable_grad():
            assert block.state() == first
        assert block.state() == first
    assert block.state() is None
    with on():
        second = block.state()
        assert second != first and block.state() == second
        torch.clear_autocast_cache()
        assert block.state() not in (first, second)
    with on(cached=False):  # copies are made in each run, so a graph makes its own
        assert block.state() == block.state() not in (None, first, second)


@pytest.mark.parametrize("leave", [False, True])
def test_graphs_go_with_the_copies_that_they_read(leave: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_over_twins(monkeypatch)
    monkeypatch.setattr(Ahead, "_is_behind", lambda self: True)
    dropped: list[int] = []
    look = DecodeGraphs._look

    def noted(self: DecodeGraphs) -> None:
        before = len(self._graphs)
        look(self)
        dropped.append(before - len(self._graphs))

    monkeypatch.setattr(DecodeGraphs, "_look", noted)
    prompts = [[3 + place, 5, 8] for place in range(4)]
    configs = [GenerationConfig(max_new_tokens=length, eos_token_id=None) for length in (12, 40, 40, 40)]
    generator = BatchGenerator(model_on("cpu", "llama"), steps_per_sync=4, page_size=16, share_prefixes=False)
    with on():
        stream = generator.stream(prompts, configs, progress=False)
        next(stream)
        if not leave:
            assert len(list(stream)) == 3
    if leave:
        with on():
            assert len(list(stream)) == 3
    assert any(dropped) == leave
    assert generator.last_report is not None and generator.last_report.graphs
