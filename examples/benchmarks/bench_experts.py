"""How fast mixtures of experts are on this GPU, beside transformers' grouped products and the floor.

    python examples/benchmarks/bench_experts.py                                   # three models' shapes
    python examples/benchmarks/bench_experts.py --shapes qwen3-30b-a3b --tokens 16 256 8192
    python examples/benchmarks/bench_experts.py --alike 1                         # some experts get far more tokens

Each line is the router and the experts of one layer, for so many tokens. Times are microseconds for a layer: medians of
replays of a CUDA graph that goes over several layers by turns, so that weights come from memory.

    met     experts of a layer that get a token at least
    floor   of the products alone: reading the weights of those experts at a copy's rate, or multiplying at the rate of
            large dense products, what takes longer; for gate and up, and for down. Both rates are measured first.
    ours    routing, sorting, products and the sum of each token, as fused layers run them; then its share of the floor
    theirs  the same by transformers' own router and grouped products; then how many times as long
    route, up, down, sum   the kernels of ours alone; behind up and down their share of the floor
    dense   products of the same sizes with one matrix for all, from 1,024 tokens on; then how near up and down come
    differ  between the results of ours and theirs, as a share of these
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from bench_support.expert_layers import NAMES, ExpertShape, Layer, experts_of, with_tokens
from bench_support.gpu_timing import graph_ms, graph_ms_of_each, need_gpu
from bench_support.options import add_json_option, write_json

from hf_batchllm.bench.machine_rates import measure_rates
from hf_batchllm.patches.fused_experts import Handed, router_forward
from hf_batchllm.patches.fusion import triton_fused_kernels

DTYPE = torch.bfloat16
FROM_DENSE = 1024  # tokens
KERNELS = triton_fused_kernels().experts


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

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=DTYPE, device="cuda")

    up, down = randn(2 * shape.inter, shape.hidden), randn(shape.hidden, shape.inter)
    x, made = randn(pairs, shape.hidden), randn(pairs, shape.inter)

    def products() -> None:
        torch.nn.functional.linear(x, up)
        torch.nn.functional.linear(made, down)

    products()  # cuBLAS picks its kernels
    torch.cuda.synchronize()
    return graph_ms(products, replays)


def theirs_ms(layers: list[Layer], replays: int) -> float | None:
    """None if their code cannot be captured."""
    try:
        return graph_ms_of_each(layers, Layer.theirs, replays)
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
    figures: dict[str, Any] = {
        "tokens": tokens,
        "met": met,
        "floor_ms": of_up + of_down,
        "up_floor_ms": of_up,
        "down_floor_ms": of_down,
        "differ": float((ours - theirs).norm() / theirs.norm()),
        "dense_ms": dense_ms(shape, tokens, replays) if tokens >= FROM_DENSE else None,
        "theirs_ms": theirs_ms(layers, replays),
        "ms": graph_ms_of_each(layers, lambda layer: layer.ours(KERNELS), replays),
    }
    pieces = [pieces_of(layer, shape) for layer in layers]
    for name in pieces[0]:
        figures[f"{name}_ms"] = graph_ms_of_each([each[name] for each in pieces], lambda piece: piece(), replays)
    return figures


HEAD = (
    f"{'shape':>14} {'tokens':>6} {'met':>5} {'floor':>7} {'ours':>7} {'':>5} {'theirs':>7} {'':>5} {'route':>6} "
    f"{'up':>7} {'':>5} {'down':>7} {'':>5} {'sum':>6} {'dense':>7} {'':>5} {'differ':>7}"
)


def line_of(name: str, figures: dict[str, Any]) -> str:
    def us(key: str, width: int = 7) -> str:
        return f"{'-':>{width}}" if figures[key] is None else f"{1e3 * figures[key]:{width}.1f}"

    def share(key: str, of: str) -> str:
        return f"{figures[of] / figures[key]:5.0%}"

    theirs = f"{'':>5}" if figures["theirs_ms"] is None else f"{figures['theirs_ms'] / figures['ms']:4.1f}x"
    products = figures["up_ms"] + figures["down_ms"]
    dense = f"{'':>5}" if figures["dense_ms"] is None else f"{figures['dense_ms'] / products:5.0%}"
    return (
        f"{name:>14} {figures['tokens']:6,} {figures['met']:5.1f} "
        f"{us('floor_ms')} {us('ms')} {share('ms', 'floor_ms')} "
        f"{us('theirs_ms')} {theirs} {us('route_ms', 6)} {us('up_ms')} {share('up_ms', 'up_floor_ms')} {us('down_ms')} "
        f"{share('down_ms', 'down_floor_ms')} {us('sum_ms', 6)} {us('dense_ms')} {dense} {figures['differ']:7.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256, 1024, 8192])
    parser.add_argument("--alike", type=float, default=0.0, help="how far all tokens resemble each other (default: 0)")
    parser.add_argument("--replays", type=int, default=15)
    add_json_option(parser)
    options = parser.parse_args()
    need_gpu()
    rates = measure_rates(torch.device("cuda"), DTYPE)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {rates}; microseconds for a layer\n{HEAD}")
    results = []
    for name in options.shapes:
        shape = ExpertShape.of(name)
        found = experts_of(name, shape.layers, "cuda", DTYPE)
        for tokens in options.tokens:
            layers = with_tokens(found, tokens, options.alike)
            figures = measure(shape, layers, rates.copy, rates.operations, options.replays)
            results.append({"shape": name, "alike": options.alike} | figures)
            print(line_of(name, figures), flush=True)
        del found, layers
        torch.cuda.empty_cache()
    write_json(options.json, {"rates": vars(rates), "layers": results})


if __name__ == "__main__":
    main()
