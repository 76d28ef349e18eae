"""How long a decode step's matrix products take for each number of rows, and how well the sizes of graphs fit that.

    python examples/benchmarks/bench_graph_sizes.py                        # seven models' shapes; a minute
    python examples/benchmarks/bench_graph_sizes.py --shapes llama-8b --json sizes.json

A graph has a fixed number of rows, and a step with fewer rows is padded. More rows may take less time: cuBLAS picks
another kernel, and the last wave has another number of tiles, at each multiple of 16. The table shows how much longer
the padded step takes than the fastest one with as many rows or more: the mean over each range of rows, and the worst. A
shape's products are its layers' merged projections and the LM head. Runs are short, so the card keeps a high clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import common
import torch

from hf_batchllm.bench.workload import SHAPES
from hf_batchllm.engine.device_loop.graph_sizes import size_of

MODELS = [name for name in common.DENSE if name not in ("gemma3-1b", "tiny")]
LEAST_BYTES = 100e6  # of weights: more than the L2 cache keeps from one replay to the next
ROWS = [*range(16, 1025, 16), *range(1056, 2049, 32)]
RANGES = [(65, 256), (257, 512), (513, 1024), (1025, 2048)]


def in_multiples(rows: int) -> int:
    """A simple rule, for comparison."""
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
    inputs = {width: common.randn(rows, width) for width in {weight.shape[1] for weight in weights}}

    def products() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    products()  # cuBLAS picks its kernels
    torch.cuda.synchronize()
    return common.graph_ms(products, replays)


def times_of(name: str) -> dict[int, float]:
    """Rows -> milliseconds of all products of a step."""
    products, layers = common.layer_products(name), SHAPES[name]["num_hidden_layers"]
    copies = math.ceil(LEAST_BYTES / (2 * sum(inside * outside for inside, outside in products)))

    def weights(of: list[tuple[int, int]], count: int) -> list[torch.Tensor]:
        return [common.randn(outside, inside) * 0.02 for _ in range(count) for inside, outside in of]

    some_layers = weights(products, copies)
    head = weights([(products[0][0], SHAPES[name]["vocab_size"])], 1)
    return {rows: measure(some_layers, rows, 15) / copies * layers + measure(head, rows, 7) for rows in ROWS}


def excess(times: dict[int, float], rule: Callable[[int], int], first: int, last: int) -> tuple[float, float]:
    """How much longer than the fastest: on the mean, and where it is worst."""
    shares = []
    for rows in range(first, last + 1):
        taken = next(time for size, time in times.items() if size >= rule(rows))
        shares.append(taken / min(time for size, time in times.items() if size >= rows))
    return sum(shares) / len(shares) - 1, max(shares) - 1


def main(arguments: Sequence[str] | None = None) -> None:
    shapes = {"nargs": "+", "choices": common.DENSE, "metavar": "NAME", "default": MODELS}
    chosen = common.read(__doc__, arguments, {"--shapes": shapes}, on="gpu", figures=True)
    times = {}
    print(f"{torch.cuda.get_device_name()}; ms of a step's products, by rows")
    some = (64, 256, 384, 432, 448, 512, 864, 896, 1024)
    table = common.Table({"": "<12", **dict.fromkeys(map(str, some), "7.2f")})
    for name in chosen.shapes:
        times[name] = times_of(name)
        torch.cuda.empty_cache()
        table.add({"": name, **{str(rows): times[name][rows] for rows in some}})
    for label, rule in RULES.items():
        print(f"\nlonger than the fastest, graphs {label}: mean (worst)")
        table = common.Table({"": "<12", **dict.fromkeys((f"{first}-{last}" for first, last in RANGES), ">16")})
        lines = {name: [excess(times[name], rule, *ends) for ends in RANGES] for name in chosen.shapes}
        of_ranges = list(zip(*lines.values(), strict=True))
        lines["all"] = [(sum(mean for mean, _ in of) / len(of), max(most for _, most in of)) for of in of_ranges]
        for name, each in lines.items():
            cells = (f"{mean:.1%} ({most:.0%})" for mean, most in each)
            table.add({"": name, **dict(zip(list(table.columns)[1:], cells, strict=True))})
    common.write_json(chosen.json, times)


if __name__ == "__main__":
    main()
