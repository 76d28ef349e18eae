"""A pool of processes, each with a whole model on a GPU of its own, beside one process.

    python examples/benchmarks/bench_pool.py --config llama-8b --gpus 2 --requests 800 --shared 2000 --own 200 --new 100
    python examples/benchmarks/bench_pool.py --gpus cpu,cpu --floor

The pool's share is that of as many floors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import common
import torch
from torch import nn
from transformers import GenerationConfig

from hf_batchllm import GeneratorPool
from hf_batchllm.bench.__main__ import floor_for, table
from hf_batchllm.bench.contenders import Measurement, Ours, measure
from hf_batchllm.bench.floor import free_memory
from hf_batchllm.bench.workload import Tokens, load_model, words_of
from hf_batchllm.pool.devices import gpus_from


def load_on(model: str | None, config: str, dtype: torch.dtype) -> Any:
    """In a process of the pool, which sees one GPU, or none."""
    return load_model(model, config, torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    flags = {
        "--gpus": {"default": "2", "help": "how many GPUs, or their numbers, as in 0,1 (default: %(default)s)"},
        **common.FLOOR,
    }
    asked = common.read(__doc__, arguments, flags, model="", runs=common.RUNS, **common.RFC)
    model, workload = common.model_of(asked), common.workload_of(asked)
    rows = [measure(Ours(model), model, Measurement("one process", workload), asked.runs)]
    floor, why_not = floor_for(model, rows[0]) if asked.floor else (None, "")
    home, dtype = model.device, model.dtype
    nn.Module.to(model, torch.device("cpu"))  # a process of the pool has that GPU to itself, as the one process had
    free_memory(home)
    load = partial(load_on, asked.model, asked.config, dtype)
    began = time.perf_counter()
    with GeneratorPool(load, gpus=gpus_from(asked.gpus)) as pool:
        pool.wait()
        print(f"{len(pool)} processes started in {time.perf_counter() - began:.1f} s")
        reports = []

        def run(prompts: Tokens, answers: Sequence[int]) -> Tokens:
            result = pool.generate(prompts, GenerationConfig(max_new_tokens=max(answers)), progress=False)
            reports.append(result.report)
            return result.token_ids

        few = 64 * len(pool)  # so that each process compiles kernels
        run(workload.prompts(words_of(model))[:few], [min(32, asked.new)])
        rows.append(measure(run, model, Measurement(f"{len(pool)} processes", workload), asked.runs))
    for row in rows:
        row.floor = floor(workload) if floor else None
    if rows[1].floor:
        rows[1].floor = replace(rows[1].floor, seconds=rows[1].floor.seconds / len(pool))
    print(f"\n{workload}. {why_not}\n{table(rows)}\n\n{reports[-1]}")


if __name__ == "__main__":
    main()
