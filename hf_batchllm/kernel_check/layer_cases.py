"""Cases of fused layers: norms, activations, the digest of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..kernels import digest_torch, layer_ops_torch
from .comparing import Where, near, same

_SHAPE = 29, 2048


def layers(where: Where) -> dict[str, Callable[[], None]]:
    from ..kernels import digest_triton, layer_ops_triton

    def random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
        generator = where.generator()
        return [where.random(generator, *shape) for shape in shapes]

    def norm(form: str, inner: bool = False) -> None:
        """``inner``: x is normalised before it is added, too, as in Gemma."""
        results = []
        for module in (layer_ops_triton, layer_ops_torch):
            x, residual, weight, before = random(_SHAPE, _SHAPE, _SHAPE[1:], _SHAPE[1:])
            given: dict[str, Any] = {"inner_weight": before} if inner else {}
            made = module.add_rms_norm(x, residual, weight, 1e-6, form=form, **given)
            results.append([*made] if isinstance(made, tuple) else [made, residual])
        for ours, twins in zip(*results, strict=True):
            near(ours, twins)

    def activation(apart: bool) -> None:
        gate, other = random((29, 3000), (29, 3000))
        up = other if apart else None
        for name in ("silu", "gelu_tanh"):
            near(
                layer_ops_triton.act_and_mul(gate, up, activation=name),
                layer_ops_torch.act_and_mul(gate, up, activation=name),
            )

    def digest() -> None:
        flat = torch.randint(0, 256, (300_001,), generator=where.generator(), dtype=torch.uint8, device="cpu").to(
            where.device
        )
        same(digest_triton.digest(flat), digest_torch.digest(flat))

    return {
        "norm": partial(norm, "llama"),
        "norm, as in Gemma": partial(norm, "gemma", inner=True),
        "norm, as in OLMo": partial(norm, "olmo"),
        "norm, as in Cohere": partial(norm, "cohere"),
        "activation": partial(activation, apart=False),
        "activation of two matrices": partial(activation, apart=True),
        "digest of weights": digest,
    }
