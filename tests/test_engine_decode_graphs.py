"""Decode steps at fixed addresses: what a captured graph reads is filled anew for each step.

Without a GPU nothing is captured; the step is run once more in its place, over the same memory.
"""

from __future__ import annotations

from typing import Any

import pytest
from support_attention_twins import TWINS
from support_decode_graphs import captured as captured  # a fixture
from support_decode_graphs import graphs as graphs  # a fixture
from support_families import build
from support_kernels import plain
from support_parity import assert_parity, each_config_with_some, mixed_prompts
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import DecodeRows, RowsWork
from hf_batchllm.engine.device_loop.graph_sizes import size_of
from hf_batchllm.model.triton_attention import AttentionKernels

pytestmark = plain
NEW_TOKENS = 12


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("family", "page_size_and_steps"), each_config_with_some([(4, 3), (4, 16), (16, 8), (16, 3)], 2)
)
def test_tokens_are_those_of_generate(
    family: str, page_size_and_steps: tuple[int, int], watched: list[Any], graphs: list[DecodeGraphs]
) -> None:
    page_size, steps = page_size_and_steps
    prompts = mixed_prompts(3)
    generator = BatchGenerator(build(family), steps_per_sync=steps, page_size=page_size, min_shared_tokens=1)
    result = generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False)
    assert_parity(family, prompts, result, NEW_TOKENS)
    assert len(graphs[0]._graphs) == 0, "they are gone with the call"
    assert graphs[0].steps > 3
    assert all(cache.free_pages == cache.num_pages for cache in watched)


def test_rows_that_leave_are_idle_in_the_graph_that_there_is(
    watched: list[Any], graphs: list[DecodeGraphs], captured: list[DecodeRows]
) -> None:
    prompts = mixed_prompts(5)
    generator = BatchGenerator(build("llama"), steps_per_sync=2, page_size=16)
    plain_result = BatchGenerator(build("llama"), steps_per_sync=1, cuda_graphs=False)
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": list(range(0, 97, 9)), "progress": False}
    result = generator.generate(prompts, **options)
    assert result.token_ids == plain_result.generate(prompts, **options).token_ids
    rows = [graph.rows for graph in captured]
    assert 1 < len(rows) < 8, rows
    assert max(rows) <= size_of(len(prompts))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_none_outlives_its_call(
    error: type[BaseException],
    graphs: list[DecodeGraphs],
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
    with BatchGenerator(build("llama"), steps_per_sync=2) as generator, pytest.raises(error) as kept:
        generator.generate(mixed_prompts(2), max_new_tokens=40, progress=False)
    assert kept.value is not None
    assert captured and not any(graph.captured for graph in captured)


def test_few_steps_are_not_worth_a_graph(graphs: list[DecodeGraphs]) -> None:
    prompts = mixed_prompts(2)
    BatchGenerator(build("llama"), steps_per_sync=2).generate(prompts, max_new_tokens=4, progress=False)
    assert graphs[0].steps == 0


def test_lists_that_do_not_fit_get_more_room(
    graphs: list[DecodeGraphs], captured: list[DecodeRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As little room as the first burst needs: later ones read more pages."""
    made = RowsWork.__init__
    monkeypatch.setattr(RowsWork, "__init__", lambda self, state, entries, *rest: made(self, state, 0, *rest))
    monkeypatch.setattr("hf_batchllm.engine.device_loop.decode_rows._ROOM_TO_GROW", 1.0)
    prompts = mixed_prompts(2)
    generator = BatchGenerator(build("llama"), steps_per_sync=2, page_size=4)
    result = generator.generate(prompts, max_new_tokens=30, progress=False)
    assert_parity("llama", prompts, result, 30)
    rows = [graph.rows for graph in captured]
    assert len(rows) > len(set(rows)), "one was made again, with more room"


def test_an_error_of_the_model_is_no_want_of_room(graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: DecodeRows) -> None:
        raise ValueError("of the model's own")

    monkeypatch.setattr(DecodeRows, "run", run)
    with pytest.raises(ValueError, match="the model's own"):
        BatchGenerator(build("llama"), steps_per_sync=2).generate(mixed_prompts(1), max_new_tokens=12, progress=False)


def test_hooks_are_called_in_every_step(graphs: list[DecodeGraphs]) -> None:
    """A replay would skip them."""
    model, prompts = build("llama"), mixed_prompts(2)
    calls: list[int] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    generator = BatchGenerator(model, steps_per_sync=2)
    try:
        with pytest.warns(UserWarning, match=r"without CUDA graphs.*hooks on `model.layers.1.mlp` would not be called"):
            result = generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False)
    finally:
        handle.remove()
    assert_parity("llama", prompts, result, NEW_TOKENS)
    assert graphs[0].steps == 0
    assert len(calls) == result.report.steps
    assert generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False).token_ids == result.token_ids
    assert graphs[1].steps > 0


def test_layers_that_the_kernels_cannot_do_are_not_captured(
    graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    unsupported = AttentionKernels(**(vars(TWINS) | {"unsupported": lambda *shape: "too odd"}))
    monkeypatch.setattr("support_decode_graphs.TWINS", unsupported)
    prompts = mixed_prompts(2)
    with pytest.warns(UserWarning, match="too odd"):
        result = BatchGenerator(build("llama"), steps_per_sync=2).generate(
            prompts, max_new_tokens=NEW_TOKENS, progress=False
        )
    assert_parity("llama", prompts, result, NEW_TOKENS)
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
    options |= {"max_new_tokens": NEW_TOKENS, "eos_token_id": [3, 4, 5, 6], "progress": False}
    configs: list[dict[str, Any]] = [
        {},
        {"steps_per_sync": 4},
        {"steps_per_sync": 3, "share_prefixes": False, "page_size": 4},
        {"max_batch_tokens": 40, "scheduler": "fifo"},
    ]
    seeded = [BatchGenerator(build("llama"), **config).generate(prompts, seed=5, **options) for config in configs]
    assert all(result.token_ids == seeded[0].token_ids for result in seeded)
    assert graphs[0].steps > 0
    other = BatchGenerator(build("llama")).generate(prompts, seed=6, **options)
    assert other.token_ids != seeded[0].token_ids
    if "num_return_sequences" in options:
        assert len({tuple(row) for row in seeded[0].token_ids[:3]}) > 1


def test_logits_that_are_no_numbers_are_an_error(graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.sampling.token_picking.why_picked_by_host", lambda *_, **__: None)
    model = build("llama")
    generator = BatchGenerator(model, steps_per_sync=4)
    handle = model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * float("nan"))
    try:
        with pytest.raises(RuntimeError, match="not numbers"), pytest.warns(UserWarning, match="without CUDA graphs"):
            generator.generate(mixed_prompts(1), do_sample=True, max_new_tokens=5, progress=False)
    finally:
        handle.remove()
    assert len(generator.generate(mixed_prompts(1), max_new_tokens=2, progress=False)) == len(mixed_prompts(1))
