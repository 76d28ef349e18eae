"""The cases of a check: each kernel, each of its options, and shapes that come up later."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support_cases import SOME
from support_families import build
from support_kernel_check import CPU
from support_kernel_check import nothing_remembered as nothing_remembered  # a fixture of all tests here
from support_kernels import DEVICE, INTERPRETED, dot_without_blas, kernel, plain  # noqa: F401
from support_parity import assert_parity

from hf_batchllm import BatchGenerator
from hf_batchllm.kernel_check import attention_cases
from hf_batchllm.kernel_check.attention_cases import Shape
from hf_batchllm.kernel_check.child import GROUPS
from hf_batchllm.kernel_check.comparing import Where, Wrong, both, held, near, same
from hf_batchllm.kernels.reference import decode_torch, layer_ops_torch, prefill_torch
from hf_batchllm.model.attention import triton_attention
from hf_batchllm.patches.fused_experts import ExpertKernels
from hf_batchllm.sampling.sampling_kernels import SamplingKernels

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, number] for number in range(20, 26)]
INFINITE, ODD = float("inf"), float("nan")


@pytest.mark.some_cases
@kernel
@pytest.mark.parametrize("group", GROUPS)
def test_all_kernels_pass(group: str, request: pytest.FixtureRequest) -> None:
    if group == "parts":  # which are held to the last bit
        request.getfixturevalue("dot_without_blas")
    cases = list(GROUPS[group](Where(torch.device(DEVICE))).values())
    for case in cases[:: (16 if SOME else 4) if INTERPRETED else 1]:  # the interpreter takes minutes for all of them
        case()


def other(place: int, value: float) -> torch.Tensor:
    """The reference's numbers, but for one."""
    made = torch.linspace(-1, 1, 100)
    made[place] = value
    return made


@plain
@pytest.mark.parametrize(
    ("ours", "wanted", "why"),
    [
        (other(0, -1) + 1e-6, other(0, -1), None),
        (other(0, -1) + 0.1, other(0, -1), r"off by 1\.7e-01"),
        (other(3, ODD), other(0, -1), "1 values of the result are no numbers, and 0 of the reference's"),
        (other(3, ODD), other(3, 0), "are no numbers"),
        (other(3, ODD), other(3, ODD), None),
        (other(3, INFINITE), other(3, -INFINITE), "are no numbers"),
        (other(3, INFINITE), other(3, ODD), "are no numbers"),
        (other(3, INFINITE) + 0.1, other(3, INFINITE), r"off by 1\.7e-01"),
        (other(3, 7).double(), other(3, 7), "float64"),
        (other(3, 7)[:50], other(3, 7), r"\[50\]"),
    ],
)
def test_what_counts_as_wrong(ours: torch.Tensor, wanted: torch.Tensor, why: str | None) -> None:
    if why is None:
        return near(ours, wanted)
    with pytest.raises(Wrong, match=why):
        near(ours, wanted)


@plain
def test_whole_numbers_may_differ_in_some_places() -> None:
    ours, wanted = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 3, 0, 0])
    same(ours, wanted, but=2)
    with pytest.raises(Wrong, match="2 of 5 values of the tokens"):
        same(ours, wanted, "the tokens", but=1)


@plain
def test_what_a_kernel_writes_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is wrong in a tensor that it was given, which stays as it was for the reference and for the caller."""

    def writing(x: torch.Tensor, residual: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        made = layer_ops_torch.add_rms_norm(x, residual, *given, **named)
        residual[3] += 1
        return made

    monkeypatch.setattr("hf_batchllm.kernels.triton.layer_ops_triton.add_rms_norm", writing)
    given = Where(CPU).drawn(x=(5, 64), residual=(5, 64), weight=(64,))
    before = given["residual"].clone()
    with pytest.raises(Wrong, match="residual is off by"):
        held("layer_ops", "add_rms_norm", **given, eps=1e-6)
    assert torch.equal(given["residual"], before)


@plain
def test_each_kernel_is_tried() -> None:
    """All that another room takes out of the kernels' modules is called by some case."""
    asked = "rope_and_write attend_items merge_parts attend_chunks add_rms_norm act_and_mul digest attend_fixed".split()
    asked += "short_convolution delta_rule state_space selective_scan decay_and_beta gated_norm merge_fixed".split()
    asked += ["narrow_product", *(field.name for kinds in (SamplingKernels, ExpertKernels) for field in fields(kinds))]
    text = "".join(inspect.getsource(inspect.getmodule(cases)) for cases in GROUPS.values())  # type: ignore[arg-type]
    assert [name for name in asked if f'"{name}"' not in text and f".{name}(" not in text] == []


def references_for_kernels(patch: pytest.MonkeyPatch, deaf: str = "", option: str = "", instead: Any = None) -> None:
    """Each kernel is its reference, but ``deaf`` takes ``instead`` for one of its options."""

    def unheard(reference: Any, *given: Any, **named: Any) -> Any:
        return reference(*given, **named | ({option: instead} if option in named else {}))

    for path in Path(layer_ops_torch.__file__).parent.glob("*_torch.py"):
        home = path.stem.removesuffix("_torch")
        if (path.parents[1] / "triton" / f"{home}_triton.py").exists():
            kernels, references = both(home)
            for name, function in inspect.getmembers(references, inspect.isfunction):
                if hasattr(kernels, name) and function.__module__ == references.__name__:
                    told = partial(unheard, function) if f"{home}.{name}" == deaf else function
                    patch.setattr(kernels, name, told)


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
    references_for_kernels(monkeypatch, kernel, option, instead)
    cases, failed = GROUPS[group](Where(CPU)), []
    for name, case in cases.items():
        try:
            case()
        except Exception:
            failed.append(name)
    assert 0 < len(failed) < len(cases)


@plain
def test_float32_is_held_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float32 may be rounded to TF32, as environment variables and settings of torch have it."""
    references_for_kernels(monkeypatch)
    seen = dict[str, list[torch.dtype]]()
    for module, name in ((decode_torch, "attend_items"), (prefill_torch, "attend_chunks")):

        def watched(real: Any, name: str, *given: Any, **named: Any) -> None:
            seen.setdefault(name, []).append(next(each for each in given if isinstance(each, torch.Tensor)).dtype)
            real(*given, **named)

        monkeypatch.setattr(module, name, partial(watched, getattr(module, name), name))
    assert attention_cases.tried(CPU, Shape(4, 1, 128, 128, 16, torch.float32)) is None
    assert seen.keys() == {"attend_items", "attend_chunks"}
    assert {dtype for dtypes in seen.values() for dtype in dtypes} == {torch.float64}


@plain
def test_a_shape_that_fails_falls_back_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from support_attention_references import REFERENCES

    tried: list[Shape] = []

    def failing(device: torch.device, shape: Shape) -> str | None:
        tried.append(shape)
        return f"decode, {shape}: OutOfResources: shared memory" if shape.window is None else None

    def make_backend(config: Any, device: Any, storage: Any, notices: Any) -> Any:
        return triton_attention.TritonBackend(REFERENCES, storage, device, notices, tries_shapes=True)

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
@pytest.mark.parametrize("tried", [attention_cases.tried, attention_cases.tried_in_parts])
def test_what_a_try_finds(tried: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, raised = Shape(4, 2, 64, 64, 16, torch.float16), []

    def case(*given: Any, **named: Any) -> None:
        if raised:
            raise raised[0]

    for name in ("decode", "prompts", "writing", "in_parts"):
        monkeypatch.setattr(attention_cases, name, case)
    assert tried(CPU, shape) is None
    raised[:] = [Wrong("off by far")]
    assert tried(CPU, shape) == "KV cache, 4 heads and 2 KV heads of 64, float16: Wrong: off by far"
    raised[:] = [torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.raises(torch.OutOfMemoryError):
        tried(CPU, shape)
