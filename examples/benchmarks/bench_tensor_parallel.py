"""A model that several GPUs have together (tensor parallelism), beside one GPU that has it alone.

    python examples/benchmarks/bench_tensor_parallel.py --gpus 2 --config llama-8b
    python examples/benchmarks/bench_tensor_parallel.py --gpus 2 --config llama-70b --only rfc --requests 400

Weights are random, and no token ends an answer. A model that does not fit into one GPU is run by all of them alone.

The floor is that of one process for its part of the model (hf_batchllm/bench/floor.py), with all-reduces in it: two of
a hidden state for each token and layer, at the rate of one of a large step. ``--group-all-reduce`` has the process
group make all of them, for comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import statistics
import tempfile
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.distributed.configuration_utils import DistributedConfig

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.contenders import machine_name
from hf_batchllm.bench.floor import NoFloorError, Shape, floor_of, measure_rates, timed
from hf_batchllm.bench.workload import SHAPES, Workload, load_model
from hf_batchllm.notices import Notices
from hf_batchllm.parallel import peer_all_reduce
from hf_batchllm.parallel.find_group import group_of
from hf_batchllm.patches.sharded_modules import local

WORKLOADS = {  # shared, own, new, degree
    "prefill": (0, 2000, 16, 1),
    "decode": (0, 128, 512, 1),
    "rfc": (2000, 200, 100, 16),
}


_ROWS = 8192  # of the step whose all-reduces are timed


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
    parts = {"linear_weights": shape.linear_weights // asked.gpus, "head_weights": shape.head_weights // asked.gpus}
    shape = dataclasses.replace(shape, **parts)  # heads, and K and V, are those that are here
    rates, config = measure_rates(device, dtype), model.config
    group = group_of(model)
    assert group is not None
    all_reduce = group.all_reduce(device, Notices())
    rows = torch.zeros(_ROWS, config.hidden_size, device=device, dtype=dtype)

    def reduce() -> None:
        for _ in range(5):
            all_reduce.begin()
            all_reduce.total(rows)

    taken = [timed(device, reduce, free=False)[0] / 5 for _ in range(20)]
    of_a_token = statistics.median(taken) / _ROWS
    group.close()
    found = {}
    for name in asked.only:
        floor = floor_of(shape, workload_of(name, asked).groups, rates)
        tokens = floor.prompt_tokens + floor.decode_tokens
        found[name] = floor.seconds + 2 * config.num_hidden_layers * of_a_token * tokens
    return found


def run(model: Any, asked: argparse.Namespace) -> dict[str, Any]:
    found = {}
    with BatchGenerator(model, cuda_graphs=not asked.no_graphs) as generator:
        for name in asked.only:
            workload = workload_of(name, asked)
            prompts = workload.prompts(model.config.vocab_size)
            work = partial(generator.generate, prompts, max_new_tokens=workload.new, progress=False)
            found[name] = common.median_seconds(asked.runs, work), generator.last_report
    return found


def random_sharded(config: Any, processes: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Sharded as ``from_pretrained`` shards it, without files. The process group must be there."""
    asked = DistributedConfig(tp_size=processes)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype)
    prepared = type(model).prepare_distribute_model(asked)
    mesh = prepared[-1]
    model = type(model).maybe_distribute_model(model, prepared[0], mesh)
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for name, module in model.named_modules():
            for key, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[key] = _made(f"{name}.{key}", weight, device, rank)
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = _buffer_of(module, key, device)
    model.tie_weights()
    model.eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


def _made(name: str, weight: torch.Tensor, device: torch.device, rank: int) -> nn.Parameter:
    part = local(weight)
    is_whole = part is weight or all(each.is_replicate() for each in weight.placements)  # type: ignore[attr-defined]
    torch.manual_seed(zlib.crc32(f"{name} {'' if is_whole else rank}".encode()))  # copies of a weight are equal
    fresh = torch.empty(part.shape, dtype=part.dtype, device=device)
    fresh = fresh.fill_(1.0) if "norm" in name and fresh.ndim == 1 else fresh.normal_(0.0, 0.02)
    if part is weight:
        return nn.Parameter(fresh, requires_grad=False)
    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    made = DTensor.from_local(fresh, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())
    return nn.Parameter(made, requires_grad=False)


def _buffer_of(module: nn.Module, key: str, device: torch.device) -> torch.Tensor:
    """A buffer as the class makes it of its config: angles of RoPE."""
    takes = inspect.signature(type(module).__init__).parameters
    if "config" not in takes:
        raise ValueError(f"{type(module).__name__} has a buffer `{key}` that its config does not tell")
    make: Any = type(module)
    fresh: torch.Tensor = make(module.config).to(device)._buffers[key]
    return fresh


def on_rank(rank: int, asked: argparse.Namespace, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(asked.gpus))
    cuda = asked.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=asked.gpus)
    dtype = torch.bfloat16 if cuda else torch.float32
    if asked.group_all_reduce:

        def refuse(*given: Any) -> Any:
            raise peer_all_reduce.CannotReachPeers("that is what --group-all-reduce asks for")

        peer_all_reduce.open_peer_all_reduce = refuse
    alone: dict[str, Any] = {}
    if not asked.no_single and rank == 0:
        model = load_model(None, asked.config, device, dtype)
        alone = run(model, asked)
        del model
        if cuda:
            torch.cuda.empty_cache()
    dist.barrier()
    model = random_sharded(AutoConfig.for_model(**SHAPES[asked.config]), asked.gpus, device, dtype)
    together = run(model, asked)
    least = floors(model, asked, device, dtype)
    if rank == 0:
        print(f"\n{asked.config} on {asked.gpus} x {machine_name(device)}, {asked.requests:,} prompts\n")
        columns = {"": "<12", "one": "9.2f", "together": "9.2f", "faster": "6.2f", "prompts/s": "9.1f"}
        table = common.Table({**columns, "floor": "8.2f", "share": "6.0%"})
        for name, (seconds, _) in together.items():
            found = {"": name, "together": seconds, "prompts/s": asked.requests / seconds}
            found |= {"one": alone[name][0], "faster": alone[name][0] / seconds} if alone else {}
            table.add(found | ({"floor": least[name], "share": least[name] / seconds} if least else {}))
        for name, (_, report) in together.items():
            print(f"\n{name}, together:\n{report}" + (f"\n\n{name}, one:\n{alone[name][1]}" if alone else ""))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--config": {"choices": SHAPES, "default": "llama-8b"},
        "--only": {"nargs": "*", "choices": WORKLOADS, "default": [*WORKLOADS]},
        "--no-single": {"action": "store_true", "help": "leave out the run on one GPU"},
        "--no-graphs": {"action": "store_true"},
        "--group-all-reduce": {"action": "store_true", "help": "all-reduces by NCCL, as if GPUs shared no memory"},
        "--short": {"action": "store_true", "help": "a twentieth of the tokens: a trial"},
    }
    asked = common.read(
        __doc__, arguments, flags, gpus=(2, "that have the model together"), requests=(256, "prompts"), runs=common.RUNS
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (asked, folder), nprocs=asked.gpus)


if __name__ == "__main__":
    main()
