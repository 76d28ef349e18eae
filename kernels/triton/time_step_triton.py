"""The step of time of a state space, for kernels; the references call PyTorch's own functions."""

from __future__ import annotations

import triton
import triton.language as tl

_LINEAR_FROM = tl.constexpr(20.0)  # where PyTorch's softplus is its argument


@triton.jit
def softplus(x):  # any shape, float32
    power = tl.exp(tl.minimum(x, _LINEAR_FROM))
    small = power * (1 - power * (0.5 - power / 3))  # where 1 + power would lose it
    soft = tl.where(power < 1e-3, small, tl.log(1 + power))
    return tl.where(x > _LINEAR_FROM, x, soft)


@triton.jit
def time_step(step, bias, SOFTPLUS: tl.constexpr):  # any shape -> the same in float32
    """The time step of what a layer makes. Each result is rounded to the layer's dtype, as PyTorch rounds."""
    TYPE: tl.constexpr = step.dtype
    step = step.to(tl.float32)
    if bias is not None:
        step = (step + bias.to(TYPE).to(tl.float32)).to(TYPE).to(tl.float32)
    if SOFTPLUS:
        step = softplus(step).to(TYPE).to(tl.float32)
    return step


@triton.jit
def limited_time_step(step, bias, least, most, SOFTPLUS: tl.constexpr):
    made = time_step(step, bias, SOFTPLUS)
    return tl.minimum(tl.maximum(made, least), most).to(step.dtype).to(tl.float32)
