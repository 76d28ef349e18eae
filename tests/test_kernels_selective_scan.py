"""Mamba-1's selective scan: the kernel beside its plain reference, and the reference beside transformers' code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support_kernels import draw, kernel, plain
from test_kernels_states import (
    BFLOAT16,
    CASES,
    FLOAT32,
    SLOTS,
    TOLERANCE,
    assert_near,
    compare,
    each_span,
    spans_of,
    tokens_of,
)
from transformers.models.mamba.modeling_mamba import mamba_selective_scan, mamba_selective_state_update

from hf_batchllm.kernels.lists.spans import Spans
from hf_batchllm.kernels.reference import selective_scan_torch
from hf_batchllm.kernels.reference.selective_scan_torch import selective_scan
from hf_batchllm.kernels.triton import selective_scan_triton

CHANNELS = 37  # a block and a part of one


def drawn(seed: int, tokens: int, dtype: torch.dtype, state_dim: int = 16) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    # As mixers hand them over: x and z are parts of wider rows, dt has its tokens side by side.
    wide, keys = draw(rng, tokens, 2 * CHANNELS, dtype=dtype), draw(rng, tokens, 2 * state_dim + 3, dtype=dtype)
    return {
        "x": wide[:, :CHANNELS],
        "dt": (draw(rng, CHANNELS, tokens, dtype=dtype) * 4 - 4).T,
        "a": -draw(rng, CHANNELS, state_dim, dtype=FLOAT32).exp(),
        "b": keys[:, 3 : 3 + state_dim],
        "c": keys[:, 3 + state_dim :],
        "d": draw(rng, CHANNELS, dtype=FLOAT32),
        "z": wide[:, CHANNELS:],
        "dt_bias": draw(rng, CHANNELS, dtype=FLOAT32),
        "states": draw(rng, SLOTS, CHANNELS, state_dim, dtype=FLOAT32),
    }


@kernel
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kernels(case: str, dtype: torch.dtype) -> None:
    reference, part = selective_scan, 4 * TOLERANCE[dtype]
    given = drawn(1, tokens_of(case), dtype)
    compare(selective_scan_triton.selective_scan, reference, given, case, part)
    bare = drawn(2, tokens_of(case), dtype, 5) | {"d": None, "z": None, "dt_bias": None}
    bare["dt"] = bare["dt"].abs() * 0.1
    compare(selective_scan_triton.selective_scan, reference, bare, case, part, softplus=False)


@plain
@pytest.mark.parametrize("case", CASES)
def test_the_reference(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_scan_torch, "_VALUES_AT_ONCE", 4 * CHANNELS * 16)  # four tokens of a span at a time
    given = drawn(3, tokens_of(case), FLOAT32)
    before = given["states"].clone()
    made = selective_scan(**given, spans=spans_of(case))
    for mine, source, target in each_span(case):
        want, state = as_generate(given, mine, before[source] if source >= 0 else None)
        assert_near(made[mine], want, 2e-6)
        if target >= 0:
            assert_near(given["states"][target], state, 2e-6)


def as_generate(
    given: dict[str, Any], tokens: slice, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:  # [tokens, channels], [channels, state_dim]
    """What transformers computes: a prompt in one call, and each token after a state in one of its own."""
    x, dt, b, c, z = (given[name][tokens] for name in ("x", "dt", "b", "c", "z"))
    a, d, bias = (given[name] for name in ("a", "d", "dt_bias"))
    if state is None:
        x, dt, b, c = (each.T[None] for each in (x, dt, b, c))
        out, left = mamba_selective_scan(
            x, dt, a, b, c, D=d, z=z.T[None], delta_bias=bias, delta_softplus=True, return_last_state=True
        )
        return out[0].T, left[0]
    left, made = state[None].clone(), []
    for at in range(len(x)):
        x_, dt_, b_, c_, z_ = (each[at, None] for each in (x, dt, b, c, z))
        made.append(mamba_selective_state_update(left, x_, dt_, a, b_, c_, d, z=z_, dt_bias=bias, dt_softplus=True))
    return torch.cat(made), left[0]


@plain
def test_steps_of_time_are_rounded_as_transformers_rounds_them() -> None:
    """In half precision all else is a little more exact than there: what is read of a state is not rounded."""
    given = drawn(4, 19, BFLOAT16)
    want, state = as_generate(given, slice(None), None)
    made = selective_scan(**given, spans=Spans.of([19], [-1], [2]))
    assert_near(given["states"][2], state.float(), 1e-5)
    assert_near(made, want.float(), TOLERANCE[BFLOAT16])
