"""The kernels of ``layer_ops_triton`` against their references, and these against transformers' modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support_kernels import DEVICE, copies, draw, kernel, plain
from support_small_cases import NAN, NORM, ROPE, norm_case, parts, rope_case

from hf_batchllm.kernels.reference import layer_ops_torch
from hf_batchllm.kernels.triton import layer_ops_triton

# The whole range of what rounding may do: parts of a row's largest value, and the share of elements that differ at all.
# Natively exp, rsqrt and the order of sums differ in their last bit; that changes few elements in half precision.
TOLERANCE = {torch.float32: (2e-6, 1.0), torch.float16: (2**-9, 0.01), torch.bfloat16: (2**-6, 0.01)}


def assert_near(got: torch.Tensor, want: torch.Tensor, exact: bool = False) -> None:
    got, want = got.cpu(), want.cpu()
    assert got.shape == want.shape and got.dtype == want.dtype
    assert (got.isnan() == want.isnan()).all(), "written where it should not be, or not written"
    got, want = got.nan_to_num(0.0), want.nan_to_num(0.0)
    if exact or not got.is_floating_point():
        assert torch.equal(got, want)
        return
    part, share = TOLERANCE[got.dtype]
    error = (got.double() - want.double()).abs()
    assert (error <= part * want.double().abs().amax(dim=-1, keepdim=True)).all(), f"{error.max()}"
    assert (error > 0).sum() <= 3 + share * error.numel(), f"{int((error > 0).sum())} of {error.numel()} differ"


def compare(
    function: Callable[..., Any], reference: Callable[..., Any], given: dict[str, Any], exact: bool = False
) -> None:
    """All that both return or write to must agree; where neither writes, what was there stays."""
    ours, theirs = copies(given, DEVICE), copies(given, "cpu")
    made, wanted = function(**ours), reference(**theirs)
    if wanted is not None:
        assert_near(made, wanted, exact)
    for name, want in theirs.items():
        if isinstance(want, torch.Tensor):
            assert_near(ours[name], want, exact)


# -- rope_and_write --------------------------------------------------------------------------------------------


def check_rope(seed: int, shape: tuple[Any, ...], dtype: torch.dtype, most: int) -> None:
    given = rope_case(seed, shape, dtype, most)

    def ours(merged: torch.Tensor, **rest: Any) -> None:
        layer_ops_triton.rope_and_write(*parts(merged, shape), **rest)

    def reference(merged: torch.Tensor, **rest: Any) -> None:
        layer_ops_torch.rope_and_write(*parts(merged, shape), **rest)

    # Products and sums alone are rounded one by one in every dtype; a norm's sum has an order of its own.
    compare(ours, reference, given, exact="q_weight" not in given)


@pytest.mark.some_cases("shape")
@kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", ROPE)
def test_rope_and_write(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    small = (min(shape[0], 8), min(shape[1], 8), *shape[2:])
    check_rope(len(shape) + shape[0], small, dtype, most=6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(300))
def test_rope_and_write_native(case: int) -> None:
    check_rope(
        case, ROPE[case % len(ROPE)], torch.float32 if case % 7 == 0 else torch.bfloat16, most=[3, 40, 300][case % 3]
    )


# -- add_rms_norm ----------------------------------------------------------------------------------------------


def check_norm(seed: int, shape: tuple[Any, ...], dtype: torch.dtype, most: int) -> None:
    compare(layer_ops_triton.add_rms_norm, layer_ops_torch.add_rms_norm, norm_case(seed, shape, dtype, most))


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", NORM)
def test_add_rms_norm(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    check_norm(shape[0], shape, dtype, most=6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(300))
def test_add_rms_norm_native(case: int) -> None:
    check_norm(
        case, NORM[case % len(NORM)], torch.float32 if case % 7 == 0 else torch.bfloat16, most=[3, 40, 300][case % 3]
    )


# family: its class of norms, their form
MODULES = {
    "llama": ("LlamaRMSNorm", "llama"), "qwen3": ("Qwen3RMSNorm", "llama"), "gemma": ("GemmaRMSNorm", "gemma"),
    "gemma2": ("Gemma2RMSNorm", "gemma"), "gemma3": ("Gemma3RMSNorm", "gemma"), "olmo2": ("Olmo2RMSNorm", "olmo"),
    "gpt_oss": ("GptOssRMSNorm", "olmo"), "cohere2": ("Cohere2LayerNorm", "cohere"),
}  # fmt: skip


def norm_of(family: str, size: int, rng: np.random.Generator, dtype: torch.dtype) -> Any:
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    module = getattr(home, MODULES[family][0])(size, eps=1e-5).to(dtype)
    module.weight.data.copy_(draw(rng, size, dtype=dtype))
    return module


@plain
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MODULES)
def test_the_norms_reference_is_the_module_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    rng, form = np.random.default_rng(1), MODULES[family][1]
    module, inner = norm_of(family, 96, rng, dtype), norm_of(family, 96, rng, dtype)
    x, residual, first = (draw(rng, 7, 96, dtype=dtype) for _ in range(3))
    with torch.no_grad():
        assert torch.equal(layer_ops_torch.add_rms_norm(x, None, module.weight, 1e-5, form=form), module(x))
        given = {"form": form, "inner_weight": inner.weight, "multiplier": 0.22, "first": first}
        summed = residual + first + inner(x) * 0.22
        assert torch.equal(layer_ops_torch.add_rms_norm(x, residual, None, 1e-5, **given), summed)
        got = layer_ops_torch.add_rms_norm(x, residual, module.weight, 1e-5, **given)
        assert torch.equal(residual, summed)
        assert torch.equal(got, module(summed))


ROTATIONS = ["llama", "qwen3", "gemma3", "phi3", "olmo2", "cohere2", "gpt_oss", "glm4", "ernie4_5"]


@plain
@pytest.mark.parametrize("family", ROTATIONS)
def test_the_rotations_reference_is_the_attention_modules_bit_for_bit(family: str) -> None:
    turn = {"cohere2": "cohere", "gpt_oss": "gpt_oss", "glm4": "glm", "ernie4_5": "ernie"}.get(family, "llama")
    shape = (4, 2, 32, 32, 20 if family in ("phi3", "glm4") else 32, "", turn, family == "olmo2")
    rng, given = np.random.default_rng(0), rope_case(3, shape, torch.bfloat16, most=20)
    q, k, v = parts(given.pop("merged").nan_to_num(0.5), shape)
    plain_q, plain_k = q.clone(), k.clone()
    given["slots"] = torch.arange(len(q))
    if family in ("qwen3", "gemma3"):
        norm = norm_of(family, 32, rng, torch.bfloat16)
        weight = norm.weight.detach()
        given |= {"q_weight": weight, "k_weight": weight, "norm": MODULES[family][1]}
        plain_q, plain_k = norm(q).detach(), norm(k).detach()
    apply = importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    want_q, want_k = apply(plain_q, plain_k, given["cos"], given["sin"], unsqueeze_dim=1)
    given["q_out"] = torch.empty_like(q)
    layer_ops_torch.rope_and_write(q, k, v, **given)
    assert torch.equal(given["q_out"], want_q)
    assert torch.equal(given["k_cache"][: len(q)], want_k)
    assert torch.equal(given["v_cache"][: len(q)], v)


@plain
def test_forms_that_there_are_none_of() -> None:
    x = torch.zeros(1, 1, 4)
    for module in (layer_ops_torch, layer_ops_triton):
        with pytest.raises(ValueError, match="'mistral'"):
            module.add_rms_norm(x[0], None, x[0, 0], 1e-6, form="mistral")
        with pytest.raises(ValueError, match="'mistral'"):
            module.rope_and_write(x, x, x, None, None, x, x, torch.zeros(1).long(), turn="mistral")


# -- act_and_mul -----------------------------------------------------------------------------------------------

# inter, activation, merged
ACT = [
    (14336, "silu", False), (14336, "silu", True), (2048, "gelu_tanh", True), (1536, "gelu_tanh", False),
    (3072, "silu", True), (1000, "silu", True), (777, "gelu_tanh", True), (9216, "gelu_tanh", False),
    (128, "silu", False), (5000, "gelu_tanh", True),
]  # fmt: skip


def check_act(seed: int, shape: tuple[Any, ...], dtype: torch.dtype, most: int) -> None:
    inter, activation, merged = shape
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(1, most))
    gate = 3.0 * draw(rng, tokens, inter * (1 + merged), dtype=dtype)
    given = {
        "gate": gate,
        "up": None if merged else draw(rng, tokens, inter, dtype=dtype),
        "activation": activation,
        "out": torch.full((tokens, inter), NAN, dtype=dtype) if rng.random() < 0.5 else None,
    }
    compare(layer_ops_triton.act_and_mul, layer_ops_torch.act_and_mul, given)


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", ACT)
def test_act_and_mul(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    check_act(shape[0], shape, dtype, most=4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(300))
def test_act_and_mul_native(case: int) -> None:
    check_act(case, ACT[case % 10], torch.float32 if case % 7 == 0 else torch.bfloat16, most=[3, 40, 300][case % 3])


@plain
@pytest.mark.parametrize(("name", "activation"), [("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh")])
def test_the_activations_reference_is_the_module_bit_for_bit(name: str, activation: str) -> None:
    from transformers.activations import ACT2FN

    rng = np.random.default_rng(2)
    gate, up = draw(rng, 9, 50, dtype=torch.bfloat16), draw(rng, 9, 50, dtype=torch.bfloat16)
    want = ACT2FN[name](gate) * up
    assert torch.equal(layer_ops_torch.act_and_mul(gate, up, activation=activation), want)
    assert torch.equal(layer_ops_torch.act_and_mul(torch.cat((gate, up), 1), activation=activation), want)
    for module in (layer_ops_torch, layer_ops_triton):
        with pytest.raises(ValueError, match="'relu' is neither"):
            module.act_and_mul(gate, up, activation="relu")
