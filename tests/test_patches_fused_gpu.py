"""Fused layers natively: near to float32, replayable from a CUDA graph, and every byte given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_families import family_params
from support_fused import FUSED_FAMILIES, WITH_EXPERTS, Adapter, logits_of_steps, new_model, run, said_of, some_prompts
from support_parity import assert_parity
from transformers import LlamaConfig, LlamaForCausalLM

from hf_batchllm import BatchGenerator
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.patches.attention_interface import ATTENTION_NAME, attention_context
from hf_batchllm.patches.attention_swap import AttentionSwap
from hf_batchllm.patches.fusion import triton_fused_kernels

pytestmark = pytest.mark.gpu


def on_gpu(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return new_model(family).to("cuda", dtype)


@pytest.mark.parametrize("family", family_params(FUSED_FAMILIES))
def test_tokens_and_the_report(family: str) -> None:
    prompts = some_prompts(20, "mixed")
    result = run(on_gpu(family), prompts, 10)
    assert_parity(family, prompts, result, 10)
    assert result.report.fused == said_of(family)
    assert run(on_gpu(family), prompts, 2, fuse=False).report.fused == ""
    assert run(on_gpu(family), prompts, 2, backend="torch").report.fused == ""


def squares_of_errors(
    monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype, count: int
) -> Iterator[torch.Tensor]:  # [rows]
    """Of the logits of ``count`` prompts beside float32, each row's mean: with the model's own layers, and fused."""
    model, prompts = on_gpu(family, dtype), some_prompts(count, "mixed")
    exact = logits_of_steps(monkeypatch, on_gpu(family), prompts, new_tokens=1, fuse=False)
    for fuse in (False, True):
        found = logits_of_steps(monkeypatch, model, prompts, new_tokens=1, fuse=fuse)
        yield torch.cat([a - b for a, b in zip(found, exact, strict=True)]).square().mean(-1)


# Which experts a token is given to may hang on its last bit.
@pytest.mark.parametrize("family", family_params([name for name in FUSED_FAMILIES if name not in WITH_EXPERTS]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_as_near_to_float32_as_ever(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, fused = (float(each.mean().sqrt()) for each in squares_of_errors(monkeypatch, family, dtype, 20))
    assert 0 < fused <= 1.2 * own


@pytest.mark.parametrize("family", family_params(WITH_EXPERTS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_behind_experts_are_as_near_to_float32(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of all rows: those that are given to other experts than in float32 are far off either way."""
    own, fused = (float(each.sqrt().median()) for each in squares_of_errors(monkeypatch, family, dtype, 60))
    assert 0 < fused <= 1.2 * own


@pytest.mark.parametrize("family", family_params(["llama", "qwen3_window", "gemma3", "cohere2", "olmo2"]))
def test_a_step_is_replayed_from_a_graph(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other inputs in the same places it gives what those give."""
    checked, model, step = [], on_gpu(family), ModelRunner.step

    def replayed_too(self: ModelRunner, batch: Any, *latest: Any) -> torch.Tensor:
        logits = step(self, batch, *latest)
        if not len(logits):
            return logits
        batch = batch.to(self.architecture.device)
        for seats in latest:
            seats.fill_in(batch.tokens)
        context, tokens = self.backend.prepare(batch.attention), batch.tokens
        ids = tokens.input_ids.clone()

        def forward() -> torch.Tensor:
            rows = {"logits_to_keep": tokens.logits_rows}
            return model(input_ids=ids[None], position_ids=tokens.position_ids[None], use_cache=False, **rows).logits[0]

        swap = AttentionSwap(model)
        with torch.no_grad(), swap.applied(ATTENTION_NAME), self._fused.applied(), attention_context(context):
            forward()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = forward()
            ids.fill_(7)
            graph.replay()
            sevens = out.clone()
            assert torch.equal(sevens, forward())
            ids.copy_(tokens.input_ids)
            graph.replay()
        assert torch.equal(out, logits) and not torch.equal(sevens, out)
        checked.append(len(ids))
        return logits

    monkeypatch.setattr(ModelRunner, "step", replayed_too)
    run(model, some_prompts(6), 3, max_batch_tokens=9)  # decode rows beside chunks, which run step by step
    assert len(checked) >= 3


def test_merging_takes_no_more_memory_than_a_layer_and_closing_gives_it_back() -> None:
    shape = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=6, vocab_size=1000)).bfloat16()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]], device="cuda"))  # what products of matrices need for themselves
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    layer = sum(each.nbytes for each in model.model.layers[0].parameters())
    with BatchGenerator(model, kv_memory="64MiB") as generator:
        torch.cuda.reset_peak_memory_stats()
        generator._resources.fusion.merge(triton_fused_kernels())
        assert torch.cuda.max_memory_allocated() <= before + layer
        assert torch.cuda.memory_allocated() <= before + 100_000
        assert torch.cuda.memory_reserved() <= reserved + 2 * layer
        generator.generate([[1, 2, 3]], max_new_tokens=3)
    assert torch.cuda.memory_allocated() <= before + 100_000


def test_an_adapter_in_every_attention_leaves_the_rest_fused() -> None:
    model = new_model()
    for layer in model.model.layers:
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    expected = run(model, some_prompts(), 6).token_ids
    result = run(model.to("cuda"), some_prompts(), 6)
    assert result.token_ids == expected
    assert result.report.fused.startswith("0 of 3 layers; left as they are: attention of 3 of 3 layers: `v_proj` is a")
