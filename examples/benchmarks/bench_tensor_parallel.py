"""A model that several GPUs have together (tensor parallelism), beside one GPU that has it alone.

    python examples/benchmarks/bench_tensor_parallel.py --gpus 2 --config llama-8b
    python examples/benchmarks/bench_tensor_parallel.py --gpus 2 --config llama-70b --only rfc --requests 400

Weights are random, and no token ends an answer. A model that does not fit into one GPU is run by all of them alone.

The floor is that of one process for its part of the model (hf_batchllm/bench/floor.py), with the sums in it: two of a
hidden state for each token and layer, at the rate of the sum of a large step. ``--group-sums`` has the process group
make all sums, for comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from typing import Any

import bench_support  # noqa: F401  before hf_batchllm: finds the checkout
import torch
import torch.distributed as dist
from transformers import AutoConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.floor import Shape, floor_of
from hf_batchllm.bench.machine_rates import measure_rates
from hf_batchllm.bench.matrices import NoFloorError
from hf_batchllm.bench.models import load_model
from hf_batchllm.bench.shapes import SHAPES
from hf_batchllm.bench.sharded_models import random_sharded
from hf_batchllm.bench.timing import synchronize
from hf_batchllm.bench.workload import Workload
from hf_batchllm.model import peer_sums

WORKLOADS = {  # shared, own, new, degree
    "prefill": (0, 2000, 16, 1),
    "decode": (0, 128, 512, 1),
    "rfc": (2000, 200, 100, 16),
}


_ROWS = 8192  # of the step whose sums are timed


def workload_of(name: str, asked: argparse.Namespace) -> Workload:
    shared, own, new, degree = WORKLOADS[name]
    if asked.short:
        shared, own, new = shared // 100, own // 20 + 1, min(new, 8)
    return Workload(asked.requests, shared, own, new, degree)


def floors(model: Any, asked: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of each workload. Every rank asks."""
    try:
        shape = Shape.of(model)
    except NoFloorError as why:
        print(f"no floor: {why}")
        return {}
    if shape.mixtures:
        print("no floor: experts are spread over the GPUs, which the floor does not know")
        return {}
    parts = {"linear_weights": shape.linear_weights // asked.gpus, "vocabulary": shape.vocabulary // asked.gpus}
    shape = dataclasses.replace(shape, **parts)  # heads, and K and V, are those that are here
    rates, config = measure_rates(device, dtype), model.config
    with BatchGenerator(model) as generator:
        sums = generator.architecture.ranks.sums(device, lambda *_: None)
        rows = torch.zeros(_ROWS, config.hidden_size, device=device, dtype=dtype)
        taken = []
        for _ in range(20):
            synchronize(device)
            began = time.perf_counter()
            for _ in range(5):
                sums.begin()
                sums.total(rows)
            synchronize(device)
            taken.append((time.perf_counter() - began) / 5)
        of_a_token = statistics.median(taken) / _ROWS
    found = {}
    for name in asked.only:
        floor = floor_of(shape, workload_of(name, asked).as_groups(), rates)
        tokens = floor.needs.prompt_tokens + floor.needs.decode_tokens
        found[name] = floor.seconds + 2 * config.num_hidden_layers * of_a_token * tokens
    return found


def timed(model: Any, asked: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    found = {}
    fields: dict[str, Any] = {"cuda_graphs": not asked.no_graphs}
    with BatchGenerator(model, **fields) as generator:
        for name in asked.only:
            workload = workload_of(name, asked)
            prompts, new = workload.prompts(model.config.vocab_size), workload.new
            taken = []
            for _ in range(asked.runs + 1):
                began = time.perf_counter()
                result = generator.generate(prompts, max_new_tokens=new, progress=False)
                taken.append(time.perf_counter() - began)
            found[name] = statistics.median(taken[1:]), result.report  # the first compiles kernels
    return found


def on_rank(rank: int, asked: argparse.Namespace, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(asked.gpus))
    cuda = asked.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=asked.gpus)
    dtype = torch.bfloat16 if cuda else torch.float32
    if asked.group_sums:

        def refuse(*given: Any) -> Any:
            raise peer_sums.CannotReachPeers("that is what --group-sums asks for")

        peer_sums.open_peer_sums = refuse
    alone: dict[str, Any] = {}
    if not asked.no_single and rank == 0:
        model = load_model(None, asked.config, device, dtype)
        alone = timed(model, asked, device)
        del model
        if cuda:
            torch.cuda.empty_cache()
    dist.barrier()
    config = AutoConfig.for_model(**SHAPES[asked.config])
    model = random_sharded(config, asked.gpus, device, dtype)
    together = timed(model, asked, device)
    least = floors(model, asked, device, dtype)
    if rank == 0:
        on = torch.cuda.get_device_name() if cuda else "CPU"
        print(f"\n{asked.config} on {asked.gpus} x {on}, {asked.requests:,} prompts\n")
        print(f"{'':12}{'one':>10}{'together':>10}{'faster':>8}{'prompts/s':>12}{'floor':>10}{'share':>8}")
        for name, (seconds, _) in together.items():
            one = f"{alone[name][0]:10.2f}" if alone else f"{'':10}"
            times = f"{alone[name][0] / seconds:7.2f}x" if alone else f"{'':8}"
            share = f"{least[name]:10.2f}{least[name] / seconds:8.0%}" if least else ""
            print(f"{name:12}{one}{seconds:10.2f}{times}{asked.requests / seconds:12.1f}{share}", flush=True)
        for name, (_, report) in together.items():
            print(f"\n{name}, together:\n{report}", flush=True)
            if alone:
                print(f"\n{name}, one:\n{alone[name][1]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=SHAPES, default="llama-8b")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--no-single", action="store_true", help="leave out the run on one GPU")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--group-sums", action="store_true", help="sums by NCCL, as if GPUs shared no memory")
    parser.add_argument("--short", action="store_true", help="a twentieth of the tokens: a trial")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (asked, folder), nprocs=asked.gpus)


if __name__ == "__main__":
    main()
