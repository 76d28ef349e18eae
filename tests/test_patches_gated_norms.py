"""Norms with a gate, in mixers that carry a state: one kernel in place of their modules."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support_families import family_params
from support_fused import WITH_GATED_NORMS, Fusing, new_model, reasons, run, some_prompts
from support_fused import fusing as fusing  # a fixture
from support_kernels import INTERPRETED, draw
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from hf_batchllm import BatchGenerator
from hf_batchllm.kernels.reference import gated_ops_torch
from hf_batchllm.patches.gated_norms import GatedNorm, gated_norm_forward, gated_norms

pytestmark = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")
DTYPES = [torch.float32, torch.bfloat16]


def random_forward(found: GatedNorm, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What fused code makes of random numbers, and what the module does."""
    norm = found.module.to(dtype)
    rng = np.random.default_rng(5)
    norm.weight.data = draw(rng, len(norm.weight), dtype=dtype)
    x, gate = (draw(rng, 1, 7, len(norm.weight), dtype=dtype) for _ in range(2))
    forward = gated_norm_forward(found, gated_ops_torch.gated_norm)
    assert found.why_not is None
    return forward(x, gate), norm(x, gate)


def alone(norm: nn.Module) -> GatedNorm:
    parent = nn.Module()
    parent.norm = norm
    (found,) = gated_norms(parent)
    return found


NORMS: dict[str, Callable[[], GatedNorm]] = {
    "FalconH1, gate behind": lambda: alone(FalconH1RMSNormGated(24, n_groups=3, norm_before_gate=True)),
    "FalconH1, gate first": lambda: alone(FalconH1RMSNormGated(24, n_groups=3, norm_before_gate=False)),
    "Zamba2, groups of a row": lambda: alone(Zamba2RMSNormGated(24, 8)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*family_params(WITH_GATED_NORMS), *NORMS])
def test_what_a_module_computes(name: str, dtype: torch.dtype) -> None:
    found = NORMS[name]() if name in NORMS else next(gated_norms(new_model(name)))
    ours, theirs = random_forward(found, dtype)
    assert torch.equal(ours, theirs)
    assert found.form.gate_first is (name == "FalconH1, gate first") or "FalconH1" not in name


def test_what_the_kernel_does_not_know_runs_as_it_is() -> None:
    found, *_ = gated_norms(new_model("mamba2"))
    forward = gated_norm_forward(found, lambda *given: pytest.fail("the kernel ran"))
    x = torch.randn(1, 3, len(found.module.weight))
    assert torch.equal(forward(x), found.module(x))
    found, *_ = gated_norms(new_model("qwen3_next"))
    found.module.activation = "gelu"
    forward = gated_norm_forward(found, lambda *given: pytest.fail("the kernel ran"))
    x = torch.randn(3, len(found.module.weight))
    assert torch.equal(forward(x, x), found.module(x, x))


def test_norms_within_a_fused_mixer_are_left_to_it(fusing: Fusing, monkeypatch: pytest.MonkeyPatch) -> None:
    run(model := new_model("qwen3_5"))
    whole = set(fusing)
    monkeypatch.setattr("hf_batchllm.patches.fusion.gated_norms", lambda model: [])
    fusing.clear()
    run(model)
    assert set(fusing) == whole


def test_where_a_mixer_runs_its_own_code_its_norm_is_fused_nonetheless(fusing: Fusing) -> None:
    run(model := new_model("qwen3_5"))
    (whole,) = set(fusing)
    fusing.clear()
    mixer = next(found.parent for found in gated_norms(model))
    mixer.in_proj_z.register_forward_hook(lambda module, given, output: None)
    run(model)
    assert set(fusing) == {whole} and "MIXER" not in reasons(model)
    assert "mixer of 1 of" in reasons(model) and "norms of" not in reasons(model)


def test_a_norm_that_is_replaced_while_a_stream_is_open(fusing: Fusing) -> None:
    model = new_model("mamba2")
    found = next(gated_norms(model))
    new = copy.deepcopy(found.module)
    with BatchGenerator(model, page_size=16) as generator:
        stream = generator.stream(some_prompts(3), max_new_tokens=6, progress=False)
        next(stream)
        setattr(found.parent, found.name, new)
        list(stream)
    assert found.parent.norm is new and "forward" not in vars(new) and "forward" not in vars(found.module)
