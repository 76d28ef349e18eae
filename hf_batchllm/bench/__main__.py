"""What is measured, in which order."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from . import figures, printed_tables
from .ablation import ablate, variants_of
from .arguments import read_arguments
from .busy import Busy, busy_share
from .contenders import Generate, GenerateBatch, Ours, best_batch_size, tidied
from .device_time import device_time, lines_of
from .measuring import Floors, Reads, Row, agreement, is_greedy, measure
from .models import end_at_random, load_model
from .pieces import bare_pieces
from .plot import plot
from .sweeps import sweep_degrees, sweep_steps_per_sync
from .trace import draw_steps
from .workload import Mix, Workload

_SLOW_RIVAL = 64  # prompts for generate_batch on a GPU, where it may make one or two a second
_PROFILED_NEW = 96  # new tokens: a profiler remembers every kernel


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
    said = _work(asked)
    print(f"{textwrap.fill(said, 118)}\n", flush=True)
    if asked.profile or asked.ablation:
        kind = _profile if asked.profile else _ablation
    else:
        kind = _degrees if asked.degrees else _steps_per_sync if asked.steps_per_sync else _contenders
    found = {**figures.of_the_machine(model, name, machine), "work": said, **kind(model, asked)}
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")
    if asked.plot:
        plot(found, asked.plot)
    return 0


def _contenders(model: PreTrainedModel, asked: argparse.Namespace) -> dict[str, Any]:
    """One workload: ours, the rivals, and what no engine could do without."""
    (workload,) = asked.workloads
    vocabulary = model.config.get_text_config().vocab_size
    ours = Ours(model, asked.fields)
    rows = [measure(ours, workload, workload.prompts(vocabulary), asked.runs)]
    report, sizes = ours.report, ours.scheduler.sizes
    if asked.trace and report is not None:
        where = f"{_name(model)}, {_machine(model.device)}"
        draw_steps({ours.name: report.timeline}, asked.trace, f"{where}. {_work(asked)}")
    floors = Floors(model) if asked.floor else None
    # Answers of many lengths mean steps of many sizes, each to be timed alone.
    wanted = not asked.no_pieces and not isinstance(workload, Mix) and not asked.stop_after
    pieces = bare_pieces(model, sizes) if wanted else None
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
    if pieces is not None:
        print(f"\n{printed_tables.pieces_lines(pieces, rows[0])}")
    if rows[0].floor is not None:
        print(f"\n{printed_tables.floor_lines(rows[0].floor, rows[0])}")
    elif floors is not None:
        print(f"\nno floor: {floors.reason}")
    if reads is not None:
        print(f"\n{printed_tables.reads_line(reads)}")
    if busy is not None:
        print(printed_tables.busy_line(busy, min(_PROFILED_NEW, workload.new)))
    if same is not None:
        note = "" if model.dtype == torch.float32 else " (short of float32 they part where the best logits all but tie)"
        print(f"\nsame tokens as model.generate: {same[0]} of {same[1]} prompts{note}")
    if tried:
        print(printed_tables.tried(tried))
    print(f"\n{report}")
    assert report is not None
    return figures.of_contenders(workload, rows, report, pieces, same, tried, reads, busy)


def _busy(ours: Ours, workload: Workload | Mix, vocabulary: int) -> Busy | None:
    """One more run, fewer new tokens. It comes last: what a profiler leaves behind is to slow nobody down."""
    if ours.model.device.type != "cuda":
        return None
    short = workload.cut_short(_PROFILED_NEW)
    prompts = short.prompts(vocabulary)
    tidied(ours.model.device)
    try:
        return busy_share(
            ours.model.device, lambda: ours.run(prompts, short.answers), lambda: ours.scheduler.prompts_until
        )
    except RuntimeError as error:  # out of memory, say: a rival may have kept some. The other figures stand
        print(f"how busy the GPU was is not known: {str(error).splitlines()[0]}")
        return None


def _measure_rivals(
    model: PreTrainedModel, asked: argparse.Namespace, workload: Workload | Mix, vocabulary: int, rows: list[Row]
) -> dict[int, float]:
    """Adds their rows. What comes back: prompts/s of generate by batch size."""
    runs = asked.rival_runs or asked.runs
    tried: dict[int, float] = {}
    if "generate" in asked.rivals:
        part = workload.first(asked.rival_requests or workload.requests)
        prompts = part.prompts(vocabulary)
        best, tried = best_batch_size(model, prompts, part.answers, asked.batch_sizes)
        rows.append(measure(Generate(model, best, f"model.generate, batch {best}"), part, prompts, runs))
    if "generate_batch" in asked.rivals:
        most = _SLOW_RIVAL if model.device.type == "cuda" else workload.requests
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
    return figures.of_degrees(sweep)


def _profile(model: PreTrainedModel, asked: argparse.Namespace) -> dict[str, Any]:
    """Each workload once to warm up, then under a profiler. Nothing else is measured: a profiler slows runs down."""
    vocabulary = model.config.get_text_config().vocab_size
    found = []
    for workload in asked.workloads:
        prompts = workload.prompts(vocabulary)
        ours = Ours(model, asked.fields)
        for answers in (workload.cut_short(2).answers, workload.answers):
            ours.run(prompts, answers)
        tidied(model.device)
        time = device_time(model.device, lambda ours=ours, w=workload, prompts=prompts: ours.run(prompts, w.answers))
        print(f"\n{workload}")
        print("the profiler noted nothing of what the device did" if time is None else lines_of(time))
        print(ours.report, flush=True)
        found.append({"workload": workload.as_dict(), "device_time": None if time is None else time.figures()})
    return {"profiles": found}


def _steps_per_sync(model: PreTrainedModel, asked: argparse.Namespace) -> dict[str, Any]:
    (workload,) = asked.workloads
    sweep = sweep_steps_per_sync(
        model, asked.fields, workload, asked.steps_per_sync, runs=asked.runs, off_new=asked.off_new
    )
    print(f"\n{printed_tables.sync_table(sweep)}")
    return figures.of_steps_per_sync(sweep)


def _ablation(model: PreTrainedModel, asked: argparse.Namespace) -> dict[str, Any]:
    (workload,) = asked.workloads
    variants = variants_of(asked.ablation, asked.max_running)
    found = ablate(model, asked.fields, workload, variants, runs=asked.runs, floor=asked.floor)
    print(f"\n{printed_tables.ablation_table(found)}")
    return figures.of_ablation(found)


def _work(asked: argparse.Namespace) -> str:
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
    return f"{type(model).__name__} of {sum(weight.numel() for weight in model.parameters()) / 1e6:,.0f}M weights"


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    sys.exit(main())
