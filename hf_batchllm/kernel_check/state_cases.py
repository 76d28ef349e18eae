"""Cases of layers that carry a state: convolutions, delta rules, state spaces, and their norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..kernels import (
    convolution_torch,
    delta_rule_torch,
    gated_ops_torch,
    selective_scan_torch,
    state_space_torch,
)
from ..kernels.gated_ops_torch import NormForm
from ..kernels.spans import Spans
from .comparing import Where, near

Cases = dict[str, Callable[[], None]]


def states(where: Where) -> Cases:
    from ..kernels import (
        convolution_triton,
        delta_rule_triton,
        gated_ops_triton,
        selective_scan_triton,
        state_space_triton,
    )

    kinds = {"decode": [1, 1, 1], "prompts": [130, 64, 7]}

    def both(kernel: Any, twin: Any, given: dict[str, Any], lengths: list[int], **options: Any) -> None:
        spans = Spans.of(
            lengths, [-1, 0, 1], [2, 3, 1], device=where.device
        )  # no slot is both read and written by others
        results = []
        for function in (kernel, twin):
            states = given["states"].clone()
            results.append((function(**given | {"states": states}, spans=spans, **options), states))
        # Products of half precision go into float32, too.
        near(results[0][0], results[1][0], like=where.half)
        near(results[0][1], results[1][1], "the state", like=where.half)

    def convolution(lengths: list[int], biased: bool = False) -> None:
        generator = where.generator()
        given = {
            "x": where.random(generator, sum(lengths), 256),
            "weight": where.random(generator, 256, 4),
            "states": where.random(generator, 4, 3, 256),
            "bias": where.random(generator, 256) if biased else None,
        }
        kernel, twin = convolution_triton.short_convolution, convolution_torch.short_convolution
        both(kernel, twin, given, lengths, activation=None if biased else "silu")

    def delta_rule(lengths: list[int], by_key: bool = False) -> None:
        """``by_key``: each number of a key is forgotten in its own time."""
        generator, tokens, heads = where.generator(), sum(lengths), 4
        given = {
            "q": where.random(generator, tokens, 2, 128),
            "k": where.random(generator, tokens, 2, 128),
            "v": where.random(generator, tokens, heads, 128),
            "decay": -where.random(generator, tokens, heads, *([128] if by_key else []), dtype=torch.float32).abs(),
            "beta": where.random(generator, tokens, heads).sigmoid(),
            "states": where.random(generator, 4, heads, 128, 128, dtype=torch.float32),
        }
        both(delta_rule_triton.delta_rule, delta_rule_torch.delta_rule, given, lengths, normalise=True)

    def state_space(lengths: list[int]) -> None:
        generator, tokens, heads = where.generator(), sum(lengths), 4
        given = {
            "x": where.random(generator, tokens, heads, 64),
            "dt": where.random(generator, tokens, heads) - 2,
            "a": -where.random(generator, heads, dtype=torch.float32).exp(),
            "b": where.random(generator, tokens, 1, 128),
            "c": where.random(generator, tokens, 1, 128),
            "d": where.random(generator, heads),
            "dt_bias": where.random(generator, heads),
            "states": where.random(generator, 4, heads, 64, 128, dtype=torch.float32),
        }
        both(state_space_triton.state_space, state_space_torch.state_space, given, lengths)

    def scan(lengths: list[int]) -> None:
        generator, tokens, channels = where.generator(), sum(lengths), 64
        given = {
            "x": where.random(generator, tokens, channels),
            "dt": where.random(generator, tokens, channels) - 2,
            "a": -where.random(generator, channels, 16, dtype=torch.float32).exp(),
            "b": where.random(generator, tokens, 16),
            "c": where.random(generator, tokens, 16),
            "d": where.random(generator, channels),
            "z": where.random(generator, tokens, channels),
            "dt_bias": where.random(generator, channels),
            "states": where.random(generator, 4, channels, 16, dtype=torch.float32),
        }
        both(selective_scan_triton.selective_scan, selective_scan_torch.selective_scan, given, lengths)

    def gates() -> None:
        generator = where.generator()
        a, b, a_log, bias = (where.random(generator, *shape) for shape in ((19, 8), (19, 8), (8,), (8,)))
        results = [module.decay_and_beta(a, b, a_log, bias) for module in (gated_ops_triton, gated_ops_torch)]
        for ours, twins in zip(*results, strict=True):
            near(ours, twins)
        x, gate, weight = (where.random(generator, *shape) for shape in ((19, 8, 128), (19, 8, 128), (128,)))
        for form in (NormForm(), NormForm(gate_first=True, rounds=False), NormForm(activation="sigmoid")):
            near(
                gated_ops_triton.gated_norm(x, gate, weight, 1e-6, form),
                gated_ops_torch.gated_norm(x, gate, weight, 1e-6, form),
            )

    made: Cases = {"gates and norms": gates}
    for kind, lengths in kinds.items():
        for function in (convolution, delta_rule, state_space, scan):
            made[f"{function.__name__.replace('_', ' ')}, {kind}"] = partial(function, lengths)
        made[f"convolution with a bias, {kind}"] = partial(convolution, lengths, biased=True)
        made[f"delta rule by key, {kind}"] = partial(delta_rule, lengths, by_key=True)
    return made
