"""Calls over the kernels' work lists without a GPU: the kernels' plain PyTorch references take their place."""

from __future__ import annotations

from typing import Any

import pytest
from support_parity import watched as watched  # a fixture

from hf_batchllm.kernels.reference import decode_torch, fixed_attention_torch, layer_ops_torch, prefill_torch
from hf_batchllm.model.attention.fixed_triton_attention import FixedKernels
from hf_batchllm.model.attention.triton_attention import AttentionKernels, StepWork, TritonBackend

REFERENCES = AttentionKernels(
    write=layer_ops_torch.rope_and_write,
    attend_items=decode_torch.attend_items,
    merge_parts=decode_torch.merge_parts,
    attend_chunks=prefill_torch.attend_chunks,
    by_page=lambda pages: pages,
    launch_options=lambda *shape: {"tile": 64},
    unsupported=lambda *shape: None,
)


FIXED_REFERENCES = FixedKernels(
    attend=fixed_attention_torch.attend_fixed, merge=fixed_attention_torch.merge_fixed, boxes=lambda pages: pages
)


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Calls run over the work lists, without a GPU. What it gives says what they did."""
    seen: dict[str, Any] = {"gates": (4, 2), "lists": [], "kernels": REFERENCES}

    def make_backend(config: Any, device: Any, storage: Any, notices: Any) -> TritonBackend:
        return TritonBackend(seen["kernels"], storage, device, notices, seen["gates"])

    lists = StepWork.lists

    def noted_lists(self: StepWork, *key: Any) -> Any:
        new = key not in self._lists
        work = lists(self, *key)
        if new:
            seen["lists"].append(work)
        return work

    monkeypatch.setattr("hf_batchllm.model.model_in_use.make_backend", make_backend)
    monkeypatch.setattr(StepWork, "lists", noted_lists)
    return seen
