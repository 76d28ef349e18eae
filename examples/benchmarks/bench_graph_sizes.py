"""How long the matrix products of a decode step take for each number of rows, and what the sizes of graphs make of it.

    python examples/benchmarks/bench_sizes.py                        # seven models' shapes; a minute
    python examples/benchmarks/bench_sizes.py --shapes llama-8b --json sizes.json

A graph has a fixed number of rows, and a step of fewer is padded. More rows may take less time: which of its kernels
cuBLAS picks, and how many tiles the last wave has, changes with each multiple of 16. The table says by how much the
padded step takes longer than the fastest one of as many rows or more: over each range of rows on the mean, and where
it is worst. A shape is its layers' merged projections, and the LM head. Times are short ones, at the clock of a card
that has had time to cool.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_timing import graph_ms, need_gpu  # beside this file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a source checkout needs no installation

from hf_batchllm.engine.device_loop.graph_sizes import size_of

Shape = tuple[int, list[tuple[int, int]]]  # layers; of each of a layer's products, what goes in and what comes out
SHAPES: dict[str, Shape] = {
    "llama-8b": (32, [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]),
    "qwen3-8b": (36, [(4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)]),
    "qwen3-0.6b": (28, [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)]),
    "llama-1b": (16, [(2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048)]),
    "gemma3-4b": (34, [(2560, 4096), (2048, 2560), (2560, 20480), (10240, 2560)]),
    "qwen2.5-7b": (28, [(3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584)]),
    "llama-70b": (80, [(8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192)]),
}
VOCABULARY = {"gemma3-4b": 262144, "qwen3-8b": 151936, "qwen3-0.6b": 151936, "qwen2.5-7b": 152064}
MANY = 100e6  # bytes of weights at least: they must not stay in the L2 cache from one replay to the next
ROWS = [*range(16, 1025, 16), *range(1056, 2049, 32)]
RANGES = [(65, 256), (257, 512), (513, 1024), (1025, 2048)]


def in_multiples(rows: int) -> int:
    """What a simple rule would take."""
    multiple = 32 if rows <= 256 else 64 if rows <= 512 else 128
    return -(-rows // multiple) * multiple


def in_powers(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


RULES: dict[str, Callable[[int], int]] = {
    "in use": size_of,
    "multiples of 32, 64, 128": in_multiples,
    "powers of two": in_powers,
}


def measure(weights: list[torch.Tensor], rows: int, replays: int) -> float:
    inputs = {
        width: torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
        for width in {weight.shape[1] for weight in weights}
    }

    def products() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    products()  # cuBLAS picks its kernels
    torch.cuda.synchronize()
    return graph_ms(products, replays)


def times_of(name: str) -> dict[int, float]:
    """Rows -> milliseconds of all products of a step."""
    layers, shapes = SHAPES[name]
    copies = math.ceil(MANY / (2 * sum(inside * outside for inside, outside in shapes)))

    def weights(of: list[tuple[int, int]], count: int) -> list[torch.Tensor]:
        return [
            torch.randn(outside, inside, dtype=torch.bfloat16, device="cuda") * 0.02
            for _ in range(count)
            for inside, outside in of
        ]

    some_layers = weights(shapes, copies)
    head = weights([(shapes[0][0], VOCABULARY.get(name, 128256))], 1)
    return {rows: measure(some_layers, rows, 15) / copies * layers + measure(head, rows, 7) for rows in ROWS}


def excess(times: dict[int, float], rule: Callable[[int], int], first: int, last: int) -> tuple[float, float]:
    """How much longer than the fastest: on the mean, and where it is worst."""
    shares = []
    for rows in range(first, last + 1):
        taken = next(time for size, time in times.items() if size >= rule(rows))
        shares.append(taken / min(time for size, time in times.items() if size >= rows))
    return sum(shares) / len(shares) - 1, max(shares) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    names = chosen.shapes.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"--shapes: {', '.join(unknown)} is none of {', '.join(SHAPES)}")
    need_gpu()
    times = {}
    print(f"{torch.cuda.get_device_name()}; ms of a step's products")
    for name in names:
        times[name] = times_of(name)
        torch.cuda.empty_cache()
        some = "  ".join(f"{rows}: {times[name][rows]:.2f}" for rows in (64, 256, 384, 432, 448, 512, 864, 896, 1024))
        print(f"{name:<12}{some}", flush=True)
    for label, rule in RULES.items():
        print(f"\nlonger than the fastest, graphs {label}: mean (worst)")
        print(f"{'':12}" + "".join(f"{f'{first}-{last}':>16}" for first, last in RANGES))
        lines = {name: [excess(times[name], rule, *ends) for ends in RANGES] for name in names}
        of_ranges = list(zip(*lines.values(), strict=True))
        lines["all"] = [(sum(mean for mean, _ in of) / len(of), max(most for _, most in of)) for of in of_ranges]
        for name, each in lines.items():
            print(f"{name:<12}" + "".join(f"{f'{mean:.1%} ({most:.0%})':>16}" for mean, most in each))
    if chosen.json:
        chosen.json.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
