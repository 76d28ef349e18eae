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

from collections.abc import Callable, Sequence
from itertools import product

import common
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_batchllm.kernels.lists.sampling_recipes import Recipe, RecipeTable, RowRecipes
from hf_batchllm.kernels.triton import penalties_triton, sample_triton, top_k_top_p_triton

SETS_BYTES = 128 << 20  # of all sets of logits: more than the L2 cache holds
TEMPERATURE, TOP_K, TOP_P = 0.7, 50, 0.95
TIMES = ("p flat", "p peak", "min-p", "penalise", "its share", "draw", "cut draw", "greedy", "r k, p", "r draw")
TIMES += ("mix cut", "mix draw", "plain k, p", "plain draw")
COLUMNS = {"dtype": "<8", "vocabulary": "10", "rows": "5", "k, p": "6.4g", "share": "5.0%"}
COLUMNS |= {name: "9.0%" if "share" in name else f"{max(6, len(name))}.4g" for name in TIMES}


def over_all(sets: list[torch.Tensor], function: Callable[[torch.Tensor], object], replays: int) -> float:
    """Microseconds for one of the sets."""
    return common.graph_ms_of_each(sets, function, replays) * 1e3


def one_by_one(sets: list[torch.Tensor], function: Callable[[torch.Tensor], object]) -> float:
    """Microseconds of a call outside a graph, for functions that allocate memory."""
    function(sets[0])
    some = iter(sets[:3])
    return 1e3 * common.event_ms(lambda: function(next(some)), len(sets[:3]), wait=True)


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
    found["share"] = size / found["k, p"] * 1e6 / copy
    found["its share"] = (size + seen.nbytes + out.nbytes) / found["penalise"] * 1e6 / copy
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--rows": {"nargs": "+", "type": int, "default": [64, 256, 1024]},
        "--vocabulary": {"nargs": "+", "type": int, "default": [32000, 128256, 262144]},
        "--dtype": {"nargs": "+", "choices": ["bfloat16", "float32"], "default": ["bfloat16", "float32"]},
        "--no-plain": {"action": "store_true", "help": "without transformers' warpers"},
        **common.TUNE,
    }
    options = common.read(__doc__, arguments, flags, on="gpu", figures=True, replays=(9, "of each graph"))
    copy = common.begin_tuned(options.tune, (top_k_top_p_triton, penalties_triton, sample_triton))
    table = common.Table(COLUMNS)
    for dtype, vocabulary, rows in product(options.dtype, options.vocabulary, options.rows):
        found = measure(rows, vocabulary, getattr(torch, dtype), copy, options.replays, not options.no_plain)
        table.add({"dtype": dtype, "vocabulary": vocabulary, "rows": rows, **found}, tune=options.tune)
        torch.cuda.empty_cache()
    table.write(options.json)


if __name__ == "__main__":
    main()
