"""What the tests of fused layers share: a CPU that fuses, and what a call's steps gave."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from families import random_prompts

from hf_batchllm import BatchConfig, BatchGenerator, BatchResult
from hf_batchllm.kernels import small_torch
from hf_batchllm.patches.fused import FusedKernels, FusedLayers
from hf_batchllm.runner import ModelRunner

FUSED_FAMILIES = ["llama", "llama3_rope", "mistral", "qwen2", "qwen2_window", "qwen3", "qwen3_window"]
TWINS = FusedKernels(small_torch.add_rms_norm, small_torch.act_and_mul)


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls fuse on a CPU, with the kernels' twins. Gives how many forwards each step had put in place."""
    steps: list[int] = []
    put = FusedLayers._put_in_place

    def noted_put(self: FusedLayers) -> None:
        put(self)
        steps.append(len(self._applied))

    def fused_kernels(config: BatchConfig, device: torch.device) -> FusedKernels | None:
        return TWINS if config.fuse else None

    monkeypatch.setattr("hf_batchllm.call.fused_kernels", fused_kernels)
    monkeypatch.setattr(FusedLayers, "_put_in_place", noted_put)
    return steps


def some_prompts(count: int = 10, kind: str = "mixed", seed: int = 4) -> list[list[int]]:
    return random_prompts(random.Random(seed), 97, kind, count)


def run(model: Any, prompts: list[list[int]], new_tokens: int = 6, **config: Any) -> BatchResult:
    with BatchGenerator(model, page_size=16, min_shared_tokens=1, **config) as generator:
        return generator.generate(prompts, max_new_tokens=new_tokens, progress=False)


def logits_of_steps(
    monkeypatch: pytest.MonkeyPatch, model: Any, prompts: list[list[int]], **config: Any
) -> list[torch.Tensor]:
    """Of each step, [samples, vocabulary]."""
    seen: list[torch.Tensor] = []
    step = ModelRunner.step

    def noted_step(self: ModelRunner, batch: Any) -> torch.Tensor:
        logits = step(self, batch)
        seen.append(logits.clone())
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "step", noted_step)
        run(model, prompts, **config)
    return seen
