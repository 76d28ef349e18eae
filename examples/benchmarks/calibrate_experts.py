"""Which tiles suit the experts' kernels on this GPU: the fastest for each shape and number of tokens.

    python examples/benchmarks/calibrate_experts.py --shapes qwen3-30b-a3b --tokens 64 8192 --seconds 240
    python examples/benchmarks/calibrate_experts.py                     # all three shapes, some minutes each

A tile is (columns, depth, warps, stages) as in kernels/triton/experts_triton.py, for as many rows of an expert as the
table says. The products of gate and up and those of down are timed alone, each as a CUDA graph over several layers. The
kernels of all tiles are compiled first, in several processes. Behind the fastest tiles stands what is in use (_TILES).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import common
import torch
from bench_experts import DTYPE, NAMES, ExpertShape, Layer, experts_of, with_tokens

from hf_batchllm.bench.floor import measure_rates
from hf_batchllm.kernels.reference.experts_torch import Gating
from hf_batchllm.kernels.triton.experts_triton import Tile, down_products, tiles_for, up_products
from hf_batchllm.kernels.triton.routing_triton import rows_of_experts

UP, DOWN = "up", "down"
FEW_ROWS = 64  # of a tile; more are another table
TILES = {
    (UP, True): ((32, 256, 4, 3), (32, 128, 4, 4), (32, 128, 4, 6), (64, 128, 4, 3), (64, 128, 8, 4), (64, 64, 4, 5),
                 (64, 64, 4, 8), (128, 64, 4, 4)),
    (DOWN, True): ((32, 256, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (64, 64, 4, 8), (128, 64, 4, 4),
                   (128, 64, 4, 5), (128, 128, 4, 3)),
    (UP, False): ((64, 64, 4, 4), (64, 64, 8, 4), (64, 128, 8, 3), (128, 32, 8, 5), (128, 64, 8, 3), (128, 64, 8, 4),
                  (128, 128, 8, 2)),
    (DOWN, False): ((128, 64, 4, 4), (128, 64, 8, 4), (128, 64, 8, 5), (128, 128, 8, 3), (256, 64, 8, 3),
                    (256, 64, 8, 4)),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One kernel to compile."""

    shape: ExpertShape
    gating: Gating
    transposed: bool  # how the experts' weights lie
    biased: bool
    tokens: int
    rows: int
    which: str
    tile: tuple[int, int, int, int]


def tiles_of(which: str, rows: int) -> list[tuple[int, int, int, int]]:
    return list(TILES[which, rows <= FEW_ROWS])


def row_sizes(shape: ExpertShape, tokens: int) -> tuple[int, ...]:
    """Rows of a tile that may suit, from those that an expert has on average."""
    average = tokens * shape.top / shape.experts
    if average <= 4:
        return (16,)
    return (16, 32) if average <= 16 else (16, 32, 64) if average <= 64 else (64, 128) if average <= 128 else (128,)


def jobs_of(shape: ExpertShape, layer: Layer, tokens: int) -> list[Job]:
    module = layer.found.module
    given = shape, layer.gating, bool(module.is_transposed), bool(module.has_bias), tokens
    in_use = [Job(*given, *tile) for tile in tiles_in_use(shape, tokens)]
    others = [
        Job(*given, rows, which, tile)
        for rows in row_sizes(shape, tokens)
        for which in (UP, DOWN)
        for tile in tiles_of(which, rows)
    ]
    return list(dict.fromkeys([*in_use, *others]))


def tiles_in_use(shape: ExpertShape, tokens: int) -> list[tuple[int, str, tuple[int, int, int, int]]]:
    used = tiles_for(tokens * shape.top, shape.experts, DTYPE)
    return [(used.rows, UP, tuple(used.up)), (used.rows, DOWN, tuple(used.down))]


def run(job: Job, layer: Layer) -> None:
    rows = rows_of_experts(layer.indices, job.shape.experts, job.rows)
    launch(job, layer, rows, made_for(job, rows))


def made_for(job: Job, rows: Any) -> torch.Tensor:
    return torch.zeros(len(rows.tiles) * job.rows, job.shape.inter, dtype=DTYPE, device="cuda")


def launch(job: Job, layer: Layer, rows: Any, made: torch.Tensor) -> torch.Tensor:
    if job.which == UP:
        return up_products(layer.x, *layer.weight("gate_up_proj"), rows, job.shape.top, job.gating, Tile(*job.tile))
    return down_products(made, *layer.weight("down_proj"), rows, Tile(*job.tile))


class _Empty:
    """Stands for a layer where kernels are only compiled."""

    def __init__(self, job: Job) -> None:
        shape, empty = job.shape, {"dtype": DTYPE, "device": "cuda"}
        self.x = torch.zeros(job.tokens, shape.hidden, **empty)  # type: ignore[call-overload]
        scores = torch.rand(job.tokens, shape.experts, device="cuda")
        self.indices = scores.topk(shape.top).indices
        self._sizes = {"gate_up_proj": (2 * shape.inter, shape.hidden), "down_proj": (shape.hidden, shape.inter)}
        self._job, self._empty = job, empty

    def weight(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        (out, inside), experts = self._sizes[name], self._job.shape.experts
        sizes = (experts, inside, out) if self._job.transposed else (experts, out, inside)
        weight = torch.empty(sizes, **self._empty)  # type: ignore[call-overload]
        bias = torch.empty(experts, out, **self._empty) if self._job.biased else None  # type: ignore[call-overload]
        return weight.transpose(1, 2) if self._job.transposed else weight, bias


def compile_one(job: Job) -> None:
    """In a process of its own; the kernel is then in Triton's cache. One that does not fit is met again below."""
    try:
        run(job, _Empty(job))  # type: ignore[arg-type]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return


@torch.no_grad()
def measure(jobs: list[Job], layers: list[Layer], ends: float) -> list[tuple[float, Job]]:
    """(milliseconds for a layer, job), the fastest first."""
    found = []
    for job in jobs:
        if time.time() > ends:
            print("out of time")
            break
        sets = []
        for layer in layers:
            rows = rows_of_experts(layer.indices, job.shape.experts, job.rows)
            sets.append((job, layer, rows, made_for(job, rows)))
        try:
            found.append((common.graph_ms_of_each(sets, lambda given: launch(*given), 9), job))
        except Exception as error:
            print(f"no {job.which} with {job.rows} rows, {job.tile}: {str(error).splitlines()[0][:80]}")
    return sorted(found, key=lambda pair: pair[0])


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--shapes": {"nargs": "+", "choices": NAMES, "default": NAMES},
        "--tokens": {"nargs": "+", "type": int, "default": [16, 64, 256, 1024, 8192]},
    }
    options = common.read(
        __doc__, arguments, flags, on="gpu", figures=True, processes=(12, "that compile kernels"),
        best=(5, "tiles that are listed"), seconds=(10**9, "after so many nothing new is timed"),
    )  # fmt: skip
    ends, rates = time.time() + options.seconds, measure_rates(torch.device("cuda"), DTYPE)
    print(f"{common.card()}; {rates}; microseconds for a layer")
    results = []
    for name in options.shapes:
        shape = ExpertShape.of(name)
        found = experts_of(name, shape.layers, "cuda", DTYPE)
        jobs = {tokens: jobs_of(shape, with_tokens(found[:1], 1)[0], tokens) for tokens in options.tokens}
        began = time.time()
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            pool.map(compile_one, [job for each in jobs.values() for job in each], chunksize=2)
        print(f"{name}: {sum(map(len, jobs.values()))} kernels compiled in {time.time() - began:.0f} s", flush=True)
        for tokens in options.tokens:
            layers = with_tokens(found, tokens)
            met = sum(layer.met for layer in layers) / len(layers)
            floors = shape.floors(tokens, met, rates.copy, rates.operations)
            print(f"{name}, {tokens:,} tokens, {met:.0f} experts met")
            for (rows, which, tile), floor in zip(tiles_in_use(shape, tokens), floors, strict=True):
                timed = measure([job for job in jobs[tokens] if job.which == which], layers, ends)
                each = [f"{1e3 * ms:.0f} {job.rows} x {job.tile}" for ms, job in timed[: options.best]]
                now = [f"{1e3 * ms:.0f}" for ms, job in timed if (job.rows, job.tile) == (rows, tile)]
                print(f"  {which:4} floor {1e3 * floor:6.0f}: {', '.join(each)}; in use", *now, f"{rows} x {tile}")
                results += [{"shape": name, **asdict(job), "gating": str(job.gating), "ms": ms} for ms, job in timed]
        del found, layers
        torch.cuda.empty_cache()
    common.write_json(options.json, {"rates": vars(rates), "tiles": results})


if __name__ == "__main__":
    main()
