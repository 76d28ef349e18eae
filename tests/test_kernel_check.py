"""The cases of a check: each kernel, each of its options, and shapes that come up later."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from support_cases import SOME
from support_families import build
from support_kernel_check import CPU
from support_kernel_check import nothing_remembered as nothing_remembered  # a fixture of all tests here
from support_kernels import DEVICE, INTERPRETED, kernel, plain
from support_parity import assert_parity

from hf_batchllm import BatchGenerator
from hf_batchllm.kernel_check.attention_cases import Shape
from hf_batchllm.kernel_check.comparing import Where, Wrong, near, same
from hf_batchllm.kernel_check.groups import GROUPS
from hf_batchllm.kernels import decode_torch, layer_ops_torch, prefill_torch
from hf_batchllm.model import triton_attention
from hf_batchllm.patches.fused_experts import ExpertKernels
from hf_batchllm.sampling.sampling_kernels import SamplingKernels

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, number] for number in range(20, 26)]


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("group", GROUPS)
def test_all_kernels_pass(group: str) -> None:
    cases = list(GROUPS[group](Where(torch.device(DEVICE))).values())
    for case in cases[:: (8 if SOME else 4) if INTERPRETED else 1]:  # the interpreter takes minutes for all of them
        case()


@plain
def test_what_counts_as_wrong() -> None:
    twins = torch.linspace(-1, 1, 100)
    near(twins + 1e-6, twins)
    with pytest.raises(Wrong, match=r"off by 1\.7e-01"):
        near(twins + 0.1, twins)
    odd = twins.clone()
    odd[3] = torch.nan
    with pytest.raises(Wrong, match="1 values of the result are no numbers, and 0 of the twin's"):
        near(odd, twins)
    near(odd, odd.clone())
    with pytest.raises(Wrong, match="float64"):
        near(twins.double(), twins)
    with pytest.raises(Wrong, match="2 of 5 values of the tokens"):
        same(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 3, 0, 0]), "the tokens", but=1)


@plain
@pytest.mark.parametrize("group", GROUPS)
def test_each_kernel_of_a_group_is_tried(group: str) -> None:
    """All that another room takes out of the kernels' modules is called by some case."""
    asked = {
        "attention": ["rope_and_write", "attend_items", "merge_parts", "attend_chunks"],
        "layers": ["add_rms_norm", "act_and_mul", "digest"],
        "sampling": [field.name for field in dataclasses.fields(SamplingKernels)],
        "experts": [field.name for field in dataclasses.fields(ExpertKernels)],
        "states": ["short_convolution", "delta_rule", "state_space", "selective_scan", "decay_and_beta", "gated_norm"],
        "parts": ["attend_fixed", "merge_fixed", "narrow_product"],
    }
    text = inspect.getsource(inspect.getmodule(GROUPS[group]))  # type: ignore[arg-type]
    assert [name for name in asked[group] if name not in text] == []


KERNELS = {
    "attention": {
        "layer_ops": ["rope_and_write"],
        "decode": ["attend_items", "merge_parts"],
        "prefill": ["attend_chunks"],
    },
    "layers": {"layer_ops": ["add_rms_norm", "act_and_mul"], "digest": ["digest"]},
    "sampling": {
        "sample": ["greedy", "gumbel_sample", "advance"],
        "top_k_top_p": ["cutoffs"],
        "penalties": ["mark_seen", "penalise"],
        "token_masks": ["mask_tokens"],
        "likeliest": ["note_likeliest"],
        "tails": ["tail_cuts"],
        "token_edits": ["edit_tokens", "ban_repeats", "grow_ends", "force_tokens", "append_tokens"],
    },
    "states": {
        "convolution": ["short_convolution"],
        "delta_rule": ["delta_rule"],
        "state_space": ["state_space"],
        "selective_scan": ["selective_scan"],
        "gated_ops": ["decay_and_beta", "gated_norm"],
    },
    "parts": {"fixed_attention": ["attend_fixed", "merge_fixed"], "narrow_products": ["narrow_product"]},
}
# Kernels that do not do what they are told by one of their options: (group, kernel, option, what it takes instead).
DEAF = [
    ("attention", "layer_ops.rope_and_write", "turn", "llama"),
    ("attention", "layer_ops.rope_and_write", "v_norm", False),
    ("attention", "layer_ops.rope_and_write", "q_factor", None),
    ("attention", "layer_ops.rope_and_write", "q_weight", None),
    ("parts", "fixed_attention.attend_fixed", "window", None),
    ("parts", "fixed_attention.attend_fixed", "softcap", None),
    ("parts", "fixed_attention.merge_fixed", "sinks", None),
    ("parts", "narrow_products.narrow_product", "bias", None),
    ("layers", "layer_ops.add_rms_norm", "form", "llama"),
    ("layers", "layer_ops.add_rms_norm", "inner_weight", None),
    ("layers", "layer_ops.act_and_mul", "activation", "silu"),
    ("sampling", "sample.gumbel_sample", "threshold", None),
    ("sampling", "top_k_top_p.cutoffs", "top_k", None),
    ("sampling", "top_k_top_p.cutoffs", "top_p", None),
    ("sampling", "top_k_top_p.cutoffs", "min_p", None),
    ("sampling", "top_k_top_p.cutoffs", "by_row", None),
    ("sampling", "penalties.penalise", "by_row", None),
    ("sampling", "penalties.penalise", "minimum", None),
    ("sampling", "token_masks.mask_tokens", "line", None),
    ("sampling", "sample.gumbel_sample", "ceiling", None),
    ("states", "convolution.short_convolution", "bias", None),
    ("states", "convolution.short_convolution", "activation", None),
    ("states", "delta_rule.delta_rule", "normalise", False),
]


@pytest.mark.some_cases
@plain
@pytest.mark.parametrize(("group", "kernel", "option", "instead"), DEAF)
def test_a_kernel_that_does_not_listen_is_found(
    group: str, kernel: str, option: str, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option makes other machine code, which may be wrong by itself."""
    for home, names in KERNELS[group].items():
        for name in names:
            twin = getattr(importlib.import_module(f"hf_batchllm.kernels.{home}_torch"), name)

            def deaf(*given: Any, _twin: Any = twin, **named: Any) -> Any:
                return _twin(*given, **named | ({option: instead} if option in named else {}))

            told = twin if f"{home}.{name}" != kernel else deaf
            monkeypatch.setattr(f"hf_batchllm.kernels.{home}_triton.{name}", told)
    failed = []
    for name, case in GROUPS[group](Where(CPU)).items():
        try:
            case()
        except Exception:
            failed.append(name)
    assert failed and len(failed) < len(GROUPS[group](Where(CPU)))


@plain
def test_float32_is_held_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float32 may be rounded to TF32, as environment variables and settings of torch have it."""
    from hf_batchllm.kernel_check import attention_cases

    seen = []
    for module, name in ((decode_torch, "attend_items"), (prefill_torch, "attend_chunks")):
        place = 1 if name == "attend_items" else 0
        real = getattr(module, name)

        def watched(*given: Any, _real: Any = real, _place: int = place, **named: Any) -> None:
            seen.append(given[_place].dtype)
            _real(*given, **named)

        monkeypatch.setattr(module, name, watched)
    monkeypatch.setattr("hf_batchllm.kernels.decode_triton.attend_items", decode_torch.attend_items)
    monkeypatch.setattr("hf_batchllm.kernels.decode_triton.merge_parts", decode_torch.merge_parts)
    monkeypatch.setattr("hf_batchllm.kernels.prefill_triton.attend_chunks", prefill_torch.attend_chunks)
    monkeypatch.setattr("hf_batchllm.kernels.layer_ops_triton.rope_and_write", layer_ops_torch.rope_and_write)
    assert attention_cases.tried(CPU, Shape(4, 1, 128, 128, 16, torch.float32)) is None
    assert set(seen) == {torch.float32, torch.float64} and len(seen) >= 8


@plain
def test_a_shape_that_fails_falls_back_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from support_attention_twins import TWINS

    tried: list[Shape] = []

    def failing(device: torch.device, shape: Shape) -> str | None:
        tried.append(shape)
        return f"decode, {shape}: OutOfResources: shared memory" if shape.window is None else None

    def make_backend(config: Any, device: Any, storage: Any, notices: Any) -> Any:
        return triton_attention.TritonBackend(TWINS, storage, device, notices, tries_shapes=True)

    monkeypatch.setattr(triton_attention, "_tried", cache(failing))
    monkeypatch.setattr("hf_batchllm.model.model_in_use.make_backend", make_backend)
    with warnings.catch_warnings(record=True) as heard, BatchGenerator(build("gemma3")) as generator:
        warnings.simplefilter("always")
        result = generator.generate(PROMPTS, max_new_tokens=4, eos_token_id=None)
        generator.generate(PROMPTS, max_new_tokens=4, eos_token_id=None)
    assert_parity("gemma3", PROMPTS, result, 4)
    assert len(tried) == 2 and {shape.window is None for shape in tried} == {True, False}
    said = [str(each.message) for each in heard if "OutOfResources" in str(each.message)]
    assert len(said) == 1 and "runs in plain PyTorch" in said[0]


@plain
def test_what_a_try_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_batchllm.kernel_check import attention_cases

    shape = Shape(4, 2, 64, 64, 16, torch.float16)
    for name in ("decode", "writing"):
        monkeypatch.setattr(attention_cases, name, lambda where, shape, **given: None)
    monkeypatch.setattr(attention_cases, "prompts", lambda where, shape: None)
    assert attention_cases.tried(CPU, shape) is None

    def out_of_memory(where: Any, shape: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention_cases, "prompts", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        attention_cases.tried(CPU, shape)
