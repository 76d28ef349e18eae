"""Decode steps at fixed addresses: what a captured graph reads is filled anew for each step.

Without a GPU nothing is captured; the step is run once more in its place, over the same memory. A replay reads the
weights where they were when it was captured.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_attention_references import REFERENCES
from support_calls import answers, as_generate, failing
from support_decode_graphs import captured as captured  # a fixture
from support_decode_graphs import graphs as graphs  # a fixture
from support_decode_graphs import replays_noted
from support_families import FAMILIES, build
from support_kernels import plain
from support_parity import assert_parity, each_config_with_some, mixed_prompts
from support_parity import watched as watched  # a fixture
from torch import nn

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import DecodeRows, RowsWork
from hf_batchllm.engine.device_loop.graph_sizes import size_of
from hf_batchllm.model.attention.triton_attention import AttentionKernels
from hf_batchllm.model.inspection.user_state import HeldMemory, not_in_graphs

pytestmark = [plain, pytest.mark.usefixtures("graphs")]
NEW_TOKENS = 12


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("family", "page_size_and_steps"), each_config_with_some([(4, 3), (4, 16), (16, 8), (16, 3)], 2)
)
def test_tokens_are_those_of_generate(
    family: str, page_size_and_steps: tuple[int, int], watched: list[Any], graphs: list[DecodeGraphs]
) -> None:
    page_size, steps = page_size_and_steps
    config = {"steps_per_sync": steps, "page_size": page_size, "min_shared_tokens": 1}
    as_generate(family, mixed_prompts(3), NEW_TOKENS, config)
    assert len(graphs[0]._graphs) == 0, "they are gone with the call"
    assert graphs[0].steps > 3
    assert all(cache.free_pages == cache.num_pages for cache in watched)


def test_rows_that_leave_are_idle_in_the_graph_that_there_is(watched: list[Any], captured: list[DecodeRows]) -> None:
    prompts = mixed_prompts(5)
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": list(range(0, 97, 9))}
    result = answers("llama", prompts, {"steps_per_sync": 2, "page_size": 16}, **options)
    without = answers("llama", prompts, {"steps_per_sync": 1, "cuda_graphs": False}, **options)
    assert result.token_ids == without.token_ids
    rows = [graph.rows for graph in captured]
    assert 1 < len(rows) < 8, rows
    assert max(rows) <= size_of(len(prompts))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_none_outlives_its_call(
    error: type[BaseException],
    captured: list[DecodeRows],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where an error that is kept has them among its locals: a group of ranks cannot end before its graphs."""
    run, runs = DecodeRows.run, []

    def failing(self: DecodeRows) -> None:
        runs.append(self.captured)
        if sum(runs) > 3:
            raise error("no more of this")
        run(self)

    monkeypatch.setattr(DecodeRows, "run", failing)
    with pytest.raises(error) as kept:
        answers("llama", mixed_prompts(2), {"steps_per_sync": 2}, max_new_tokens=40)
    assert kept.value is not None
    assert captured and not any(graph.captured for graph in captured)


def test_few_steps_are_not_worth_a_graph(graphs: list[DecodeGraphs]) -> None:
    answers("llama", mixed_prompts(2), {"steps_per_sync": 2}, max_new_tokens=4)
    assert graphs[0].steps == 0


def test_lists_that_do_not_fit_get_more_room(captured: list[DecodeRows], monkeypatch: pytest.MonkeyPatch) -> None:
    """As little room as the first burst needs: later ones read more pages."""
    made = RowsWork.__init__
    monkeypatch.setattr(RowsWork, "__init__", lambda self, state, entries, *rest: made(self, state, 0, *rest))
    monkeypatch.setattr("hf_batchllm.engine.device_loop.decode_rows._ROOM_TO_GROW", 1.0)
    as_generate("llama", mixed_prompts(2), 30, {"steps_per_sync": 2, "page_size": 4})
    rows = [graph.rows for graph in captured]
    assert len(rows) > len(set(rows)), "one was made again, with more room"


def test_an_error_of_the_model_is_no_want_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, DecodeRows, "run", range(99), ValueError("of the model's own"))
    with pytest.raises(ValueError, match="the model's own"):
        answers("llama", mixed_prompts(1), {"steps_per_sync": 2}, max_new_tokens=12)


def with_a_hook(model: Any, calls: list[int]) -> str:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    return "hooks on `model.layers.1.mlp` would not be called"


def with_a_forward(model: Any, calls: list[int]) -> str:
    own = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda *given: calls.append(1) or own(*given)
    return "`model.layers.1.mlp` has a `forward` of its own"


@pytest.mark.parametrize("change", [with_a_hook, with_a_forward])
def test_what_a_replay_would_skip_keeps_graphs_away(change: Any, graphs: list[DecodeGraphs]) -> None:
    model, prompts, calls = FAMILIES["llama"](), mixed_prompts(2), list[int]()
    why = change(model, calls)
    generator = BatchGenerator(model, steps_per_sync=2)
    calls.clear()  # of code of one's own, which is tried on a few tokens
    with pytest.warns(UserWarning, match=f"without CUDA graphs.*{why}"):
        result = generator.generate(prompts, max_new_tokens=NEW_TOKENS)
    row = change is with_a_forward  # of custom code, which tells whether it is the code that was tried
    assert graphs[0].steps == 0 and len(calls) == result.report.steps + row
    assert_parity("llama", prompts, result, NEW_TOKENS)


def test_a_hook_that_has_gone_and_those_that_transformers_leaves_behind_are_no_reason(
    graphs: list[DecodeGraphs],
) -> None:
    model, prompts = FAMILIES["llama"](), mixed_prompts(2)
    generator = BatchGenerator(model, steps_per_sync=2)
    with model.lm_head.register_forward_hook(lambda *_: None), pytest.warns(UserWarning, match="without CUDA graphs"):
        before = generator.generate(prompts, max_new_tokens=NEW_TOKENS)
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert not_in_graphs(model) is None
    assert generator.generate(prompts, max_new_tokens=NEW_TOKENS).token_ids == before.token_ids
    assert [each.steps > 0 for each in graphs] == [False, True]


def test_graphs_that_do_not_close_leave_the_generator_free(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, DecodeGraphs, "close", range(99), RuntimeError("CUDA error"))
    generator = BatchGenerator(build("llama"), steps_per_sync=2)
    with pytest.raises(RuntimeError, match="CUDA error"):
        generator.generate(mixed_prompts(1), max_new_tokens=12)
    assert not generator._is_running
    generator.close()


def test_layers_that_the_kernels_cannot_do_are_not_captured(
    graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    unsupported = AttentionKernels(**(vars(REFERENCES) | {"unsupported": lambda *shape: "too odd"}))
    monkeypatch.setattr("support_decode_graphs.REFERENCES", unsupported)
    with pytest.warns(UserWarning, match="too odd"):
        as_generate("llama", mixed_prompts(2), NEW_TOKENS, {"steps_per_sync": 2})
    assert graphs[0].steps == 0


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"do_sample": True, "top_k": 5, "temperature": 1.5, "min_new_tokens": 3},
        {"do_sample": True, "top_p": 0.7, "min_p": 0.02, "num_return_sequences": 3},
        {"do_sample": True, "repetition_penalty": 1.4, "min_new_tokens": 4},
    ],
)
def test_sampled_tokens_depend_on_the_seed_alone(
    options: dict[str, Any], watched: list[Any], graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Picked on the device: however many steps are on their way, whatever shares a step, with graphs and without."""
    monkeypatch.setattr("hf_batchllm.sampling.token_picking.why_picked_by_host", lambda *_, **__: None)
    prompts = mixed_prompts(2)
    options |= {"max_new_tokens": NEW_TOKENS, "eos_token_id": [3, 4, 5, 6]}
    configs: list[dict[str, Any]] = [
        {},
        {"steps_per_sync": 4},
        {"steps_per_sync": 3, "share_prefixes": False, "page_size": 4},
        {"max_batch_tokens": 40, "scheduler": "fifo"},
    ]
    seeded = [answers("llama", prompts, config, seed=5, **options) for config in configs]
    assert all(result.token_ids == seeded[0].token_ids for result in seeded)
    assert graphs[0].steps > 0
    other = answers("llama", prompts, seed=6, **options)
    assert other.token_ids != seeded[0].token_ids
    if "num_return_sequences" in options:
        assert len({tuple(row) for row in seeded[0].token_ids[:3]}) > 1


def test_logits_that_are_no_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.sampling.token_picking.why_picked_by_host", lambda *_, **__: None)
    model = build("llama")
    generator = BatchGenerator(model, steps_per_sync=4)
    with (
        model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * float("nan")),
        pytest.raises(RuntimeError, match="not numbers"),
        pytest.warns(UserWarning, match="without CUDA graphs"),
    ):
        generator.generate(mixed_prompts(1), do_sample=True, max_new_tokens=5)
    assert len(generator.generate(mixed_prompts(1), max_new_tokens=2)) == len(mixed_prompts(1))


# -- what changes between two calls, and between two results --------------------------------------------------------

SCALE = 1.0
SETTINGS = {"mlp": {"scale": 1.0}}


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
        held = self.held.scales[1][0] * self.number * self.scale * SETTINGS["mlp"]["scale"]
        return self.inner(hidden) * held * from_beside() * Settings.scale * READ()


CHANGES: dict[str, Callable[[Scaled, pytest.MonkeyPatch], object]] = {
    "a number": lambda module, patch: setattr(module, "number", 0.2),
    "an object": lambda module, patch: module.held.scales[1].__setitem__(0, 0.2),
    "its class": lambda module, patch: patch.setattr(Scaled, "scale", 0.2),
    "another class": lambda module, patch: patch.setattr(Settings, "scale", 0.2),
    "its file": lambda module, patch: patch.setattr(sys.modules[__name__], "SCALE", 0.2),
    "a dictionary": lambda module, patch: patch.setitem(SETTINGS["mlp"], "scale", 0.2),
    "a closure": lambda module, patch: PUT(READ() * 0.2),
}


def replace_weights(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


@pytest.mark.some_cases
@pytest.mark.parametrize("change", CHANGES)
def test_the_next_call_runs_what_custom_code_reads_by_then(
    change: str, graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = FAMILIES["llama"]()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    prompts, options = mixed_prompts(2), {"max_new_tokens": NEW_TOKENS}
    generator = BatchGenerator(model, steps_per_sync=2)
    before = generator.generate(prompts, **options)
    CHANGES[change](model.model.layers[0].mlp, monkeypatch)
    after = generator.generate(prompts, **options)
    assert all(each.steps for each in graphs[:2]), "custom code is captured, too"
    assert before.token_ids != after.token_ids == answers(model, prompts, {"cuda_graphs": False}, **options).token_ids


MOVED: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "weights": replace_weights,
    "there and back": lambda model: model.double().float(),
}


def ending_early(model: Any) -> tuple[list[list[int]], int]:
    """Prompts, and a token that ends one answer when a graph has been replayed, and the others not for a while."""
    rng = random.Random(3)
    prompts = [[rng.randrange(1, 97) for _ in range(4)] for _ in range(7)]
    rows = answers(model, prompts, {"cuda_graphs": False}, max_new_tokens=30).token_ids
    for token in set().union(*rows):
        first, second, *_ = sorted(row.index(token) if token in row else len(row) for row in rows)
        if 10 <= first <= 16 and second - first > 10:
            return prompts, token
    raise AssertionError("no such token")


def stream_of(model: Any) -> Any:
    prompts, token = ending_early(model)
    return BatchGenerator(model, steps_per_sync=2).stream(prompts, max_new_tokens=30, eos_token_id=token)


@pytest.mark.parametrize("change", MOVED)
def test_graphs_are_of_weights_where_they_are(
    change: str, graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = FAMILIES["llama"]()
    stream = stream_of(model)
    next(stream)
    assert graphs[-1].steps
    before = set(map(id, graphs[-1]._graphs.values()))
    replayed = replays_noted(monkeypatch)
    MOVED[change](model)
    list(stream)
    assert bool(before & set(replayed)) == (change == "nothing")


def test_a_stream_that_leaves_inference_mode() -> None:
    stream = stream_of(build("llama"))
    with torch.inference_mode():
        next(stream)
    assert len(list(stream)) == 6


def test_a_call_that_hands_out_nothing_on_the_way_compares_the_model_with_nothing(
    graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldMemory, "is_in_use", lambda *_, **__: pytest.fail("this takes milliseconds"))
    prompts, token = ending_early(build("llama"))
    answers("llama", prompts, {"steps_per_sync": 2}, max_new_tokens=30, eos_token_id=token)
    assert graphs[-1].steps
