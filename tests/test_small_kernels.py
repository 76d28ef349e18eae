"""The kernels of ``small_triton`` against their plain twins, and the twins against transformers' modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import DEVICE, copies, draw, kernel, plain

from hf_batchllm.kernels import small_torch, small_triton

NAN = float("nan")
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


def compare(function: Callable[..., Any], twin: Callable[..., Any], given: dict[str, Any], exact: bool = False) -> None:
    """All that both return or write to must agree; where neither writes, what was there stays."""
    ours, theirs = copies(given, DEVICE), copies(given, "cpu")
    made, wanted = function(**ours), twin(**theirs)
    if wanted is not None:
        assert_near(made, wanted, exact)
    for name, want in theirs.items():
        if isinstance(want, torch.Tensor):
            assert_near(ours[name], want, exact)


# -- rope_and_write --------------------------------------------------------------------------------------------

# heads, kv_heads, dim, v_dim, rotary, weights, unit_offset, float32 tables
ROPE = [
    (32, 8, 128, 128, 128, False, False, False),
    (16, 8, 128, 128, 128, True, False, False),
    (4, 1, 256, 256, 256, True, True, False),
    (14, 2, 64, 64, 64, False, False, True),
    (32, 32, 80, 80, 32, False, False, False),
    (6, 2, 96, 96, 96, True, False, False),
    (9, 3, 64, 64, 0, False, False, False),
    (5, 5, 192, 128, 64, False, False, True),
    (8, 4, 256, 256, 64, True, True, False),
    (3, 1, 40, 24, 20, True, False, True),
]


def parts(merged: torch.Tensor, shape: tuple[Any, ...]) -> list[torch.Tensor]:
    """q, k and v as views of one tensor, as a merged projection leaves them."""
    heads, kv_heads, dim, v_dim = shape[:4]
    sizes = [(heads, dim), (kv_heads, dim), (kv_heads, v_dim)]
    pieces = merged.split([count * each for count, each in sizes], dim=1)
    return [piece.unflatten(1, size) for piece, size in zip(pieces, sizes, strict=True)]


def rope_case(seed: int, shape: tuple[Any, ...], dtype: torch.dtype, most: int) -> dict[str, Any]:
    heads, kv_heads, dim, v_dim, rotary, weights, unit_offset, wide = shape
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(1, most))
    slots = rng.permutation(2 * tokens)[:tokens]
    slots[rng.random(tokens) < 0.2] = -1
    merged = draw(rng, tokens, heads * dim + kv_heads * (dim + v_dim), dtype=dtype)
    if rng.random() < 0.5:  # padding may hold anything
        merged[torch.from_numpy(slots < 0)] = NAN
    table = dtype if not wide else torch.float32
    angle = torch.from_numpy(rng.uniform(-9, 9, (tokens, rotary)).astype(np.float32))
    given: dict[str, Any] = {
        "merged": merged,
        "cos": angle.cos().to(table) if rotary else None,
        "sin": angle.sin().to(table) if rotary else None,
        "k_cache": torch.full((2 * tokens, kv_heads, dim), NAN, dtype=dtype),
        "v_cache": torch.full((2 * tokens, kv_heads, v_dim), NAN, dtype=dtype),
        "slots": torch.from_numpy(slots),
        "q_out": torch.full((tokens, heads, dim), NAN, dtype=dtype) if rng.random() < 0.5 else None,
        "eps": 1e-5,
        "unit_offset": unit_offset,
    }
    if weights:
        given |= {"q_weight": draw(rng, dim, dtype=dtype), "k_weight": draw(rng, dim, dtype=dtype)}
    return given


def check_rope(seed: int, shape: tuple[Any, ...], dtype: torch.dtype, most: int) -> None:
    given = rope_case(seed, shape, dtype, most)

    def ours(merged: torch.Tensor, **rest: Any) -> None:
        small_triton.rope_and_write(*parts(merged, shape), **rest)

    def twin(merged: torch.Tensor, **rest: Any) -> None:
        small_torch.rope_and_write(*parts(merged, shape), **rest)

    # Products and sums alone are rounded one by one in every dtype; a norm's sum has an order of its own.
    compare(ours, twin, given, exact="q_weight" not in given)


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", ROPE)
def test_rope_and_write(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    small = (min(shape[0], 8), min(shape[1], 8), *shape[2:])
    check_rope(len(shape) + shape[0], small, dtype, most=6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(300))
def test_rope_and_write_native(case: int) -> None:
    check_rope(case, ROPE[case % 10], torch.float32 if case % 7 == 0 else torch.bfloat16, most=[3, 40, 300][case % 3])


# -- add_rms_norm ----------------------------------------------------------------------------------------------

# hidden, residual, unit_offset, inner_weight
NORM = [
    (4096, True, False, False), (4096, False, False, False), (1024, True, True, True), (2560, True, True, False),
    (640, False, True, False), (576, True, False, False), (8192, True, False, False), (16384, True, False, False),
    (2880, True, False, True), (75, True, True, True),
]  # fmt: skip


def check_norm(seed: int, shape: tuple[Any, ...], dtype: torch.dtype, most: int) -> None:
    hidden, residual, unit_offset, inner = shape
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(1, most))
    given = {
        "x": 3.0 * draw(rng, tokens, hidden, dtype=dtype),
        "residual": draw(rng, tokens, hidden, dtype=dtype) if residual else None,
        "weight": draw(rng, hidden, dtype=dtype),
        "eps": 1e-5,
        "unit_offset": unit_offset,
        "inner_weight": draw(rng, hidden, dtype=dtype) if inner else None,
        "out": torch.full((tokens, hidden), NAN, dtype=dtype) if rng.random() < 0.5 else None,
    }
    compare(small_triton.add_rms_norm, small_torch.add_rms_norm, given)


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", NORM)
def test_add_rms_norm(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    check_norm(shape[0], shape, dtype, most=6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", range(300))
def test_add_rms_norm_native(case: int) -> None:
    check_norm(case, NORM[case % 10], torch.float32 if case % 7 == 0 else torch.bfloat16, most=[3, 40, 300][case % 3])


@plain
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_the_norms_twin_is_the_module_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    made = {"llama": LlamaRMSNorm, "qwen3": Qwen3RMSNorm, "gemma2": Gemma2RMSNorm, "gemma3": Gemma3RMSNorm}[family]
    rng = np.random.default_rng(1)
    module, inner = made(96, eps=1e-5).to(dtype), made(96, eps=1e-5).to(dtype)
    module.weight.data.copy_(draw(rng, 96, dtype=dtype))
    inner.weight.data.copy_(draw(rng, 96, dtype=dtype))
    x, residual = draw(rng, 7, 96, dtype=dtype), draw(rng, 7, 96, dtype=dtype)
    gemma = family.startswith("gemma")
    with torch.no_grad():
        assert torch.equal(small_torch.add_rms_norm(x, None, module.weight, 1e-5, unit_offset=gemma), module(x))
        summed = residual + inner(x)
        got = small_torch.add_rms_norm(
            x, residual, module.weight, 1e-5, unit_offset=gemma, inner_weight=inner.weight
        )  # fmt: skip
        assert torch.equal(residual, summed)
        assert torch.equal(got, module(summed))


@plain
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_rotations_twin_is_the_attention_modules_bit_for_bit(family: str) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    shape = (4, 2, 32, 32, 32, False, False, False)
    given = rope_case(3, shape, torch.bfloat16, most=20)
    q, k, v = parts(given.pop("merged").nan_to_num(0.5), shape)
    plain_q, plain_k = q.clone(), k.clone()
    given["slots"] = torch.arange(len(q))
    if family != "llama":
        norm = (Qwen3RMSNorm if family == "qwen3" else Gemma3RMSNorm)(32, eps=1e-5).bfloat16()
        norm.weight.data.copy_(draw(np.random.default_rng(0), 32, dtype=torch.bfloat16))
        weight = norm.weight.detach()
        given |= {"q_weight": weight, "k_weight": weight, "unit_offset": family == "gemma3"}
        plain_q, plain_k = norm(q).detach(), norm(k).detach()
    want_q, want_k = apply_rotary_pos_emb(plain_q, plain_k, given["cos"], given["sin"], unsqueeze_dim=1)
    given["q_out"] = torch.empty_like(q)
    small_torch.rope_and_write(q, k, v, **given)
    assert torch.equal(given["q_out"], want_q)
    assert torch.equal(given["k_cache"][: len(q)], want_k)
    assert torch.equal(given["v_cache"][: len(q)], v)


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
    compare(small_triton.act_and_mul, small_torch.act_and_mul, given)


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
def test_the_activations_twin_is_the_module_bit_for_bit(name: str, activation: str) -> None:
    from transformers.activations import ACT2FN

    rng = np.random.default_rng(2)
    gate, up = draw(rng, 9, 50, dtype=torch.bfloat16), draw(rng, 9, 50, dtype=torch.bfloat16)
    want = ACT2FN[name](gate) * up
    assert torch.equal(small_torch.act_and_mul(gate, up, activation=activation), want)
    assert torch.equal(small_torch.act_and_mul(torch.cat((gate, up), 1), activation=activation), want)
    for module in (small_torch, small_triton):
        with pytest.raises(ValueError, match="'relu' is neither"):
            module.act_and_mul(gate, up, activation="relu")
