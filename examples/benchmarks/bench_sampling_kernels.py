"""How fast sampling on the device is on this GPU, beside transformers' warpers, which sort.

    python examples/benchmarks/bench_sampling_kernels.py
    python examples/benchmarks/bench_sampling_kernels.py --rows 256 --tune CUT_WARPS=4 SURVEY_BLOCK=8192

Times are medians of replays of a CUDA graph that goes over several sets of logits in turn; the warpers are called one
after the other. Logits are normal, with a standard deviation of 1 ("flat") or 3 ("peaked"), and the temperature is 0.7:
a nucleus of 0.95 then has 75,000 tokens of 128,256, or 300 to 1,700. "share" compares the bytes per second, each input
and output counted once, with those of a large copy.

    k, p     top-k of 50, then top-p of 0.95            draw         without a threshold, and with one
    p flat   top-p of 0.95 alone, on flat logits        plain k, p   transformers' warpers
    p peak   the same on peaked ones                    plain draw   softmax, then torch.multinomial

Peaked rows with a recipe for each: in r k, p and r draw all recipes are as above; in mix cut and mix draw a quarter of
the rows is greedy, a quarter draws from all tokens, a quarter has top-k and top-p, and a quarter top-p alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from bench_support.gpu_timing import graph_ms_of_each, need_gpu
from bench_support.options import add_json_option, add_tune_option, set_constants, write_json
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_batchllm.bench.machine_rates import copy_rate
from hf_batchllm.kernels import penalties_triton, sample_triton, top_k_top_p_triton
from hf_batchllm.kernels.sampling_recipes import Recipe, RecipeTable, RowRecipes

SETS_BYTES = 128 << 20  # of all sets of logits: more than the L2 cache holds
TEMPERATURE, TOP_K, TOP_P = 0.7, 50, 0.95
COLUMNS = (
    "k, p",
    "share",
    "p flat",
    "p peak",
    "min-p",
    "penalise",
    "share",
    "draw",
    "cut draw",
    "greedy",
    "r k, p",
    "r draw",
    "mix cut",
    "mix draw",
    "plain k, p",
    "plain draw",
)


def over_all(sets: list[torch.Tensor], function: Callable[[torch.Tensor], object], replays: int) -> float:
    """Microseconds for one of the sets."""

    return graph_ms_of_each(sets, function, replays) * 1e3


def one_by_one(sets: list[torch.Tensor], function: Callable[[torch.Tensor], object]) -> float:
    """Microseconds of a call outside a graph, for functions that allocate memory."""
    times = []
    for logits in (sets[0], *sets[:3]):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function(logits)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(times[1:]))


def measure(rows: int, vocabulary: int, dtype: torch.dtype, copy: float, replays: int, plain: bool) -> dict[str, float]:
    size = rows * vocabulary * dtype.itemsize
    flat = [
        torch.randn(rows, vocabulary, dtype=dtype, device="cuda") for _ in range(max(2, min(16, SETS_BYTES // size)))
    ]  # fmt: skip
    peaked = [logits * 3 for logits in flat]
    numbers = torch.arange(rows, device="cuda")
    counts, minimum = numbers.int(), torch.full_like(numbers, 9, dtype=torch.int32)
    seen = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocabulary // 32)), dtype=torch.int32, device="cuda")
    eos, seed = torch.tensor([2, 7], device="cuda"), torch.tensor([5], device="cuda")
    threshold = top_k_top_p_triton.cutoffs(peaked[0], temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P)
    out = torch.empty(rows, vocabulary, device="cuda")

    def cut(sets: list[torch.Tensor], **options: float) -> float:
        return over_all(
            sets, lambda logits: top_k_top_p_triton.cutoffs(logits, temperature=TEMPERATURE, **options), replays
        )

    def draw(edge: torch.Tensor | None) -> float:
        return over_all(
            peaked,
            lambda logits: sample_triton.gumbel_sample(
                logits, TEMPERATURE, seed, numbers, numbers, numbers, threshold=edge
            ),
            replays,
        )

    both = Recipe(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P)
    drawn, nucleus = Recipe(temperature=TEMPERATURE), Recipe(temperature=TEMPERATURE, top_p=TOP_P)

    def of_rows(*recipes: Recipe) -> RowRecipes:
        return RowRecipes(RecipeTable(recipes, vocabulary, "cuda"), counts % len(recipes))

    same, mixed = of_rows(both, both), of_rows(Recipe(temperature=0), drawn, both, nucleus)
    mixed_edge = top_k_top_p_triton.cutoffs(peaked[0], by_row=mixed)
    all_drawn = of_rows(drawn, drawn)

    def draw_rows(by_row: RowRecipes, edge: torch.Tensor | None) -> float:
        return over_all(
            peaked,
            lambda logits: sample_triton.gumbel_sample(logits, by_row, seed, counts, counts, counts, threshold=edge),
            replays,
        )

    found = {
        "k, p": cut(peaked, top_k=TOP_K, top_p=TOP_P),
        "p flat": cut(flat, top_p=TOP_P),
        "p peak": cut(peaked, top_p=TOP_P),
        "min-p": cut(peaked, min_p=0.05),
        "penalise": over_all(
            peaked,
            lambda logits: penalties_triton.penalise(
                logits, seen=seen, penalty=1.2, eos=eos, made=counts, minimum=minimum, out=out
            ),
            replays,
        ),
        "draw": draw(None),
        "cut draw": draw(threshold),
        "greedy": over_all(peaked, sample_triton.greedy, replays),
        "r k, p": over_all(peaked, lambda logits: top_k_top_p_triton.cutoffs(logits, by_row=same), replays),
        "r draw": draw_rows(all_drawn, None),
        "mix cut": over_all(peaked, lambda logits: top_k_top_p_triton.cutoffs(logits, by_row=mixed), replays),
        "mix draw": draw_rows(mixed, mixed_edge),
    }
    if plain:
        warpers = [TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)]

        def warp(logits: torch.Tensor) -> torch.Tensor:
            scores = logits.float()
            for warper in warpers:
                scores = warper(None, scores)
            return scores

        found["plain k, p"] = one_by_one(peaked, warp)
        found["plain draw"] = one_by_one(
            peaked, lambda logits: torch.multinomial((logits.float() / TEMPERATURE).softmax(dim=-1), 1)
        )
    found["share of k, p"] = size / found["k, p"] * 1e6 / copy
    found["share of penalise"] = (size + seen.nbytes + out.nbytes) / found["penalise"] * 1e6 / copy
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--vocabulary", nargs="+", type=int, default=[32000, 128256, 262144])
    parser.add_argument("--dtype", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    add_tune_option(parser)
    parser.add_argument("--no-plain", action="store_true", help="without transformers' warpers")
    parser.add_argument("--replays", type=int, default=9)
    add_json_option(parser)
    options = parser.parse_args()
    need_gpu()
    set_constants(options.tune, (top_k_top_p_triton, penalties_triton, sample_triton))
    torch.manual_seed(0)
    copy = copy_rate(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {copy / 1e12:.2f} TB/s", *options.tune)
    print("us", f"{'vocabulary':>14} {'rows':>5}", *(f"{name:>{max(6, len(name))}}" for name in COLUMNS))
    results = []
    for dtype in options.dtype:
        for vocabulary in options.vocabulary:
            for rows in options.rows:
                found = measure(rows, vocabulary, getattr(torch, dtype), copy, options.replays, not options.no_plain)
                results.append({"dtype": dtype, "vocabulary": vocabulary, "rows": rows, "tune": options.tune} | found)
                print(f"{dtype:>8} {vocabulary:8} {rows:5}", end="")
                before = ""
                for name in COLUMNS:
                    if name == "share":
                        text = f"{found[f'share of {before}']:.0%}"
                    else:
                        text = f"{found[name]:.4g}" if name in found else "-"
                    print(f" {text:>{max(6, len(name))}}", end="")
                    before = name
                print(flush=True)
                torch.cuda.empty_cache()
    write_json(options.json, results)


if __name__ == "__main__":
    main()
