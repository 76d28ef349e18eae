"""What `invariant=True` costs: seconds for lists of prompts, without and with it.

    python examples/benchmarks/bench_invariant.py --config llama-8b
    python examples/benchmarks/bench_invariant.py --device cpu --model .models/gemma-3-270m --threads 1

On a GPU in bfloat16, on a CPU in float32. A machine is not always equally fast, so calls without and with it take
turns. The median is shown.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import common

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.workload import Workload, words_of

TURNS = 3  # of either
Lists = dict[str, tuple[list[list[int]], int]]  # prompts, and how many new tokens each gets


def lists_for_a_gpu(vocabulary: int) -> Lists:
    shapes = {
        "192 prompts, 16 of which share 2,000 tokens of 2,200, 100 new tokens each": Workload(192, 2000, 200, 100, 16),
        "256 prompts of 128 tokens, 256 new tokens each": Workload(256, 0, 128, 256, 1),
        "4 prompts of 128 tokens, 256 new tokens each": Workload(4, 0, 128, 256, 1),
    }
    return {name: (shape.prompts(vocabulary), shape.new) for name, shape in shapes.items()}


def lists_for_a_cpu() -> Lists:
    dice = random.Random(0)

    def draw(length: int) -> list[int]:
        return [dice.randrange(4000) for _ in range(length)]

    document = draw(256)
    return {
        "32 prompts of 8 tokens, 48 new tokens each": ([draw(8) for _ in range(32)], 48),
        "24 prompts of 200 tokens, one new token each": ([draw(200) for _ in range(24)], 1),
        "32 prompts that share 256 tokens of 276, 16 new tokens each": ([document + draw(20) for _ in range(32)], 16),
    }


def seconds_for(model: Any, prompts: list[list[int]], new_tokens: int, times: int, invariant: bool) -> list[float]:
    """Seconds that each of some calls takes, after a first one."""
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "progress": False}
    found = []
    with BatchGenerator(model, invariant=invariant) as generator:
        for _ in range(1 + times):
            begun = time.perf_counter()
            generator.generate(prompts, **options)
            found.append(time.perf_counter() - begun)
    return found[1:]


def main(arguments: list[str] | None = None) -> None:
    flags = {"--short": {"action": "store_true", "help": "lists for a CPU, also on a GPU"}}
    asked = common.read(__doc__, arguments, flags, model="", times=(1, "calls in each turn, after a first one"))
    asked.threads = asked.threads or 1
    model = common.model_of(asked)
    lists = lists_for_a_cpu() if asked.short or asked.device == "cpu" else lists_for_a_gpu(words_of(model))
    table = common.Table({"seconds": "<76", "without": "9.2f", "with": "9.2f", "more": "6.0%"})
    for name, (prompts, new_tokens) in lists.items():
        found: dict[bool, list[float]] = {False: [], True: []}
        for flag in [False, True] * TURNS:
            found[flag] += seconds_for(model, prompts, new_tokens, asked.times, flag)
        without, with_it = (statistics.median(found[flag]) for flag in (False, True))
        table.add({"seconds": name, "without": without, "with": with_it, "more": with_it / without - 1})


if __name__ == "__main__":
    main()
