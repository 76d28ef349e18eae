"""The command: what is measured, and in which order."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..pool.devices import gpus_from
from . import json_output, printed_tables
from .ablation import ablate, variants_of
from .arguments import read_arguments
from .contenders import Generate, GenerateBatch, Ours, best_batch_size
from .device_time import device_time, device_time_table
from .gpu_busy import GpuBusy, gpu_busy
from .measuring import Floors, Measurement, Reads, agreement, is_greedy, measure
from .model_alone import time_model_alone
from .models import end_at_random, load_model
from .on_gpus import OnGpus, load_on
from .parameter_sweeps import sweep_degrees, sweep_steps_per_sync
from .plot import plot
from .plot_steps import draw_steps
from .timing import free_memory
from .workload import Mix, Workload

_PROMPTS_FOR_GENERATE_BATCH = 64  # on a GPU, where it may take half a second for each
_PROFILED_NEW = 96  # new tokens: a profiler keeps a record of every kernel


def main(arguments: Sequence[str] | None = None, program: str = "python -m hf_batchllm.bench") -> int:
    asked = read_arguments(arguments, program)
    device = asked.torch_device
    if asked.threads:
        torch.set_num_threads(asked.threads)
    dtype = getattr(torch, asked.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    model = load_model(asked.model, asked.config or (None if asked.model else "tiny"), device, dtype)
    if asked.stop_after:
        end_at_random(model, asked.stop_after)
    name, machine = _name(model), _machine(device)
    print(f"{name}, {str(dtype).removeprefix('torch.')}, on {machine}")
    work = _describe_work(asked)
    print(f"{textwrap.fill(work, 118)}\n", flush=True)
    if asked.profile or asked.ablation:
        measure_all = _profile if asked.profile else _ablation
    else:
        measure_all = _degrees if asked.degrees else _steps_per_sync if asked.steps_per_sync else _contenders
    found = {**json_output.machine_figures(model, name, machine), "work": work, **measure_all(model, asked)}
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")
    if asked.plot:
        plot(found, asked.plot)
    return 0


def _contenders(model: PreTrainedModel, asked: argparse.Namespace) -> dict[str, Any]:
    """One workload: ours, the rivals, the model alone and the floor."""
    (workload,) = asked.workloads
    vocabulary = model.config.get_text_config().vocab_size
    ours = Ours(model, asked.fields)
    rows = [measure(ours, workload, workload.prompts(vocabulary), asked.runs)]
    report, sizes = ours.report, ours.scheduler.sizes
    if asked.trace and report is not None and report.timeline is not None:
        where = f"{_name(model)}, {_machine(model.device)}"
        draw_steps({ours.name: report.timeline}, asked.trace, f"{where}. {_describe_work(asked)}")
    floors = Floors(model, rows[0]) if asked.floor else None
    # Answers of many lengths mean steps of many sizes: timing each of them would take too long.
    wanted = not asked.no_pieces and not isinstance(workload, Mix) and not asked.stop_after
    alone = time_model_alone(model, sizes) if wanted else None
    several = _measure_on_gpus(model, asked, workload, vocabulary, rows) if asked.gpus else None
    tried = _measure_rivals(model, asked, workload, vocabulary, rows)
    reads = None
    if floors is not None and floors.shape is not None:
        for row in rows:
            row.floor = floors.of(row.workload)
        reads = Reads.of(rows[0], floors.shape, sizes)
    busy = _busy(ours, workload, vocabulary)
    theirs = next((row for row in rows if row.name.startswith("model.generate,")), None)
    same = agreement(rows[0], theirs, vocabulary) if is_greedy(model) else None

    print(f"\n{printed_tables.contenders_table(rows)}")
    if alone is not None:
        print(f"\n{printed_tables.model_alone_lines(alone, rows[0])}")
    if rows[0].floor is not None:
        print(f"\n{printed_tables.floor_lines(rows[0].floor, rows[0])}")
    elif floors is not None:
        print(f"\nno floor: {floors.reason}")
    if reads is not None:
        print(f"\n{printed_tables.reads_line(reads)}")
    if busy is not None:
        print(printed_tables.busy_line(busy, min(_PROFILED_NEW, workload.new)))
    if same is not None:
        note = "" if model.dtype == torch.float32 else " (below float32 they differ where the best logits almost tie)"
        print(f"\nsame tokens as model.generate: {same[0]} of {same[1]} prompts{note}")
    if tried:
        print(printed_tables.batch_sizes_tried(tried))
    print(f"\n{report}")
    if several is not None:
        print(f"\n{several}")
    assert report is not None
    return json_output.contenders_figures(workload, rows, report, alone, same, tried, reads, busy)


def _measure_on_gpus(
    model: PreTrainedModel,
    asked: argparse.Namespace,
    workload: Workload | Mix,
    vocabulary: int,
    rows: list[Measurement],
) -> str:
    """Adds the pool's measurement to ``rows``. Gives what is to be said of it."""
    dtype = next(model.parameters()).dtype
    config = asked.config or (None if asked.model else "tiny")
    load = partial(load_on, load_model, asked.model, config, dtype)
    with _off_its_gpu(model), closing(OnGpus(model, load, gpus_from(asked.gpus), asked.fields)) as pool:
        rows.append(measure(pool, workload, workload.prompts(vocabulary), asked.runs))
        rows[-1].peak_bytes = 0 if pool.report is None else pool.report.device_memory
    return f"{pool.name}, after {pool.start_seconds:.1f} s in which they were started:\n{pool.report}"


@contextmanager
def _off_its_gpu(model: PreTrainedModel) -> Iterator[None]:
    """A process of the pool has that GPU to itself, as the one process had. A quantised model cannot be moved."""
    home = model.device
    if home.type == "cpu" or getattr(model, "hf_quantizer", None) is not None:
        yield
        return
    nn.Module.to(model, torch.device("cpu"))
    free_memory(home)
    try:
        yield
    finally:
        nn.Module.to(model, home)


def _busy(ours: Ours, workload: Workload | Mix, vocabulary: int) -> GpuBusy | None:
    """One more run with fewer new tokens. It comes last, as a profiler may slow down the runs after it."""
    if ours.model.device.type != "cuda":
        return None
    short = workload.cut_short(_PROFILED_NEW)
    prompts = short.prompts(vocabulary)
    free_memory(ours.model.device)
    try:
        return gpu_busy(
            ours.model.device, lambda: ours.run(prompts, short.answers), lambda: ours.scheduler.prompts_until
        )
    except RuntimeError as error:  # out of memory, for example, if a rival has kept some: the other figures stand
        print(f"how busy the GPU was could not be measured: {str(error).splitlines()[0]}")
        return None


def _measure_rivals(
    model: PreTrainedModel,
    asked: argparse.Namespace,
    workload: Workload | Mix,
    vocabulary: int,
    rows: list[Measurement],
) -> dict[int, float]:
    """Adds the rivals' measurements to ``rows``. Returns generate's prompts/s by batch size."""
    runs = asked.rival_runs or asked.runs
    tried: dict[int, float] = {}
    if "generate" in asked.rivals:
        part = workload.first(asked.rival_requests or workload.requests)
        prompts = part.prompts(vocabulary)
        best, tried = best_batch_size(model, prompts, part.answers, asked.batch_sizes)
        rows.append(measure(Generate(model, best, f"model.generate, batch {best}"), part, prompts, runs))
    if "generate_batch" in asked.rivals:
        most = _PROMPTS_FOR_GENERATE_BATCH if model.device.type == "cuda" else workload.requests
        part = workload.first(asked.rival_requests or most)
        orders = {"generate_batch, sorted": part.grouped(vocabulary)}
        if not part.order_matters:
            orders = {"generate_batch": part.prompts(vocabulary)}
        elif isinstance(part, Workload) and part.shuffle:
            orders = {"generate_batch, shuffled": part.prompts(vocabulary), **orders}
        for name, prompts in orders.items():
            rows.append(measure(GenerateBatch(model, name), part, prompts, runs))
    return tried


def _degrees(model: PreTrainedModel, asked: argparse.Namespace) -> dict[str, Any]:
    sweep = sweep_degrees(
        model,
        asked.fields,
        asked.workloads,
        runs=asked.runs,
        floor=asked.floor,
        batch_sizes=asked.batch_sizes if "generate" in asked.rivals else None,
        rival_requests=asked.rival_requests,
        rival_runs=asked.rival_runs or asked.runs,
    )
    print(f"\n{printed_tables.degrees_table(sweep)}")
    if sweep.note:
        print(f"no floor: {sweep.note}")
    return json_output.degrees_figures(sweep)


def _profile(model: PreTrainedModel, asked: argparse.Namespace) -> dict[str, Any]:
    """Each workload, after a warm-up, under a profiler. Nothing else is measured, as a profiler slows runs down."""
    vocabulary = model.config.get_text_config().vocab_size
    found = []
    for workload in asked.workloads:
        prompts = workload.prompts(vocabulary)
        ours = Ours(model, asked.fields)
        for answers in (workload.cut_short(2).answers, workload.answers):
            ours.run(prompts, answers)
        free_memory(model.device)
        time = device_time(model.device, partial(ours.run, prompts, workload.answers))
        print(f"\n{workload}")
        print("the profiler recorded nothing of the device" if time is None else device_time_table(time))
        print(ours.report, flush=True)
        found.append({"workload": workload.as_dict(), "device_time": None if time is None else time.figures()})
    return {"profiles": found}


def _steps_per_sync(model: PreTrainedModel, asked: argparse.Namespace) -> dict[str, Any]:
    (workload,) = asked.workloads
    sweep = sweep_steps_per_sync(
        model, asked.fields, workload, asked.steps_per_sync, runs=asked.runs, off_new=asked.off_new
    )
    print(f"\n{printed_tables.sync_table(sweep)}")
    return json_output.sync_figures(sweep)


def _ablation(model: PreTrainedModel, asked: argparse.Namespace) -> dict[str, Any]:
    (workload,) = asked.workloads
    variants = variants_of(asked.ablation, asked.max_running)
    found = ablate(model, asked.fields, workload, variants, runs=asked.runs, floor=asked.floor)
    print(f"\n{printed_tables.ablation_table(found)}")
    return json_output.ablation_figures(found)


def _describe_work(asked: argparse.Namespace) -> str:
    one = asked.workloads[0]
    if asked.degrees:
        order = "shuffled" if one.shuffle else "sorted"
        return (
            f"groups of prompts, {order}: {one.shared:,} tokens shared by the prompts of a group, {one.own:,} of their "
            f"own; {one.new:,} new tokens, EOS ignored"
        )
    if asked.stop_after:
        return str(one).replace("EOS ignored", f"or fewer: one token in {asked.stop_after:,} ends an answer")
    return str(one)


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__}, {sum(weight.numel() for weight in model.parameters()) / 1e6:,.0f}M weights"


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    sys.exit(main())
