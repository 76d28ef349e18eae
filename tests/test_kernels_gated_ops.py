"""The kernels of ``gated_ops_triton`` against their references, which are held against transformers elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support_kernels import DEVICE, draw, kernel

from hf_batchllm.kernels.reference import gated_ops_torch
from hf_batchllm.kernels.reference.gated_ops_torch import NormForm
from hf_batchllm.kernels.triton import gated_ops_triton

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


FORMS = {
    "delta nets": NormForm(),
    "state spaces": NormForm(gate_first=True),
    "strict": NormForm(rounds=False, activation="sigmoid"),
    "strict, gate first": NormForm(gate_first=True, rounds=False),
}


def norm_case(dtype: torch.dtype, tokens: int, parts: int, dim: int, weights: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    wide = draw(rng, tokens, 2 * parts * dim + 3, dtype=dtype)  # the gate stands in the midst of a wider row
    return {
        "x": draw(rng, tokens, parts, dim, dtype=dtype),
        "gate": wide[:, 3 : 3 + parts * dim].unflatten(1, (parts, dim)),
        "weight": draw(rng, weights * dim, dtype=dtype),
    }


def run_norm(given: dict[str, Any], form: NormForm) -> None:
    ours = gated_ops_triton.gated_norm(**{name: each.to(DEVICE) for name, each in given.items()}, eps=1e-6, form=form)
    near(ours, gated_ops_torch.gated_norm(**given, eps=1e-6, form=form), given["x"].dtype)


@kernel
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "parts", "dim"), [(1, 3, 8), (13, 4, 40), (9, 2, 128), (3, 1, 5000)])
def test_gated_norm(dtype: torch.dtype, tokens: int, parts: int, dim: int, form: str) -> None:
    run_norm(norm_case(dtype, tokens, parts, dim), FORMS[form])
    run_norm(norm_case(dtype, tokens, parts, dim, weights=parts), FORMS[form])


@kernel
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_another_type(form: str) -> None:
    given = norm_case(torch.bfloat16, 5, 3, 24)
    given["weight"] = given["weight"].float()
    ours = gated_ops_triton.gated_norm(
        **{name: each.to(DEVICE) for name, each in given.items()}, eps=1e-6, form=FORMS[form]
    )
    near(ours, want := gated_ops_torch.gated_norm(**given, eps=1e-6, form=FORMS[form]), torch.bfloat16)
    assert want.dtype == (torch.float32 if form == "state spaces" else torch.bfloat16)


@kernel
def test_rows_of_no_tokens() -> None:
    run_norm(norm_case(torch.float32, 0, 2, 8), NormForm())
