"""Cases of mixtures of experts: choosing experts, their rows, their products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..kernels import experts_torch, routing_torch
from ..kernels.experts_torch import Gating
from ..kernels.routing_torch import Rule
from .comparing import Where, near, same

Cases = dict[str, Callable[[], None]]
_GROUPS = Rule(4, "sigmoid", groups=8, top_groups=4, group_best=2, added_to_sum=1e-20, factor=2.5)


def experts(where: Where) -> Cases:
    from ..kernels import experts_triton, routing_triton

    count, hidden, inter, top = 8, 256, 128, 2

    def mixture(tokens: int, interleaved: bool) -> None:
        """``interleaved``: weights, gates and biases as in GPT-OSS."""
        generator = where.generator()
        logits, x = where.random(generator, tokens, count), where.random(generator, tokens, hidden)
        tile = experts_triton.rows_of_a_tile(tokens * top, count, where.half)
        chosen, rows = routing_triton.choose(logits, Rule(top), tile, where.half, None)
        same(chosen.indices, routing_torch.choose(logits, Rule(top), tile, where.half, None)[0].indices, but=top)
        up = where.random(generator, count, 2 * inter, hidden) / 16
        down = where.random(generator, count, hidden, inter) / 16
        up_bias = down_bias = None
        if interleaved:  # weights stand the other way round
            up, down = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (up, down))
            up_bias, down_bias = where.random(generator, count, 2 * inter), where.random(generator, count, hidden)
        gating = Gating("gpt_oss", 7.0, interleaved=True) if interleaved else Gating()
        results = []
        for module in (experts_triton, experts_torch):
            made = module.up_products(x, up, up_bias, rows, top, gating)
            results.append(module.sum_of_shares(module.down_products(made, down, down_bias, rows), chosen.shares))
        near(*results)

    def choices(rule: Rule, biased: bool) -> None:
        """A router's rule: which experts, with which shares. ``biased``: as in DeepSeek's."""
        generator, tokens, experts = where.generator(), 60, 32
        logits = where.random(generator, tokens, experts, dtype=torch.float32)
        bias = where.random(generator, experts, dtype=torch.float32) / 4 if biased else None
        tile = experts_triton.rows_of_a_tile(tokens * rule.top, experts, where.half)
        found = [
            module.choose(logits, rule, tile, torch.float32, bias)[0] for module in (routing_triton, routing_torch)
        ]
        same(found[0].indices, found[1].indices, "the experts")
        near(found[0].shares, found[1].shares, "the shares")

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

    made: Cases = {
        "rows of choices": rows_of_choices,
        "choices in groups": partial(choices, _GROUPS, biased=True),
        "choices by sigmoids": partial(choices, Rule(4, "sigmoid", added_to_sum=1e-20), biased=False),
        "choices by logits": partial(choices, Rule(4, "logits", share="softmax"), biased=False),
        "choices, shares as they are": partial(choices, Rule(4, share="scores"), biased=False),
    }
    for tokens, interleaved in ((5, False), (60, False), (300, False), (900, False), (60, True), (900, True)):
        name = f"{tokens} tokens{', interleaved' if interleaved else ''}"
        made[name] = partial(mixture, tokens, interleaved)
    return made
