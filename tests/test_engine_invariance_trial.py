"""Before the same bits are promised it is tried whether steps give them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support_families import build

from hf_batchllm import BatchGenerator, UnsupportedModelError
from hf_batchllm.engine import invariance_trial
from hf_batchllm.model.kv_storage import KVStorage
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.model.torch_attention import TorchBackend


def steps_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step from now on."""
    rows, own = [], ModelRunner.step

    def step(self: ModelRunner, batch: Any) -> Any:
        rows.append(len(batch.attention.positions))
        return own(self, batch)

    monkeypatch.setattr(ModelRunner, "step", step)
    return rows


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_a_model_is_tried_once(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = copy.deepcopy(build("mixtral")), steps_of(monkeypatch)
    counts = []
    for _ in range(2):  # generators
        with BatchGenerator(model, invariant=True, page_size=page_size) as gen:
            for _ in range(2):
                gen.generate([[1, 2, 3]], max_new_tokens=2, progress=False)
                counts.append(len(rows))
    assert counts == [6, 8, 10, 12]  # four steps of the trial, then two of each call
    assert rows[:4] == [8, 40, 1, 37]
    with BatchGenerator(model, page_size=page_size) as gen:
        gen.generate([[1, 2, 3]], max_new_tokens=2, progress=False)
    assert len(rows) == 14


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_what_is_tried_on_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with the passes of a CPU: the sequence has keys for several parts, and its last tokens come in pieces."""
    model, rows = copy.deepcopy(build(family)), steps_of(monkeypatch)
    monkeypatch.setattr(invariance_trial, "_ON_CPU", replace(invariance_trial._ON_GPU, beside=(3, 9)))
    with BatchGenerator(model, invariant=True) as gen:
        gen.generate([[1, 2, 3]], max_new_tokens=2, progress=False)
    assert rows[:6] == [300, 2 * 300 + 8, 3 * 300 + 6 * 8, 2, 7, 70]
    assert rows[6:21] == list(invariance_trial._ON_GPU.single)


def test_what_fails_the_trial_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if products of other sizes were added up in the same order: they are not."""
    model = copy.deepcopy(build("llama")).bfloat16()

    def make_backend(config: Any, device: torch.device, storage: KVStorage, notices: Any) -> TorchBackend:
        return TorchBackend(storage, device)

    with monkeypatch.context() as patch, BatchGenerator(model, invariant=True) as gen:
        patch.setattr("hf_batchllm.model.model_in_use.make_backend", make_backend)
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM gave other bits in a step of "):
                gen.generate([[1, 2, 3]], max_new_tokens=2, progress=False)
        patch.undo()
        assert len(gen.generate([[1, 2, 3]], max_new_tokens=2, progress=False)[0].token_ids) == 2
