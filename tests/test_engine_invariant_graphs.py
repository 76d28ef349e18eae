"""invariant=True in a GPU's loop: decode rows at fixed addresses, over the twins of the kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support_device_loop import run_over_twins
from support_families import build
from support_fuzz_calls import multiply_in_blocks
from transformers.pytorch_utils import Conv1D

from hf_batchllm import BatchGenerator
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import RowsWork
from hf_batchllm.kernels.fixed_lists import FIXED_TILES
from hf_batchllm.model.batch import Copies
from hf_batchllm.model.fixed_triton_attention import FixedTritonBackend
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.patches import fixed_forwards


@pytest.mark.parametrize("prepared", [True, False])
def test_many_rows_on_one_prefix(prepared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of all sizes: what is shared is read by 80 rows, then by fewer, each of which has some of its own."""
    run_over_twins(monkeypatch)
    multiply_in_blocks(monkeypatch)
    monkeypatch.setattr("hf_batchllm.engine.call.refuse_by_trial", lambda *_: None)
    tiles: set[int] = set()
    own = RowsWork.load

    def load(self: RowsWork, step: Any) -> None:
        own(self, step)
        tiles.update(tile for room in self.rooms for tile in room.items)

    monkeypatch.setattr(RowsWork, "load", load)
    shared = [7 * place % 97 for place in range(256)]
    prompts = [[*shared, place % 90, place // 90, 3] for place in range(80)]
    lengths = [3 + place % 20 for place in range(80)]
    config: dict[str, Any] = {"invariant": True, "page_size": 16, "steps_per_sync": 8 if prepared else 2}
    with BatchGenerator(build("llama"), **config) as generator:
        options: dict[str, Any] = {"logprobs": 0, "progress": False}
        every = list(generator.generate(prompts, max_new_tokens=24, **options))
        for place in (0, 33, 79):
            (alone,) = generator.generate([prompts[place]], max_new_tokens=lengths[place], **options)
            assert alone.token_ids == every[place].token_ids[: lengths[place]]
            assert alone.logprobs == every[place].logprobs[: lengths[place]]
    assert tiles >= {FIXED_TILES[0], FIXED_TILES[-1]}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_prompts_foretell_the_work_of_decode_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured before rows first decode, with a kernel for each kind of work that these have, no more."""
    run_over_twins(monkeypatch)
    multiply_in_blocks(monkeypatch)
    monkeypatch.setattr("hf_batchllm.engine.call.refuse_by_trial", lambda *_: None)
    seen: list[dict[Any, set[int]]] = []
    made: list[dict[Any, set[int]]] = []
    own_step, own_load = ModelRunner.step, RowsWork.load

    def step(self: ModelRunner, batch: Any) -> Any:
        logits = own_step(self, batch)
        if len(batch.attention.positions) > 100:  # prompts
            seen.append({key: set(kinds.tiles) for key, kinds in self.backend.work_seen.items()})
        return logits

    def load(self: RowsWork, step: Any) -> None:
        own_load(self, step)
        made.append(
            {key: {tile for tile, items in room.items.items() if len(items)} for key, room in self._rooms.items()}
        )

    monkeypatch.setattr(ModelRunner, "step", step)
    monkeypatch.setattr(RowsWork, "load", load)
    shared = [7 * place % 97 for place in range(512)]
    prompts = [[*shared, *([place % 90] * 40), 3] for place in range(48)]
    with BatchGenerator(
        build(family), invariant=True, page_size=16, steps_per_sync=8, max_batch_tokens=4096
    ) as generator:
        generator.generate(prompts, max_new_tokens=12, progress=False)
    assert seen and made[-1]
    for key, tiles in made[-1].items():
        assert seen[0][key] == tiles == seen[-1][key]


@pytest.mark.parametrize("memory", [None, 18])
@pytest.mark.parametrize("on_a_gpu", [True, False])
def test_prefixes_that_end_in_the_midst_of_a_page(
    on_a_gpu: bool, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of them in one page: what is copied has itself been copied, in the same step or in an earlier one."""
    if on_a_gpu:
        run_over_twins(monkeypatch)
        multiply_in_blocks(monkeypatch)
        monkeypatch.setattr("hf_batchllm.engine.call.refuse_by_trial", lambda *_: None)
    copied: list[int] = []
    own = Copies.run

    def run(self: Copies, cache: torch.Tensor) -> None:
        own(self, cache)
        assert not cache[self.target].isnan().any()
        copied.append(len(self.target))

    monkeypatch.setattr(Copies, "run", run)
    start = [7 * place % 97 for place in range(70)]
    below, above = (
        [[*start, *range(5)], [*start, *range(9, 0, -1)]],
        [[*start, *range(5), 60 + end] for end in range(3)],
    )
    prompts = [
        [*base, *([end] * 3), last] for base in (start, *below, *above) for end in (40, 41) for last in range(50, 53)
    ]
    config: dict[str, Any] = {"invariant": True, "page_size": 16, "min_shared_tokens": 1, "max_batch_tokens": 48}
    with BatchGenerator(build("llama"), **config) as generator:
        token = generator.architecture.kv_bytes_per_token
    if memory is not None:
        config["kv_memory"] = memory * 16 * token
    options: dict[str, Any] = {"max_new_tokens": 24, "logprobs": 0, "progress": False}
    with BatchGenerator(build("llama"), **config) as generator:
        every = generator.generate(prompts, **options)
        assert every.report.computed_tokens >= every.report.plan.computed_tokens
        for place in range(0, len(prompts), 5):
            (alone,) = generator.generate([prompts[place]], **options)
            assert (alone.token_ids, alone.logprobs) == (every[place].token_ids, every[place].logprobs)
    assert max(copied) > 15


@pytest.mark.parametrize("invariant", [True, False])
def test_a_single_row_has_another_beside_it(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products would be computed with two rows anyway, and a graph has copies for no row."""
    run_over_twins(monkeypatch)
    monkeypatch.setattr("hf_batchllm.engine.call.refuse_by_trial", lambda *_: None)
    rows: list[int] = []
    own = DecodeGraphs._make

    def make(self: DecodeGraphs, kind: Any) -> Any:
        rows.append(kind.rows)
        return own(self, kind)

    monkeypatch.setattr(DecodeGraphs, "_make", make)
    prompts = [[5, 6, 7], [8, 9]]
    with BatchGenerator(build("llama"), invariant=invariant, page_size=16) as generator:
        alone, *_ = generator.generate(prompts[:1], max_new_tokens=20, progress=False)
        assert set(rows) == {2 if invariant else 1}
        both = generator.generate(prompts, max_new_tokens=20, progress=False)
    assert both[0].token_ids == alone.token_ids and len(alone.token_ids) == 20


def test_memory_runs_out_while_sums_may_not_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is run again, in smaller parts, within the block that forbids it."""
    run_over_twins(monkeypatch)
    library: list[Any] = [torch._C._BlasBackend.Cublas]
    monkeypatch.setattr(
        torch.backends.cuda, "preferred_blas_library", lambda *one: (library.extend(one), library[-1])[1]
    )
    monkeypatch.setattr("hf_batchllm.engine.call.refuse_by_trial", lambda *_: None)
    monkeypatch.setattr(FixedTritonBackend, "products", lambda self: self._products.applied())
    prompts = [[5, 6, 7, 8, *[11 + place] * (2 + place % 4)] for place in range(6)]
    options: dict[str, Any] = {"max_new_tokens": 5, "progress": False}
    with BatchGenerator(build("llama"), invariant=True, page_size=16) as generator:
        expected = generator.generate(prompts, **options).token_ids
        own, steps = ModelRunner.forward, list[int]()

        def forward(self: ModelRunner, *given: Any, **named: Any) -> Any:
            steps.append(0)
            if len(steps) in (1, 4):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
            return own(self, *given, **named)

        monkeypatch.setattr(ModelRunner, "forward", forward)
        with pytest.warns(UserWarning, match="ran out of memory"):
            assert generator.generate(prompts, **options).token_ids == expected
    assert library[-1] == torch._C._BlasBackend.Cublas and len(steps) > 4


def test_each_product_is_one_of_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's are not, and a row alone would be added up in another order."""
    run_over_twins(monkeypatch)
    monkeypatch.setattr("hf_batchllm.engine.call.refuse_by_trial", lambda *_: None)
    model, prompts = copy.deepcopy(build("gpt2")), [[5, 6, 7, 8, 9], [5, 6, 7, 8], [3]]
    products, seen, own = [each for each in model.modules() if isinstance(each, Conv1D)], set(), fixed_forwards._linear

    def linear(module: Conv1D, x: torch.Tensor) -> torch.Tensor:
        seen.add(module)
        return own(module, x)

    monkeypatch.setattr(fixed_forwards, "_linear", linear)
    with BatchGenerator(model, invariant=True, page_size=16) as generator:
        result = generator.generate(prompts, max_new_tokens=6, progress=False)
    assert seen == set(products) and len(products) > 4
    assert not any("forward" in module.__dict__ for module in products)
    for prompt, row in zip(prompts, result, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert [*prompt, *row.token_ids] == expected[0].tolist()
