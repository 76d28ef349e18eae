"""The kernels of ``gated_ops_triton`` against their twins, and the twins against transformers' modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support_kernels import DEVICE, draw, kernel, plain
from support_state_mixers import mixer_of

from hf_batchllm.kernels import gated_ops_torch, gated_ops_triton

# The last bit of a root or of exp moves a result that is rounded three times by as many steps in half precision.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3 * 2**-7}
DTYPES = [torch.float32, torch.bfloat16]


def near(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    torch.testing.assert_close(ours.cpu(), theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def gates(dtype: torch.dtype, tokens: int, heads: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    wide = (
        draw(rng, tokens, 3 * heads, dtype=dtype) * 12
    )  # from where softplus is next to nothing to where it is linear
    a, b, _ = wide.split(heads, dim=1)
    return {"a": a, "b": b, "a_log": draw(rng, heads, dtype=dtype), "dt_bias": draw(rng, heads, dtype=dtype)}


@kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 67])
def test_decay_and_beta(dtype: torch.dtype, tokens: int) -> None:
    given = gates(dtype, tokens)
    made = gated_ops_triton.decay_and_beta(**{name: each.to(DEVICE) for name, each in given.items()})
    for ours, theirs in zip(made, gated_ops_torch.decay_and_beta(**given), strict=True):
        near(ours, theirs, dtype if theirs.dtype == dtype else torch.float32)


@kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 3, 8), (13, 4, 40), (9, 2, 128)])
def test_norm_and_gate(dtype: torch.dtype, tokens: int, heads: int, dim: int) -> None:
    rng = np.random.default_rng(4)
    wide = draw(rng, tokens, 2 * heads * dim + 3, dtype=dtype)  # the gate stands in the midst of a wider row
    given = {
        "x": draw(rng, tokens, heads, dim, dtype=dtype),
        "gate": wide[:, 3 : 3 + heads * dim].unflatten(1, (heads, dim)),
        "weight": draw(rng, dim, dtype=dtype),
    }
    ours = gated_ops_triton.norm_and_gate(**{name: each.to(DEVICE) for name, each in given.items()}, eps=1e-6)
    near(ours, gated_ops_torch.norm_and_gate(**given, eps=1e-6), dtype)


@plain
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_twin_rounds_as_the_module_does(dtype: torch.dtype) -> None:
    mixer: Any = mixer_of("qwen3_5").to(dtype)
    rng = np.random.default_rng(5)
    x, gate = (draw(rng, 7, mixer.num_v_heads, mixer.head_v_dim, dtype=dtype) for _ in range(2))
    want = mixer.norm(x.flatten(0, 1), gate.flatten(0, 1)).view(x.shape)
    made = gated_ops_torch.norm_and_gate(x, gate, mixer.norm.weight, mixer.norm.variance_epsilon)
    assert torch.equal(made, want)
