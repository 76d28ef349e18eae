"""Norms with a gate, in mixers that carry a state: one kernel in place of their modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support_families import build, family_params
from support_fused import assert_same_logits, logits_of_steps, new_model, reasons, run, some_prompts
from support_fused import fusing as fusing  # a fixture
from support_kernels import INTERPRETED, draw
from support_parity import assert_parity
from support_parity import watched as watched
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from hf_batchllm import BatchGenerator
from hf_batchllm.kernels import gated_ops_torch
from hf_batchllm.patches.gated_norms import GatedNorm, gated_norm_forward, gated_norms

pytestmark = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")
WITH_GATED_NORMS = [
    *("mamba2", "bamba", "granitemoehybrid", "nemotron_h", "kimi_linear", "bailing_hybrid", "olmo_hybrid"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
]
WITH_FUSED_MIXERS = ["qwen3_5", "qwen3_5_moe"]  # their norms run within
DTYPES = [torch.float32, torch.bfloat16]
PROMPTS = some_prompts(12, "mixed")
NEW_TOKENS = 5


def random_forward(found: GatedNorm, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What fused code makes of random numbers, and what the module does."""
    norm = found.module.to(dtype)
    rng = np.random.default_rng(5)
    norm.weight.data = draw(rng, len(norm.weight), dtype=dtype)
    x, gate = (draw(rng, 1, 7, len(norm.weight), dtype=dtype) for _ in range(2))
    forward = gated_norm_forward(found, gated_ops_torch.gated_norm)
    assert found.why_not is None
    return forward(x, gate), norm(x, gate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", family_params(WITH_GATED_NORMS))
def test_what_a_module_computes(family: str, dtype: torch.dtype) -> None:
    found, *_ = gated_norms(new_model(family))
    ours, theirs = random_forward(found, dtype)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_falcons_norm_says_where_its_gate_stands(first: bool, dtype: torch.dtype) -> None:
    parent = nn.Module()
    parent.norm = FalconH1RMSNormGated(24, n_groups=3, norm_before_gate=not first)
    (found,) = gated_norms(parent)
    assert found.form.gate_first is first
    ours, theirs = random_forward(found, dtype)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_a_row_are_normed_apart(dtype: torch.dtype) -> None:
    parent = nn.Module()
    parent.norm = Zamba2RMSNormGated(24, 8)
    (found,) = gated_norms(parent)
    ours, theirs = random_forward(found, dtype)
    assert torch.equal(ours, theirs)


def test_what_the_kernel_does_not_know_runs_as_it_is() -> None:
    found, *_ = gated_norms(new_model("mamba2"))
    forward = gated_norm_forward(found, lambda *given: pytest.fail("the kernel ran"))
    x = torch.randn(1, 3, len(found.module.weight))
    assert torch.equal(forward(x), found.module(x))
    found, *_ = gated_norms(new_model("qwen3_next"))
    found.module.activation = "gelu"
    x = torch.randn(3, len(found.module.weight))
    assert torch.equal(
        gated_norm_forward(found, lambda *given: pytest.fail("the kernel ran"))(x, x), found.module(x, x)
    )


@pytest.mark.parametrize("family", family_params([each for each in WITH_GATED_NORMS if each not in WITH_FUSED_MIXERS]))
class TestEveryFamily:
    def test_tokens(self, family: str, fusing: list[int], watched: list[Any]) -> None:
        assert_parity(family, PROMPTS, run(build(family), PROMPTS, NEW_TOKENS, max_batch_tokens=40), NEW_TOKENS)
        assert fusing and min(fusing) >= len(list(gated_norms(build(family))))

    @pytest.mark.some_cases
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_bits(self, family: str, dtype: torch.dtype, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """Of these norms alone."""
        monkeypatch.setattr("hf_batchllm.patches.fusion.mixtures", lambda model: [])
        monkeypatch.setattr("hf_batchllm.patches.fusion.stacks", lambda model: [])
        model = new_model(family).to(dtype)
        own = logits_of_steps(monkeypatch, model, some_prompts(4), fuse=False)
        for ours, theirs in zip(logits_of_steps(monkeypatch, model, some_prompts(4)), own, strict=True):
            assert torch.equal(ours, theirs)
        assert set(fusing) == {len(list(gated_norms(model)))}


def test_norms_within_a_fused_mixer_are_left_to_it(fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    run(model := new_model("qwen3_5"))
    whole = set(fusing)
    monkeypatch.setattr("hf_batchllm.patches.fusion.gated_norms", lambda model: [])
    fusing.clear()
    run(model)
    assert set(fusing) == whole


def test_where_a_mixer_runs_its_own_code_its_norm_is_fused_nonetheless(fusing: list[int]) -> None:
    run(model := new_model("qwen3_5"))
    (whole,) = set(fusing)
    fusing.clear()
    mixer = next(found.parent for found in gated_norms(model))
    mixer.in_proj_z.register_forward_hook(lambda module, given, output: None)
    run(model)
    assert set(fusing) == {whole} and "MIXER" not in reasons(model)
    assert "mixer of 1 of" in reasons(model) and "norms of" not in reasons(model)


def _hooked(norm: nn.Module) -> None:
    norm.register_forward_hook(lambda module, given, output: output * 0.5)


class Mine(MambaRMSNormGated):
    def forward(self, *given: Any) -> torch.Tensor:
        return super().forward(*given) * 0.5


def _subclassed(norm: nn.Module) -> None:
    norm.__class__ = Mine


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a hook": (_hooked, "`norm` has hooks"),
    "a subclass": (_subclassed, "`norm` is a Mine of test_patches_gated_norms, not a plain MambaRMSNormGated"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_an_owner_does(change: str, fusing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    change_it, said = CHANGES[change]
    model = new_model("mamba2")
    before = logits_of_steps(monkeypatch, model, some_prompts(3), fuse=False)
    count = len(list(gated_norms(model)))
    change_it(next(found.module for found in gated_norms(model)))
    own = logits_of_steps(monkeypatch, model, some_prompts(3), fuse=False)
    assert not torch.allclose(own[-1], before[-1], atol=1e-4)
    assert_same_logits(logits_of_steps(monkeypatch, model, some_prompts(3)), own, torch.float32)
    assert set(fusing) == {count - 1}
    assert f"norms of 1 of {count} mixers: {said}" in reasons(model)
    assert run(model).report.fused.startswith(f"the norms of {count - 1} of {count} mixers; left as they are: ")


def test_a_norm_that_is_replaced_while_a_stream_is_open(fusing: list[int]) -> None:
    model = new_model("mamba2")
    found = next(gated_norms(model))
    new = copy.deepcopy(found.module)
    with BatchGenerator(model, page_size=16) as generator:
        stream = generator.stream(some_prompts(3), max_new_tokens=6, progress=False)
        next(stream)
        setattr(found.parent, found.name, new)
        list(stream)
    assert found.parent.norm is new and "forward" not in vars(new) and "forward" not in vars(found.module)
