"""A pool of processes, each with a whole model on a GPU of its own, beside one process.

    python examples/benchmarks/bench_pool.py --config llama-8b --gpus 2 --requests 800 --shared 2000 --own 200 --new 100
    python examples/benchmarks/bench_pool.py --gpus cpu,cpu --floor

The pool's share is that of as many floors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import common
import torch
from torch import nn
from transformers import GenerationConfig

from hf_batchllm import GeneratorPool
from hf_batchllm.bench.__main__ import floor_for, table
from hf_batchllm.bench.contenders import Measurement, NoTokenizer, Ours, measure
from hf_batchllm.bench.floor import free_memory
from hf_batchllm.bench.workload import Tokens, Workload, load_model
from hf_batchllm.pool.devices import gpus_from


def load_on(model: str | None, config: str | None, dtype: torch.dtype) -> Any:
    """In a process of the pool, which sees one GPU, or none."""
    return load_model(model, config, torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = common.parser_of(__doc__)
    common.add_model(parser)
    parser.add_argument("--gpus", default="2", help="how many GPUs, or their numbers, as in 0,1 (default: %(default)s)")
    common.add_numbers(parser, requests=(64, "prompts"), degree=(16, "prompts that share each prefix"))
    common.add_numbers(parser, shared=(512, "tokens of a prefix"), own=(32, "further tokens"), new=(32, "new tokens"))
    common.add_numbers(parser, runs=(3, "of which the median counts"))
    parser.add_argument("--floor", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    asked = parser.parse_args(arguments)
    model = common.model_of(asked)
    workload = Workload(asked.requests, asked.shared, asked.own, asked.new, asked.degree)
    rows = [measure(Ours(model), model, Measurement("one process", workload), asked.runs)]
    floor, why_not = floor_for(model, rows[0]) if asked.floor else (None, "")
    home, dtype = model.device, model.dtype
    nn.Module.to(model, torch.device("cpu"))  # a process of the pool has that GPU to itself, as the one process had
    free_memory(home)
    load = partial(load_on, asked.model, None if asked.model else asked.config, dtype)
    began = time.perf_counter()
    with GeneratorPool(load, NoTokenizer(), gpus=gpus_from(asked.gpus)) as pool:
        pool.wait()
        print(f"{len(pool)} processes started in {time.perf_counter() - began:.1f} s")
        reports = []

        def run(prompts: Tokens, answers: Sequence[int]) -> Tokens:
            result = pool.generate(prompts, GenerationConfig(max_new_tokens=max(answers)), progress=False)
            reports.append(result.report)
            return result.token_ids

        rows.append(measure(run, model, Measurement(f"{len(pool)} processes", workload, len(pool)), asked.runs))
    for row in rows:
        row.floor = floor(workload) if floor else None
    print(f"\n{workload}. {why_not}\n{table(rows)}\n\n{reports[-1]}")


if __name__ == "__main__":
    main()
