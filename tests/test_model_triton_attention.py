"""The engine over the kernels' work lists: the same tokens, with the kernels' references and under the interpreter."""

from __future__ import annotations

import copy
import os
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_attention_references import REFERENCES
from support_attention_references import references as references  # a fixture
from support_families import build, family_params, random_prompts
from support_kernels import INTERPRETED
from support_parity import KINDS_OF_ATTENTION, assert_parity, each_config_with_some, mixed_prompts, pages_of_memory
from support_parity import watched as watched  # a fixture

from hf_batchllm import BatchGenerator, ConfigError
from hf_batchllm.model.attention.triton_attention import SHORT_CHUNK
from hf_batchllm.model.batch_builder import BatchBuilder
from hf_batchllm.planning.requests_and_prefixes import Request
from hf_batchllm.planning.step import Chunk, Step

NEW_TOKENS = 8
# All that a kernel sees of a family: heads, dims, windows, caps, sinks. test_generator_parity.py runs every family, and
# on a GPU test_engine_gpu.py runs every family over the kernels.
SHAPES_OF_ATTENTION = [
    *KINDS_OF_ATTENTION,
    "gemma3",
    "gemma4",
    "laguna",
    "longcat_flash",
    "mimo_v2_flash",
    "gpt_bigcode",
]
GATES_AND_CONFIGS: list[tuple[tuple[float, float], dict[str, Any]]] = [
    ((0, 0), {"page_size": 1, "max_batch_tokens": 7}),
    ((float("inf"), 0), {"page_size": 8, "max_batch_tokens": 23}),
    ((10, 5), {"page_size": 64, "scheduler": "fifo", "max_batch_tokens": 31}),
    ((0, 0), {"page_size": 4, "share_prefixes": False}),
]


def generate(family: str, prompts: list[list[int]], new_tokens: int = NEW_TOKENS, **config: Any) -> Any:
    with BatchGenerator(build(family), **config) as generator:
        return generator.generate(prompts, max_new_tokens=new_tokens, progress=False)


@pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")
class TestWithReferences:
    @pytest.mark.some_cases
    @pytest.mark.parametrize("family", family_params(SHAPES_OF_ATTENTION))
    def test_every_shape_of_attention_gives_the_tokens_of_generate(
        self, family: str, watched: list[Any], references: dict[str, Any]
    ) -> None:
        prompts = mixed_prompts(3)
        result = generate(family, prompts, page_size=16, min_shared_tokens=1)
        assert_parity(family, prompts, result, NEW_TOKENS)
        items = [work.items[tile] for work in references["lists"] for tile in work.items]
        assert any((some[:, 1] > 1).any() for some in items), "no prefix was read together"
        assert all(cache.free_pages == cache.num_pages for cache in watched)

    @pytest.mark.some_cases
    @pytest.mark.parametrize(("family", "gates_and_config"), each_config_with_some(GATES_AND_CONFIGS, 1))
    def test_gates_budgets_and_page_sizes_change_nothing(
        self, family: str, gates_and_config: Any, watched: list[Any], references: dict[str, Any]
    ) -> None:
        references["gates"], config = gates_and_config
        prompts = mixed_prompts(2)
        assert_parity(family, prompts, generate(family, prompts, **config), NEW_TOKENS)

    @pytest.mark.parametrize("family", family_params(["gpt_oss"]))
    def test_preemption_changes_nothing(self, family: str, watched: list[Any], references: dict[str, Any]) -> None:
        rng = random.Random(2)
        prompts = [prompt for kind in ("nested", "distinct") for prompt in random_prompts(rng, 97, kind, 8)]
        memory = pages_of_memory(build(family), 20, 8)
        generator = BatchGenerator(build(family), kv_memory=memory, page_size=8, min_shared_tokens=1)
        result = generator.generate(prompts, max_new_tokens=40, eos_token_id=1000, progress=False)
        assert result.report.preemptions > 0
        assert_parity(family, prompts, result, 40)

    def test_kept_prefixes_are_read_by_later_calls(self, watched: list[Any], references: dict[str, Any]) -> None:
        prompts = random_prompts(random.Random(4), 97, "prefix", 6)
        with BatchGenerator(build("llama"), keep_prefixes=4, page_size=16, min_shared_tokens=1) as generator:
            for _ in range(2):
                result = generator.generate(prompts, max_new_tokens=NEW_TOKENS, progress=False)
                assert_parity("llama", prompts, result, NEW_TOKENS)

    def test_a_layer_that_the_kernels_cannot_do_runs_in_torch_and_says_so(self, references: dict[str, Any]) -> None:
        """Once, at the caller's line."""
        references["kernels"] = replace(REFERENCES, unsupported=lambda *shape: "heads of these dims are too odd")
        prompts = mixed_prompts(2)
        with pytest.warns(UserWarning, match="LlamaAttention runs in plain PyTorch.*too odd") as warned:
            result = BatchGenerator(build("llama"), page_size=16).generate(prompts, max_new_tokens=NEW_TOKENS)
        assert [Path(each.filename).name for each in warned] == [Path(__file__).name]
        assert_parity("llama", prompts, result, NEW_TOKENS)
        assert not references["lists"]

    def test_each_shape_is_asked_about(self, references: dict[str, Any]) -> None:
        """Layers of one model may have different heads: what is true of one says nothing of another."""
        asked: list[tuple[Any, ...]] = []

        def unsupported(*shape: Any) -> str | None:
            asked.append(shape)
            return "odd" if len(asked) == 1 else None

        references["kernels"] = replace(REFERENCES, unsupported=unsupported)
        prompts = mixed_prompts(1)
        with pytest.warns(UserWarning, match="odd"):
            result = generate("laguna", prompts, page_size=16)
        assert len(asked) == len(set(asked)) > 1
        assert references["lists"]
        assert_parity("laguna", prompts, result, NEW_TOKENS)

    def test_short_chunks_are_run_beside_the_decode_rows(
        self, monkeypatch: pytest.MonkeyPatch, references: dict[str, Any]
    ) -> None:
        """Suffixes of a few tokens behind one prefix: their rows read it together, and each sees only what it may."""
        rng = random.Random(3)
        prefix = [rng.randrange(3, 97) for _ in range(40)]
        prompts = [prefix + [rng.randrange(3, 97) for _ in range(size)] for size in (1, 2, 5, 16, 3, 30)]
        chunked: list[int] = []
        attend_chunks = REFERENCES.attend_chunks

        def noted_chunks(q: Any, k: Any, v: Any, out: Any, work: Any, *rest: Any, **options: Any) -> None:
            chunked.append(int(work.items[: int(work.count), 1].sum()))
            attend_chunks(q, k, v, out, work, *rest, **options)

        references["kernels"] = replace(REFERENCES, attend_chunks=noted_chunks)
        result = generate("llama", prompts, page_size=16, min_shared_tokens=1)
        assert_parity("llama", prompts, result, NEW_TOKENS)
        first = references["lists"][0]
        assert first.causal and first.rows == 27  # 1 + 2 + 5 + 16 + 3
        assert set(chunked) == {40 + 30}
        assert SHORT_CHUNK == 16


@pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")
def test_short_chunks_stand_first_and_sample_in_their_order() -> None:
    requests = []
    for index, size in enumerate((30, 4, 25, 7)):
        requests.append(Request(index, np.arange(size) + 100 * index, 5))
        requests[-1].pages = list(range(2 * index, 2 * index + 2))
    step = Step([], [Chunk(request, 0, request.length) for request in requests])
    batch = BatchBuilder(16, short_chunk=SHORT_CHUNK).build(step)
    assert [span.end - span.begin for span in batch.attention.spans] == [4, 7, 30, 25]
    assert batch.tokens.logits_rows.tolist() == [40, 3, 65, 10], "in the order of the step"
    assert batch.tokens.input_ids[batch.tokens.logits_rows].tolist() == [29, 103, 224, 306]
    assert batch.attention.slots[batch.tokens.logits_rows].tolist() == [29, 35, 88, 102]
    assert batch.attention.positions[:5].tolist() == [0, 1, 2, 3, 0]


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_the_kernels_are_refused_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="cannot be used: the Triton kernels need a CUDA GPU, and"):
        BatchGenerator(build("llama"), backend="triton")


@pytest.mark.some_cases
@pytest.mark.skipif(not INTERPRETED, reason="is run by test_kernels_interpreted")
@pytest.mark.parametrize("family", family_params(["gpt_oss", "deepseek_v3"]))
def test_kernels_interpreted_kernels_give_the_tokens_of_generate(family: str, watched: list[Any]) -> None:
    prompts = [[*range(5, 24), *last] for last in ([30], [40, 41])]  # the interpreter takes seconds for each
    result = generate(family, prompts, 2, page_size=16, min_shared_tokens=1, backend="triton")
    assert_parity(family, prompts, result, 2)


@pytest.mark.skipif(not INTERPRETED, reason="is run by test_kernels_interpreted")
def test_a_page_size_that_the_kernels_cannot_do_is_refused() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    with pytest.raises(ConfigError, match="`page_size` of 16, 32, 64 or 128, not 100"):
        BatchGenerator(build("llama"), backend="triton", page_size=100)


@pytest.mark.skipif(not INTERPRETED, reason="is run by test_kernels_interpreted")
def test_bfloat16_is_not_run_under_the_interpreter() -> None:
    """It would multiply the bits, and give other tokens without a word."""
    prompts, tokens = [[5, 6, 7, 8] * 6 + [last] for last in range(3)], []
    for backend in ("torch", "triton"):
        model = copy.deepcopy(build("llama")).to(torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = BatchGenerator(model, backend=backend, page_size=16).generate(prompts, max_new_tokens=4)
        tokens.append(result.token_ids)
    assert tokens[0] == tokens[1]
