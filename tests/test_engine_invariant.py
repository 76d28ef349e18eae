"""invariant=True: before the same bits are promised it is tried whether steps give them; and how a GPU's loop does.

That loop, with decode rows at fixed addresses, runs over the references of the kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support_calls import answers, failing, noted
from support_device_loop import run_over_references
from support_families import build
from support_fuzz_calls import multiply_in_blocks
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_batchllm import BatchGenerator, UnsupportedModelError
from hf_batchllm.engine import invariance_trial
from hf_batchllm.engine.device_loop.decode_graphs import DecodeGraphs
from hf_batchllm.engine.device_loop.decode_rows import RowsWork
from hf_batchllm.kernels.lists.fixed_lists import FIXED_TILES
from hf_batchllm.model.attention.fixed_attention import FixedAttention
from hf_batchllm.model.attention.fixed_passes import ROWS, WIDE_ROWS
from hf_batchllm.model.attention.fixed_triton_attention import FixedTritonBackend
from hf_batchllm.model.batch import Copies
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.model.unsplit_products import unsplit
from hf_batchllm.patches import fixed_forwards

PROMPT = [[1, 2, 3]]
INVARIANT = {"invariant": True}


def steps_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step from now on."""
    return noted(monkeypatch, ModelRunner, "step", lambda self, batch, *_: len(batch.attention.positions))


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_a_model_is_tried_once(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = copy.deepcopy(build("mixtral")), steps_of(monkeypatch)
    counts = []
    for _ in range(2):  # generators
        with BatchGenerator(model, invariant=True, page_size=page_size) as gen:
            for _ in range(2):
                gen.generate(PROMPT, max_new_tokens=2)
                counts.append(len(rows))
    assert counts == [14, 16, 18, 20]  # the steps of the trial, then two of each call
    assert rows[:12] == [9, 43, 1, *[32] * 9]
    answers(model, PROMPT, {"page_size": page_size}, max_new_tokens=2)
    assert len(rows) == 22


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_what_is_tried_on_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with the passes of a CPU: the sequence has keys for several parts, and its last tokens come in pieces."""
    model, rows = copy.deepcopy(build(family)), steps_of(monkeypatch)
    monkeypatch.setattr(invariance_trial, "_ON_CPU", replace(invariance_trial._ON_GPU, beside=(3, 9)))
    answers(model, PROMPT, INVARIANT, max_new_tokens=2)
    assert rows[:6] == [300, 2 * 300 + 8, 3 * 300 + 6 * 8, 2, 7, 70]
    assert rows[6:21] == list(invariance_trial._ON_GPU.single)


def off_in_one_row(
    monkeypatch: pytest.MonkeyPatch, size: int, place: int, is_asked: Callable[[torch.Tensor], bool] = lambda row: True
) -> None:
    """Attention gives the numbers of a row other last bits, in passes of this size: at one place, for some rows."""
    own = FixedAttention.attend

    def attend(self: FixedAttention, call: Any) -> torch.Tensor:
        made = own(self, call)
        if len(made) == size and is_asked(call.q[place]):
            made[place] = made[place].nextafter(torch.tensor(torch.inf))
        return made

    monkeypatch.setattr(FixedAttention, "attend", attend)


@pytest.mark.parametrize("place", range(ROWS))
def test_each_place_of_a_pass_is_tried(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer()
    off_in_one_row(monkeypatch, ROWS, place)
    with BatchGenerator(model, invariant=True) as gen:
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM gave other bits .* than alone"):
                gen.generate(PROMPT, max_new_tokens=2)
        monkeypatch.undo()
        assert len(gen.generate(PROMPT, max_new_tokens=2)[0].token_ids) == 2


def test_each_place_is_tried_with_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place may matter for few numbers: here for one of the tokens alone, and not for the last one."""
    model, queries = one_layer(), dict[bytes, torch.Tensor]()
    own = FixedAttention.attend

    def attend(self: FixedAttention, call: Any) -> torch.Tensor:
        queries.update({row.numpy().tobytes(): row for row in call.q[: self.end - self.begin]})
        return own(self, call)

    with monkeypatch.context() as patch:
        patch.setattr(FixedAttention, "attend", attend)
        answers(model, PROMPT, INVARIANT, max_new_tokens=1)
    assert len(queries) > 9
    first = next(iter(queries.values()))
    off_in_one_row(monkeypatch, ROWS, 29, lambda row: torch.equal(row, first))
    with pytest.raises(UnsupportedModelError, match="gave other bits at another place of a step than alone"):
        answers(copy.deepcopy(model), PROMPT, INVARIANT, max_new_tokens=1)


@pytest.mark.some_cases
@pytest.mark.parametrize("place", range(WIDE_ROWS))
def test_each_place_of_a_wide_pass_is_tried(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer()
    monkeypatch.setattr(invariance_trial, "_WIDE_FROM", 0)
    off_in_one_row(monkeypatch, WIDE_ROWS, place)
    with pytest.warns(UserWarning, match=f"passes of {ROWS} rows here.* LlamaForCausalLM gave other bits"):
        answers(model, PROMPT, INVARIANT, max_new_tokens=1)


def one_layer() -> Any:
    """What attention gives reaches the logits alone: there are no later keys."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
        return LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).eval()


@pytest.mark.parametrize("seed", [3, 6, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_heads_of_ten_channels(dtype: torch.dtype, seed: int) -> None:
    """How their products add up may depend on where rows begin in memory: 40 bytes lie between them."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        sizes = {"n_embd": 40, "n_head": 4, "n_layer": 2, "vocab_size": 103, "n_positions": 256}
        ends = {"bos_token_id": 0, "eos_token_id": 1}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, initializer_range=0.3)).to(dtype).eval()
    dice = torch.Generator().manual_seed(1)
    prompts = [torch.randint(103, (count,), generator=dice).tolist() for count in (103, 57, 103, 12, 33, 103)]
    asked: dict[str, Any] = {"max_new_tokens": 1, "prompt_logprobs": 0}
    with BatchGenerator(model, invariant=True) as gen:
        try:
            together = gen.generate(prompts, **asked)
        except UnsupportedModelError:
            return  # as well: the trial has seen it
        for place, prompt in enumerate(prompts):
            assert gen.generate([prompt], **asked)[0].prompt_logprobs == together[place].prompt_logprobs


# -- in a GPU's loop -------------------------------------------------------------------------------------------


def on_a_gpu(patch: pytest.MonkeyPatch, in_blocks: bool = False) -> None:
    """And no model is tried. ``in_blocks``: products give a row the same bits at every place."""
    run_over_references(patch)
    if in_blocks:
        multiply_in_blocks(patch)
    patch.setattr("hf_batchllm.engine.look.refuse_by_trial", lambda *_: None)


@pytest.mark.parametrize("prepared", [True, False])
def test_many_rows_on_one_prefix(prepared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of all sizes: what is shared is read by 80 rows, then by fewer, each of which has some of its own."""
    on_a_gpu(monkeypatch, in_blocks=True)
    tiles: set[int] = set()
    own = RowsWork.load

    def load(self: RowsWork, step: Any) -> None:
        own(self, step)
        tiles.update(tile for room in self.rooms for tile in room.items)

    monkeypatch.setattr(RowsWork, "load", load)
    shared = [7 * place % 97 for place in range(256)]
    prompts = [[*shared, place % 90, place // 90, 3] for place in range(80)]
    lengths = [3 + place % 8 for place in range(80)]
    config: dict[str, Any] = {"invariant": True, "page_size": 16, "steps_per_sync": 8 if prepared else 2}
    with BatchGenerator(build("llama"), **config) as generator:
        options: dict[str, Any] = {"logprobs": 0}
        every = list(generator.generate(prompts, max_new_tokens=10, **options))
        for place in (0, 33, 79):
            (alone,) = generator.generate([prompts[place]], max_new_tokens=lengths[place], **options)
            assert alone.token_ids == every[place].token_ids[: lengths[place]]
            assert alone.logprobs == every[place].logprobs[: lengths[place]]
    assert tiles >= {FIXED_TILES[0], FIXED_TILES[-1]}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_prompts_foretell_the_work_of_decode_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured before rows first decode, with a kernel for each kind of work that these have, no more."""
    on_a_gpu(monkeypatch, in_blocks=True)
    seen: list[dict[Any, set[int]]] = []
    made: list[dict[Any, set[int]]] = []
    own_step, own_load = ModelRunner.step, RowsWork.load

    def step(self: ModelRunner, batch: Any, *latest: Any) -> Any:
        logits = own_step(self, batch, *latest)
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
    prompts = [[*shared, *([place % 90] * 16), 3] for place in range(48)]
    config = INVARIANT | {"page_size": 16, "steps_per_sync": 8, "max_batch_tokens": 4096}
    answers(family, prompts, config, max_new_tokens=12)
    assert seen and made[-1]
    for key, tiles in made[-1].items():
        assert seen[0][key] == tiles == seen[-1][key]


@pytest.mark.parametrize("memory", [None, 18])
@pytest.mark.parametrize("device_loop", [True, False])
def test_prefixes_that_end_in_the_midst_of_a_page(
    device_loop: bool, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of them in one page: what is copied has itself been copied, in the same step or in an earlier one."""
    if device_loop:
        on_a_gpu(monkeypatch, in_blocks=True)
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
    options: dict[str, Any] = {"max_new_tokens": 8, "logprobs": 0}
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
    on_a_gpu(monkeypatch)
    rows = noted(monkeypatch, DecodeGraphs, "_make", lambda self, kind: kind.rows)
    prompts = [[5, 6, 7], [8, 9]]
    with BatchGenerator(build("llama"), invariant=invariant, page_size=16) as generator:
        alone, *_ = generator.generate(prompts[:1], max_new_tokens=20)
        assert set(rows) == {2 if invariant else 1}
        both = generator.generate(prompts, max_new_tokens=20)
    assert both[0].token_ids == alone.token_ids and len(alone.token_ids) == 20


def test_memory_runs_out_while_sums_may_not_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is run again, in smaller parts, within the block that forbids it."""
    on_a_gpu(monkeypatch)
    library: list[Any] = [torch._C._BlasBackend.Cublas]
    monkeypatch.setattr(
        torch.backends.cuda, "preferred_blas_library", lambda *one: (library.extend(one), library[-1])[1]
    )
    monkeypatch.setattr(FixedTritonBackend, "products", lambda self: unsplit())
    prompts = [[5, 6, 7, 8, *[11 + place] * (2 + place % 4)] for place in range(6)]
    options: dict[str, Any] = {"max_new_tokens": 5}
    with BatchGenerator(build("llama"), invariant=True, page_size=16) as generator:
        expected = generator.generate(prompts, **options).token_ids
        steps = failing(monkeypatch, ModelRunner, "forward", {1, 4}, torch.OutOfMemoryError("CUDA out of memory"))
        with pytest.warns(UserWarning, match="ran out of memory"):
            assert generator.generate(prompts, **options).token_ids == expected
    assert library[-1] == torch._C._BlasBackend.Cublas and steps[0] > 4


def test_each_product_is_one_of_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's are not, and a row alone would be added up in another order."""
    on_a_gpu(monkeypatch)
    model, prompts = copy.deepcopy(build("gpt2")), [[5, 6, 7, 8, 9], [5, 6, 7, 8], [3]]
    products = {each for each in model.modules() if isinstance(each, Conv1D)}
    seen = noted(monkeypatch, fixed_forwards, "_linear", lambda module, x: module)
    result = answers(model, prompts, INVARIANT | {"page_size": 16}, max_new_tokens=6)
    assert set(seen) == products and len(products) > 4
    assert not any("forward" in module.__dict__ for module in products)
    for prompt, row in zip(prompts, result, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert [*prompt, *row.token_ids] == expected[0].tolist()
