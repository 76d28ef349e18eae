"""How fast mixtures of experts are on this GPU, beside transformers' grouped products and the floor.

    python examples/benchmarks/bench_experts.py                                   # three models' shapes
    python examples/benchmarks/bench_experts.py --alike 1                         # some experts get far more tokens

Each line is the router and the experts of one layer, for so many tokens. Times are microseconds for a layer: medians of
replays of a CUDA graph that goes over several layers by turns, so that weights come from memory.

    met     experts of a layer that get a token at least
    floor   of the products alone: reading the weights of those experts at a copy's rate, or multiplying at the rate of
            large dense products, what takes longer; for gate and up, and for down. Both rates are measured first.
    ours    routing, sorting, products and the sum of each token, as fused layers run them; "of ours": the floor's share
    theirs  the same by transformers' own router and grouped products; then how many times as long
    route, up, down, sum   the kernels of ours alone; behind up and down the floor's share
    dense   products of the same sizes with one matrix for all, from 1,024 tokens on; then how near up and down come
    differ  between the results of ours and theirs, as a share of these
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
from common import graph_ms_of_each
from torch import nn

from hf_batchllm.bench.floor import measure_rates
from hf_batchllm.bench.workload import SHAPES
from hf_batchllm.kernels.reference.experts_torch import Gating
from hf_batchllm.patches.fusable_experts import Experts, mixtures
from hf_batchllm.patches.fused_experts import ExpertKernels, Handed, experts_forward, router_forward
from hf_batchllm.patches.fusion import triton_fused_kernels
from hf_batchllm.patches.routers import Router

DTYPE = torch.bfloat16
FROM_DENSE = 1024  # tokens
KERNELS = triton_fused_kernels().experts
NAMES = tuple(common.WITH_EXPERTS)
LAYER_BYTES = 4e9  # of experts of all layers: far more than a cache holds, even where a step meets few of them
VALUE_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class ExpertShape:
    """The sizes of a layer's experts."""

    experts: int
    top: int
    hidden: int
    inter: int

    @classmethod
    def of(cls, name: str) -> ExpertShape:
        fields = SHAPES[name]
        return cls(
            experts=fields["num_experts"] if "num_experts" in fields else fields["num_local_experts"],
            top=fields["num_experts_per_tok"],
            hidden=fields["hidden_size"],
            inter=fields.get("moe_intermediate_size", fields["intermediate_size"]),
        )

    @property
    def up_weights(self) -> int:
        """Weights of gate and up of one expert; down has half as many."""
        return 2 * self.inter * self.hidden

    @property
    def layers(self) -> int:
        """How many layers a graph goes over: enough for weights to come from memory."""
        return max(2, round(LAYER_BYTES / (VALUE_BYTES * self.experts * 1.5 * self.up_weights)))

    def floors(self, tokens: int, met: float, copy: float, matmul: float) -> tuple[float, float]:
        """Milliseconds of the products of gate and up, and of down: reading what is met, or computing all pairs."""

        def floor(weights: float) -> float:
            moved, computed = VALUE_BYTES * met * weights, 2 * tokens * self.top * weights
            return 1e3 * max(moved / copy, computed / matmul)

        return floor(self.up_weights), floor(self.up_weights / 2)


@dataclass
class Layer:
    """One layer's experts and their router, with the inputs of a step."""

    found: Experts
    router: nn.Module
    known: Router
    x: torch.Tensor  # [tokens, hidden]
    indices: torch.Tensor  # [tokens, top]
    shares: torch.Tensor  # [tokens, top]

    @property
    def met(self) -> int:
        return len(self.indices.unique())

    @property
    def gating(self) -> Gating:
        return self.found.gating(self.found.module)

    def weight(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[experts, out, in], and its biases."""
        experts = self.found.module
        weight = getattr(experts, name)
        return weight.transpose(1, 2) if experts.is_transposed else weight, getattr(experts, f"{name}_bias", None)

    def theirs(self) -> torch.Tensor:
        """transformers' own code."""
        _, shares, indices = self.router(self.x)
        made: torch.Tensor = self.found.module(self.x, indices, shares)
        return made

    def ours(self, kernels: ExpertKernels) -> torch.Tensor:
        handed = Handed()
        _, shares, indices = router_forward(self.router, self.known, kernels, handed)(self.x)
        made: torch.Tensor = experts_forward(self.found, kernels, handed)(self.x, indices, shares)
        return made


def experts_of(name: str, count: int, device: str, dtype: torch.dtype, **less: Any) -> list[Experts]:
    """The experts of ``count`` layers with random weights. ``less``: other values for fields of the shape."""
    model = common.random_shape(name, count, device, dtype, **{"vocab_size": 256} | less)
    found = list(mixtures(model))
    for each in found:
        if each.why_not or not each.routers:
            raise SystemExit(f"{name}: {each.why_not or 'its router has no kernel'}")
    return found


@torch.no_grad()
def with_tokens(found: Iterable[Experts], tokens: int, alike: float = 0.0) -> list[Layer]:
    """Random tokens for each layer. ``alike``: how far they all lie in one direction, which favours some experts."""
    layers = []
    for each in found:
        _, router, known = each.routers[0]
        weight = each.module.down_proj
        hidden = router.weight.shape[1]
        assert isinstance(hidden, int)
        x = torch.randn(tokens, hidden, dtype=weight.dtype, device=weight.device)
        x += alike * torch.randn(hidden, dtype=weight.dtype, device=weight.device)
        _, shares, indices = router(x)
        layers.append(Layer(each, router, known, x, indices, shares))
    return layers


def pieces_of(layer: Layer, shape: ExpertShape) -> dict[str, Callable[[], object]]:
    """The kernels of ours, each on what the one before it has made."""
    route = router_forward(layer.router, layer.known, KERNELS, Handed())
    (up, up_bias), (down, down_bias) = layer.weight("gate_up_proj"), layer.weight("down_proj")
    tile = KERNELS.rows_of_a_tile(layer.indices.numel(), shape.experts, DTYPE)
    rows = KERNELS.rows_of_experts(layer.indices, shape.experts, tile)
    made = KERNELS.up_products(layer.x, up, up_bias, rows, shape.top, layer.gating)
    results = KERNELS.down_products(made, down, down_bias, rows)
    return {
        "route": lambda: route(layer.x),
        "up": lambda: KERNELS.up_products(layer.x, up, up_bias, rows, shape.top, layer.gating),
        "down": lambda: KERNELS.down_products(made, down, down_bias, rows),
        "sum": lambda: KERNELS.sum_of_shares(results, layer.shares),
    }


def dense_ms(shape: ExpertShape, tokens: int, replays: int) -> float:
    """Products of as many rows, with the matrices of one expert."""
    pairs = tokens * shape.top

    up, down = common.randn(2 * shape.inter, shape.hidden), common.randn(shape.hidden, shape.inter)
    x, made = common.randn(pairs, shape.hidden), common.randn(pairs, shape.inter)

    def products() -> None:
        torch.nn.functional.linear(x, up)
        torch.nn.functional.linear(made, down)

    return graph_ms_of_each([None], lambda _: products(), replays)  # the first call lets cuBLAS pick its kernels


def theirs_us(layers: list[Layer], replays: int) -> float | None:
    """None if their code cannot be captured."""
    try:
        return 1e3 * graph_ms_of_each(layers, Layer.theirs, replays)
    except RuntimeError as error:
        print(f"transformers' own code is in no graph: {str(error).splitlines()[0]}")
        torch.cuda.synchronize()
        return None


@torch.no_grad()
def measure(shape: ExpertShape, layers: list[Layer], copy: float, matmul: float, replays: int) -> dict[str, Any]:
    tokens = len(layers[0].x)
    met = sum(layer.met for layer in layers) / len(layers)
    of_up, of_down = shape.floors(tokens, met, copy, matmul)
    ours, theirs = layers[0].ours(KERNELS).double(), layers[0].theirs().double()
    figures: dict[str, Any] = {"tokens": tokens, "met": met, "floor": 1e3 * (of_up + of_down)}
    figures["differ"] = float((ours - theirs).norm() / theirs.norm())
    figures["dense"] = 1e3 * dense_ms(shape, tokens, replays) if tokens >= FROM_DENSE else None
    figures["theirs"] = theirs_us(layers, replays)
    figures["ours"] = 1e3 * graph_ms_of_each(layers, lambda layer: layer.ours(KERNELS), replays)
    pieces = [pieces_of(layer, shape) for layer in layers]
    for name in pieces[0]:
        figures[name] = 1e3 * graph_ms_of_each([each[name] for each in pieces], lambda piece: piece(), replays)
    figures |= {"of ours": figures["floor"] / figures["ours"], "of up": 1e3 * of_up / figures["up"]}
    figures |= {"of down": 1e3 * of_down / figures["down"]}
    if figures["theirs"]:
        figures["times"] = figures["theirs"] / figures["ours"]
    if figures["dense"]:
        figures["near"] = figures["dense"] / (figures["up"] + figures["down"])
    return figures


COLUMNS = {"shape": "<14", "tokens": "6,", "met": "5.1f", "floor": "7.1f", "ours": "7.1f", "of ours": "7.0%"}
COLUMNS |= {"theirs": "7.1f", "times": "5.1f", "route": "6.1f", "up": "7.1f", "of up": "5.0%", "down": "7.1f"}
COLUMNS |= {"of down": "7.0%", "sum": "6.1f", "dense": "7.1f", "near": "5.0%", "differ": "7.1e"}


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--shapes": {"nargs": "+", "choices": NAMES, "default": NAMES},
        "--tokens": {"nargs": "+", "type": int, "default": [1, 16, 64, 256, 1024, 8192]},
        "--alike": {"type": float, "default": 0.0, "help": "how far all tokens resemble each other (default: 0)"},
    }
    options = common.read(__doc__, arguments, flags, on="gpu", figures=True, replays=(15, "of each graph"))
    rates = measure_rates(torch.device("cuda"), DTYPE)
    print(f"{common.card()}; {rates}; microseconds for a layer")
    table = common.Table(COLUMNS)
    for name in options.shapes:
        shape = ExpertShape.of(name)
        found = experts_of(name, shape.layers, "cuda", DTYPE)
        for tokens in options.tokens:
            layers = with_tokens(found, tokens, options.alike)
            figures = measure(shape, layers, rates.copy, rates.operations, options.replays)
            table.add({"shape": name, **figures}, alike=options.alike)
        del found, layers
        torch.cuda.empty_cache()
    table.write(options.json, rates=vars(rates))


if __name__ == "__main__":
    main()
