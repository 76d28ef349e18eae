"""Cases of fused layers: norms, activations, the digest of weights; mixtures of experts; layers that carry a state."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..kernels.lists.spans import Spans
from ..kernels.reference.experts_torch import Gating
from ..kernels.reference.gated_ops_torch import NormForm
from ..kernels.reference.routing_torch import Rule
from .comparing import Cases, Where, both, held

_TOP = 2  # experts of a token
_GROUPS = Rule(4, "sigmoid", groups=8, top_groups=4, group_best=2, added_to_sum=1e-20, factor=2.5)


def layers(where: Where) -> Cases:
    def norm(form: str, inner: bool = False) -> None:
        """``inner``: x is normalised before it is added, too, as in Gemma."""
        given = where.drawn(x=(29, 2048), residual=(29, 2048), weight=(2048,), inner_weight=(2048,))
        if not inner:
            del given["inner_weight"]
        held("layer_ops", "add_rms_norm", **given, eps=1e-6, form=form)

    def activation(apart: bool) -> None:
        gate, up = where.drawn(gate=(29, 3000), up=(29, 3000)).values()
        for name in ("silu", "gelu_tanh"):
            held("layer_ops", "act_and_mul", gate, up if apart else None, activation=name)

    def digest() -> None:
        flat = torch.randint(0, 256, (300_001,), generator=where.generator(), dtype=torch.uint8, device="cpu")
        held("digest", "digest", flat.to(where.device))

    return {
        "norm": partial(norm, "llama"),
        "norm, as in Gemma": partial(norm, "gemma", inner=True),
        "norm, as in OLMo": partial(norm, "olmo"),
        "norm, as in Cohere": partial(norm, "cohere"),
        "activation": partial(activation, apart=False),
        "activation of two matrices": partial(activation, apart=True),
        "digest of weights": digest,
    }


def experts(where: Where) -> Cases:
    count, hidden, inter = 8, 256, 128

    def tile_of(tokens: int, top: int, experts: int) -> int:
        rows: int = both("experts")[0].rows_of_a_tile(tokens * top, experts, where.half)
        return rows

    def mixture(tokens: int, interleaved: bool = False) -> None:
        """``interleaved``: weights, gates and biases as in GPT-OSS."""
        given = where.drawn(
            logits=(tokens, count), x=(tokens, hidden), up=(count, 2 * inter, hidden), down=(count, hidden, inter),
            up_bias=(count, 2 * inter), down_bias=(count, hidden),
        )  # fmt: skip
        logits, x, up, down, *biases = given.values()
        up, down = up / 16, down / 16
        if interleaved:  # weights stand the other way round
            up, down = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (up, down))
        up_bias, down_bias = biases if interleaved else (None, None)
        gating = Gating("gpt_oss", 7.0, interleaved=True) if interleaved else Gating()
        rule = Rule(_TOP), tile_of(tokens, _TOP, count), where.half, None
        held("routing", lambda module, *given: module.choose(*given)[0].indices, logits, *rule, but=_TOP)
        chosen, rows = both("routing")[0].choose(logits, *rule)

        def mixed(module: Any) -> Any:
            made = module.up_products(x, up, up_bias, rows, _TOP, gating)
            return module.sum_of_shares(module.down_products(made, down, down_bias, rows), chosen.shares)

        held("experts", mixed)

    def choices(rule: Rule, biased: bool = False) -> None:
        """A router's rule: which experts, with which shares. ``biased``: as in DeepSeek's."""
        tokens, experts = 60, 32
        logits, bias = where.drawn(("logits", "bias"), logits=(tokens, experts), bias=(experts,)).values()
        given = logits, rule, tile_of(tokens, rule.top, experts), torch.float32, bias / 4 if biased else None
        held("routing", lambda module, *given: module.choose(*given)[0], *given)

    def rows_of_choices() -> None:
        """Choices that the model's own router made. The order of an expert's rows is free."""
        tokens = 60
        given = where.drawn(
            scores=(tokens, count), x=(tokens, hidden), up=(count, 2 * inter, hidden), down=(count, hidden, inter)
        )
        chosen, tile = given["scores"].topk(_TOP).indices, tile_of(tokens, _TOP, count)
        shares = torch.full_like(chosen, 1, dtype=where.half) / _TOP

        def counted(module: Any) -> Any:
            rows, products = module.rows_of_experts(chosen, count, tile), both("experts")[1]
            made = products.up_products(given["x"], given["up"] / 16, None, rows, _TOP, Gating())
            made = products.down_products(made, given["down"] / 16, None, rows)
            return rows.counts, products.sum_of_shares(made, shares)

        held("routing", counted)

    made: Cases = {
        "rows of choices": rows_of_choices,
        "choices in groups": partial(choices, _GROUPS, biased=True),
        "choices by sigmoids": partial(choices, Rule(4, "sigmoid", added_to_sum=1e-20)),
        "choices by logits": partial(choices, Rule(4, "logits", share="softmax")),
        "choices, shares as they are": partial(choices, Rule(4, share="scores")),
    }
    made |= {f"{tokens} tokens": partial(mixture, tokens) for tokens in (5, 60, 300, 900)}
    return made | {f"{tokens} tokens, interleaved": partial(mixture, tokens, interleaved=True) for tokens in (60, 900)}


def states(where: Where) -> Cases:
    def carried(home: str, function: str, lengths: list[int], given: dict[str, Any], **options: Any) -> None:
        # No slot is both read and written by others.
        spans = Spans.of(lengths, [-1, 0, 1], [2, 3, 1], device=where.device)
        # Products of half precision go into float32, too.
        held(home, function, **given, spans=spans, like=where.half, **options)

    def convolution(lengths: list[int], biased: bool = False) -> None:
        given: dict[str, Any] = where.drawn(x=(sum(lengths), 256), weight=(256, 4), states=(4, 3, 256), bias=(256,))
        if not biased:
            given["bias"] = None
        carried("convolution", "short_convolution", lengths, given, activation=None if biased else "silu")

    def delta_rule(lengths: list[int], by_key: bool = False) -> None:
        """``by_key``: each number of a key is forgotten in its own time."""
        t, heads = sum(lengths), 4
        decay = t, heads, *([128] if by_key else [])
        given = where.drawn(
            ("decay", "states"),
            q=(t, 2, 128), k=(t, 2, 128), v=(t, heads, 128), decay=decay, beta=(t, heads), states=(4, heads, 128, 128),
        )  # fmt: skip
        given |= {"decay": -given["decay"].abs(), "beta": given["beta"].sigmoid()}
        carried("delta_rule", "delta_rule", lengths, given, normalise=True)

    def state_space(lengths: list[int]) -> None:
        t, heads = sum(lengths), 4
        given = where.drawn(
            ("a", "states"),
            x=(t, heads, 64), dt=(t, heads), a=(heads,), b=(t, 1, 128), c=(t, 1, 128), d=(heads,), dt_bias=(heads,),
            states=(4, heads, 64, 128),
        )  # fmt: skip
        given |= {"dt": given["dt"] - 2, "a": -given["a"].exp()}
        carried("state_space", "state_space", lengths, given)

    def scan(lengths: list[int]) -> None:
        t, channels = sum(lengths), 64
        given = where.drawn(
            ("a", "states"),
            x=(t, channels), dt=(t, channels), a=(channels, 16), b=(t, 16), c=(t, 16), d=(channels,), z=(t, channels),
            dt_bias=(channels,), states=(4, channels, 16),
        )  # fmt: skip
        given |= {"dt": given["dt"] - 2, "a": -given["a"].exp()}
        carried("selective_scan", "selective_scan", lengths, given)

    def gates() -> None:
        held("gated_ops", "decay_and_beta", **where.drawn(a=(19, 8), b=(19, 8), a_log=(8,), dt_bias=(8,)))
        given = where.drawn(x=(19, 8, 128), gate=(19, 8, 128), weight=(128,))
        for form in (NormForm(), NormForm(gate_first=True, rounds=False), NormForm(activation="sigmoid")):
            held("gated_ops", "gated_norm", **given, eps=1e-6, form=form)

    made: Cases = {"gates and norms": gates}
    for kind, lengths in {"decode": [1, 1, 1], "prompts": [130, 64, 7]}.items():
        made |= {
            f"convolution, {kind}": partial(convolution, lengths),
            f"delta rule, {kind}": partial(delta_rule, lengths),
            f"state space, {kind}": partial(state_space, lengths),
            f"scan, {kind}": partial(scan, lengths),
            f"convolution with a bias, {kind}": partial(convolution, lengths, biased=True),
            f"delta rule by key, {kind}": partial(delta_rule, lengths, by_key=True),
        }
    return made
