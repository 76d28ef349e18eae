"""Graphs that are captured beforehand: of which sizes, when, and what becomes of a capture that fails."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from support_calls import answers, failing, noted
from support_device_loop import DEVICES, model_on, run_over_references
from support_kernels import plain
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, LogitsProcessor

from hf_batchllm.engine.device_loop import decode_rows, graph_capture
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import DecodeRows
from hf_batchllm.engine.device_loop.graph_sizes import next_smaller, size_of, sizes_to_come, sizes_up_to
from hf_batchllm.engine.device_loop.steps_as_graphs import GraphLauncher
from hf_batchllm.engine.device_loop.still_running import StillRunning
from hf_batchllm.model.attention.kv_storage import KVStorage
from hf_batchllm.planning.requests_and_prefixes import FinishReason, Request

pytestmark = plain
CONFIG: dict[str, Any] = {"steps_per_sync": 4, "page_size": 16, "share_prefixes": False}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of graphs, in the order in which they were made."""
    run_over_references(monkeypatch)
    monkeypatch.setattr(GraphLauncher, "_is_behind", lambda self: True)
    return noted(monkeypatch, DecodeGraphs, "_make", lambda self, kind: kind.rows)


def run(count: int, new: int | list[int], config: dict[str, Any] | None = None, **options: Any) -> Any:
    """So many short prompts, of so many new tokens: each of its own number, where it is a list."""
    limits = {"max_new_tokens": new}
    if isinstance(new, list):
        limits = {"generation_config": [GenerationConfig(max_new_tokens=limit) for limit in new]}
    given = {**limits, "eos_token_id": None, **options}
    return answers(model_on("cpu", "llama"), short_prompts(count), CONFIG | (config or {}), **given)


def short_prompts(count: int) -> list[list[int]]:
    """Of a part each, so that nothing needs a merge but idle rows."""
    return [[3 + place % 7, 5, 8 + place % 11] for place in range(count)]


def test_one_of_fewer_rows_serves_while_some_are_idle(made: list[int]) -> None:
    """No size is made twice, for want of the merge that writes what idle rows give."""
    limits = [6 + place // 6 for place in range(96)]
    result = run(96, limits, {"max_batch_tokens": 150})
    assert [len(tokens) for tokens in result.token_ids] == limits
    assert len(made) > 1 and len(made) == len(set(made)), made


@pytest.mark.parametrize("tokens", [1000, 100])
def test_after_the_last_prompts_one_is_captured_at_once(
    tokens: int, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host has no time: the first step of rows alone would wait for it in any case."""
    monkeypatch.setattr(GraphLauncher, "_is_behind", lambda self: False)
    replays = noted(monkeypatch, DecodeGraphs, "run", lambda self, *_: self.replays, after=True)
    config = {"max_batch_tokens": tokens}
    run(60, 20, config)
    assert replays[0] and made[0] == 64
    made.clear(), replays.clear()
    run(60, 8, config)
    assert not any(replays) and (tokens == 100 or len(made) == 1)  # too few steps
    made.clear(), replays.clear()
    run(60, [4] * 25 + [20] * 35, config)
    assert replays[0] and made == [64, 48]  # the second one by the step that needs it


class AsIs(LogitsProcessor):
    """Of the user's own, so the host picks."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_where_the_host_picks_few_serve_all(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The device would wait while one is captured for each number of rows. None runs without one at the end."""
    without, own = [], DecodeGraphs.run

    def noted(self: DecodeGraphs, batch: Any, steps_to_come: int) -> Any:
        produced = own(self, batch, steps_to_come)
        if not self.replays and produced is not None:
            without.append(batch.attention.rows)
        return produced

    monkeypatch.setattr(DecodeGraphs, "run", noted)
    limits = [6 + place // 6 for place in range(96)]
    want = run(96, limits)
    made.clear(), without.clear()
    result = run(96, limits, {"max_batch_tokens": 150}, logits_processor=[AsIs()])
    assert result.token_ids == want.token_ids
    assert made == [96, 64] and len(without) == 1, (made, without)  # 96 while the prompts of the rest are computed


@pytest.mark.some_cases
@pytest.mark.parametrize("behind", [False, True])
def test_where_the_host_picks_sizes_do_not_hang_on_timing(
    behind: bool, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a graph was there in time decides only whether a step is a replay."""
    sizes = noted(
        monkeypatch, DecodeGraphs, "run", lambda self, batch, steps: self._size_for(batch.attention.rows, steps)
    )
    monkeypatch.setattr(GraphLauncher, "_is_behind", lambda self: behind)
    run(40, 20, {"max_batch_tokens": 100}, logits_processor=[AsIs()])
    assert sizes == [48] * len(sizes) and made == [48]


def test_none_is_larger_than_a_step_may_be(made: list[int]) -> None:
    run(60, 12, {"max_batch_tokens": 16})
    assert made and max(made) == 16, made


def test_each_adapter_has_graphs_for_its_own_prompts(made: list[int]) -> None:
    adapters = pytest.importorskip("support_adapters")
    names = ["a", "b", None] * 16
    answers(adapters.build("lora"), short_prompts(48), CONFIG, adapter=names, max_new_tokens=12, eos_token_id=None)
    assert made == [16, 16, 16]


def test_a_failure_beforehand_ends_nothing(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"max_batch_tokens": 24}
    want = run(20, 12, config)
    failing(
        monkeypatch,
        DecodeRows,
        "run_idle",
        range(99),
        torch.OutOfMemoryError("no memory to spare"),
    )
    result = run(20, 12, config)
    assert result.token_ids == want.token_ids
    assert "replayed" in result.report.graphs
    assert "(OutOfMemoryError: no memory to spare)" in result.report.graphs
    assert "no more while" not in want.report.graphs


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_capture_that_breaks_off_says_what_broke_it(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Graph:
        ended = False

        def capture_begin(self, *_: Any, **__: Any) -> None:
            assert not gc.isenabled()

        def capture_end(self) -> None:
            self.ended = True
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(graph_capture, "_capture_stream", lambda _: None)
    graph: Any = Graph()
    with pytest.raises(error), graph_capture.capturing(graph, None, torch.device("cpu")):
        raise error
    assert graph.ended and gc.isenabled()


@pytest.mark.parametrize("inside", [False, True])
def test_a_capture_makes_its_own_copies_of_weights(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that autocast keeps are gone when its block ends, and those made in a capture are filled by a replay.

    ``inside``: the model's forward enters autocast by itself, as accelerate's does.
    """
    weight = torch.nn.Parameter(torch.ones(2, 2))
    copies: list[torch.Tensor] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if "copy" in func.__name__ and result.dtype == torch.bfloat16:
                copies.append(result)
            return result

    model = torch.nn.Identity()
    model.forward = lambda: weight @ weight  # type: ignore[method-assign]
    if inside:
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=torch.bfloat16)(model.forward))

    def forward() -> None:
        with torch.no_grad(), Seen():
            model.forward()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(decode_rows, "capturing", lambda *_: nullcontext())
    token = torch.zeros(1)
    rows: Any = SimpleNamespace(
        work=SimpleNamespace(rooms=[]),
        _state=SimpleNamespace(token=token),
        _run=forward,
        _logits=None,
        _runner=SimpleNamespace(model=model),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        DecodeRows.capture(rows, None)
        captured = len(copies)
        forward()
        assert captured and len(copies) > captured, "the capture has left copies behind"
        kept = len(copies)
        forward()
        assert len(copies) == kept, "autocast keeps its own again"
        DecodeRows.capture(rows, None)
        assert len(copies) > kept, "the capture reads those that are kept"


def test_who_runs_at_a_time() -> None:
    requests = [Request(place, np.zeros(20, dtype=np.int32), 13) for place in range(6)]  # of two pages each
    everybody = StillRunning(requests, KVStorage(12, 16), most_rows=121)
    assert everybody.tokens_left() == ([13] * 6, True)
    too_few_pages = StillRunning(requests, KVStorage(11, 16), most_rows=121)
    for unended in (StillRunning(requests, KVStorage(12, 16), most_rows=5), too_few_pages):
        assert unended.tokens_left() == ([], False)
        unended.begin(requests[:4])
        requests[0].pending = 3
        assert unended.tokens_left() == ([13, 13, 13, 10], True)
        requests[0].pending = 0
    requests[0].end(FinishReason.TIME)
    assert too_few_pages.tokens_left() == ([13] * 5, True), "the others fit, all of them"


def test_when_the_last_has_begun_the_first_may_have_ended() -> None:
    requests = [Request(place, np.zeros(20, dtype=np.int32), 13) for place in range(6)]
    running = StillRunning(requests, KVStorage(12, 16), most_rows=40)  # prompts of 120 tokens, in three steps
    assert running.tokens_left() == ([12, 12, 11, 11, 10, 10], True)
    requests[0].pending = 12
    running.begin(requests[:2])
    assert running.tokens_left() == ([12, 12, 11, 11, 11], True), "two steps for the rest, and the first has ended then"


def test_the_memory_of_graphs_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps that of a pool whose graphs have gone, for nobody, until its cache is emptied."""
    seen: list[Any] = []
    graphs = object.__new__(DecodeGraphs)
    graph: Any = SimpleNamespace(captured=True, drop_capture=lambda: seen.append("dropped"))
    graphs._graphs = {16: graph}
    graphs._sizes = set()
    stream: Any = SimpleNamespace(synchronize=lambda: seen.append("waits"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(len(graphs._graphs)))
    graphs.close(stream)
    graphs.close(stream)  # after an interrupt, say
    assert seen == ["waits", "dropped", 0]


def test_none_are_prepared_where_memory_is_short(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture would find what PyTorch keeps for later taken, and not have it given back."""
    prepared: list[Any] = []
    monkeypatch.setattr(DecodeRows, "run_idle", lambda *_: prepared.append(1))
    monkeypatch.setattr(DecodeGraphs, "is_tight", lambda self: True)
    result = run(20, 12, {"max_batch_tokens": 24})
    assert not prepared and made and "replayed" in result.report.graphs


# -- which there are -------------------------------------------------------------------------------------------


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
        run_over_references(monkeypatch)
    monkeypatch.setattr(GraphLauncher, "_is_behind", lambda self: True)
    model = model_on(device, family)
    shared = list(range(3, 30))
    prompts = [[*shared, *range(4, 9 + place % 7)] for place in range(18)]
    limits: dict[str, Any] = {"max_new_tokens": 11, "eos_token_id": None}
    config: dict[str, Any] = {"max_batch_tokens": 64, "steps_per_sync": 4, "min_shared_tokens": 8}
    with monkeypatch.context() as alone:
        alone.setattr(DecodeGraphs, "prepare", lambda *_: None)
        want = answers(model, prompts, config, **limits)
    if device == "cuda":
        monkeypatch.setattr(DecodeGraphs, "prepare", _without_waiting(DecodeGraphs.prepare))
    prepared = noted(monkeypatch, DecodeGraphs, "_make", lambda self, kind: (self.steps, kind.rows))
    result = answers(model, prompts, config, **limits)
    assert result.token_ids == want.token_ids
    assert next(size for steps, size in prepared if steps == 0) == 32, prepared
    assert [steps for steps, _ in prepared].count(0) >= 1
    assert "replayed from" in result.report.graphs
    if device == "cuda":
        assert "while other steps ran" in result.report.graphs
    replayed = int(result.report.graphs.split()[0].replace(",", ""))
    before = int(want.report.graphs.split()[0].replace(",", ""))
    assert replayed > before
