"""Cases of all kernels but attention: fused layers, sampling, mixtures of experts, layers that carry a state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..kernels import (
    convolution_torch,
    delta_rule_torch,
    digest_torch,
    experts_torch,
    gated_ops_torch,
    layer_ops_torch,
    penalties_torch,
    routing_torch,
    sample_torch,
    selective_scan_torch,
    state_space_torch,
    top_k_top_p_torch,
)
from ..kernels.experts_torch import Gating
from ..kernels.gated_ops_torch import NormForm
from ..kernels.routing_torch import Rule
from ..kernels.sample_torch import RUNNING, Rows
from ..kernels.spans import Spans
from .comparing import Where, near, same

Cases = dict[str, Callable[[], None]]


def layers(where: Where) -> Cases:
    from ..kernels import digest_triton, layer_ops_triton

    def norm() -> None:
        results = []
        for module in (layer_ops_triton, layer_ops_torch):
            generator = where.generator()
            x, residual, weight = (where.random(generator, *shape) for shape in ((29, 2048), (29, 2048), (2048,)))
            made = module.add_rms_norm(x, residual, weight, 1e-6)
            results.append([*made] if isinstance(made, tuple) else [made, residual])
        for ours, twins in zip(*results, strict=True):
            near(ours, twins)

    def activation() -> None:
        gate = where.random(where.generator(), 29, 3000)
        for name in ("silu", "gelu_tanh"):
            near(
                layer_ops_triton.act_and_mul(gate, activation=name), layer_ops_torch.act_and_mul(gate, activation=name)
            )

    def digest() -> None:
        flat = torch.randint(0, 256, (300_001,), generator=where.generator(), dtype=torch.uint8, device="cpu").to(
            where.device
        )
        same(digest_triton.digest(flat), digest_torch.digest(flat))

    return {"norm": norm, "activation": activation, "digest of weights": digest}


def sampling(where: Where) -> Cases:
    from ..kernels import penalties_triton, sample_triton, top_k_top_p_triton

    rows, vocabulary = 8, 5003

    def logits(dtype: torch.dtype | None = None) -> torch.Tensor:
        return where.random(where.generator(), rows, vocabulary, dtype=dtype) * 2

    def greedy() -> None:
        same(sample_triton.greedy(logits()), sample_torch.greedy(logits()))

    def draws() -> None:
        numbers = torch.arange(rows, device=where.device)
        seed = torch.tensor([7], device=where.device)
        results = [
            module.gumbel_sample(logits(), 0.8, seed, numbers, numbers % 3, 5 * numbers)
            for module in (sample_triton, sample_torch)
        ]
        same(results[0], results[1], "the tokens", but=1)

    def cutoffs() -> None:
        for options in ({"top_k": 40}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}):
            given: dict[str, Any] = {"temperature": 0.7, **options}
            results = [module.cutoffs(logits(), **given) for module in (top_k_top_p_triton, top_k_top_p_torch)]
            same(results[0], results[1], "the cutoffs", but=1)

    def penalties() -> None:
        tokens = torch.arange(0, vocabulary, 610, device=where.device)[:rows]
        results = []
        for module in (penalties_triton, penalties_torch):
            seen = torch.zeros(rows, -(-vocabulary // 32), dtype=torch.int32, device=where.device)
            module.mark_seen(seen, tokens, vocabulary)
            results.append((seen, module.penalise(logits(torch.float32), seen=seen, penalty=1.3)))
        same(results[0][0], results[1][0], "the bits")
        near(results[0][1], results[1][1])

    def steps() -> None:
        """Rows of which some end at a token, some at a length, and some for want of a page."""
        count, page_size = 40, 16
        number = torch.arange(count, dtype=torch.int32, device="cpu")
        begun = Rows(
            token=number.long(), position=number.long() + 8, length=number + 9, slot=number.long() + 100,
            made=torch.ones_like(number), remaining=1 + number % 5, status=torch.full_like(number, RUNNING),
            start=number // 16 * 16, pages=torch.stack([number, number + 50, number % 4 - 1], dim=1).contiguous(),
            produced=torch.full((count, 4), -7, dtype=torch.int64, device="cpu"),
        )  # fmt: skip
        eos = torch.tensor([2, 7, -1], device=where.device)
        both = [begun.to(where.device), Rows(*(each.clone() for each in vars(begun).values())).to(where.device)]
        for step in range(4):
            sampled = (number.long() * 3 + step).to(where.device) % 11
            for module, rows in zip((sample_triton, sample_torch), both, strict=True):
                module.advance(rows, sampled, eos, page_size)
        for name, wanted in vars(both[1]).items():
            same(getattr(both[0], name), wanted, name)

    return {"greedy": greedy, "draws": draws, "cutoffs": cutoffs, "penalties": penalties, "steps of rows": steps}


def experts(where: Where) -> Cases:
    from ..kernels import experts_triton, routing_triton

    count, hidden, inter, top = 8, 256, 128, 2

    def mixture(tokens: int, interleaved: bool) -> None:
        generator = where.generator()
        logits, x = where.random(generator, tokens, count), where.random(generator, tokens, hidden)
        tile = experts_triton.rows_of_a_tile(tokens * top, count, where.half)
        chosen, rows = routing_triton.choose(logits, Rule(top), tile, where.half, None)
        same(chosen.indices, routing_torch.choose(logits, Rule(top), tile, where.half, None)[0].indices, but=top)
        up = where.random(generator, count, 2 * inter, hidden) / 16
        down = where.random(generator, count, hidden, inter) / 16
        if interleaved:  # as in GPT-OSS, which holds its weights the other way round
            up, down = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (up, down))
        gating = Gating("gpt_oss", 7.0, interleaved=True) if interleaved else Gating()
        results = []
        for module in (experts_triton, experts_torch):
            made = module.up_products(x, up, None, rows, top, gating)
            results.append(module.sum_of_shares(module.down_products(made, down, None, rows), chosen.shares))
        near(*results)

    def rows_of_choices() -> None:
        """Choices that the model's own router made. The order of an expert's rows is free."""
        generator, tokens = where.generator(), 60
        chosen = where.random(generator, tokens, count).topk(top).indices
        x = where.random(generator, tokens, hidden)
        up = where.random(generator, count, 2 * inter, hidden) / 16
        tile = experts_triton.rows_of_a_tile(tokens * top, count, where.half)
        found = [module.rows_of_experts(chosen, count, tile) for module in (routing_triton, routing_torch)]
        same(found[0].counts, found[1].counts, "the counts")
        down = where.random(generator, count, hidden, inter) / 16
        shares = torch.full_like(chosen, 1, dtype=where.half) / top
        results = []
        for rows in found:
            made = experts_torch.up_products(x, up, None, rows, top, Gating())
            results.append(experts_torch.sum_of_shares(experts_torch.down_products(made, down, None, rows), shares))
        near(results[0], results[1])

    made: Cases = {"rows of choices": rows_of_choices}
    for tokens, interleaved in ((5, False), (60, False), (300, False), (900, False), (60, True), (900, True)):
        name = f"{tokens} tokens{', interleaved' if interleaved else ''}"
        made[name] = partial(mixture, tokens, interleaved)
    return made


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

    def convolution(lengths: list[int]) -> None:
        generator = where.generator()
        given = {
            "x": where.random(generator, sum(lengths), 256),
            "weight": where.random(generator, 256, 4),
            "bias": None,
            "states": where.random(generator, 4, 3, 256),
        }
        kernel, twin = convolution_triton.short_convolution, convolution_torch.short_convolution
        both(kernel, twin, given, lengths, activation="silu")

    def delta_rule(lengths: list[int]) -> None:
        generator, tokens, heads = where.generator(), sum(lengths), 4
        given = {
            "q": where.random(generator, tokens, 2, 128),
            "k": where.random(generator, tokens, 2, 128),
            "v": where.random(generator, tokens, heads, 128),
            "decay": -where.random(generator, tokens, heads, dtype=torch.float32).abs(),
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
        near(
            gated_ops_triton.gated_norm(x, gate, weight, 1e-6, NormForm()),
            gated_ops_torch.gated_norm(x, gate, weight, 1e-6, NormForm()),
        )

    made: Cases = {"gates and norms": gates}
    for function in (convolution, delta_rule, state_space, scan):
        for kind, lengths in kinds.items():
            name = f"{function.__name__.replace('_', ' ')}, {kind}"
            made[name] = partial(function, lengths)
    return made
