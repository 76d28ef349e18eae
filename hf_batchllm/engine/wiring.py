"""The parts of a call, put together: the scheduler, what runs the steps, and what ends the sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..config import BatchConfig
from ..model.architecture import Architecture
from ..model.batch import BatchBuilder
from ..model.runner import ModelRunner
from ..notices import Notices
from ..planning.lineup import Lineup
from ..planning.paged_cache import PagedCache
from ..planning.scheduler import Scheduler, make_scheduler
from ..planning.units import Branch, Request
from ..sampling.device_sampler import why_picked_by_host
from ..sampling.host_sampler import HostSampler
from ..sampling.sampling_kernels import sampling_kernels
from ..sampling.seated_sampler import SeatedSampler
from .beams.candidates import BeamScores
from .beams.group import Answer, BeamGroup
from .beams.loop import BeamEngine
from .beams.scheduler import BeamScheduler
from .beams.stopping import BeamEndings
from .device_loop.decode_graphs import graphs_for
from .device_loop.decode_rows import Seats
from .device_loop.run_ahead import RunAhead
from .extra_outputs import ExtraOutputs
from .job import Job
from .loop import AtOnce, Launcher, runs_ahead
from .step_size import times_in_a_row
from .timekeeper import Timekeeper


def beam_engine(
    runner: ModelRunner,
    lineup: Lineup,
    cache: PagedCache,
    job: Job,
    extras: ExtraOutputs,
    timekeeper: Timekeeper,
    clock: float,
    gather_rows: int,
    notices: Notices,
) -> BeamEngine:
    """``clock``: when the call began. ``gather_rows``: as GroupScheduler has it."""
    device, tensors = runner.architecture.device, extras.tensors
    groups = [_group(root, cache, job) for root in lineup.requests]
    scores = None if tensors is None else lambda root, made: tensors.scores_of(root, made, root.width)
    return BeamEngine(
        BeamScheduler(groups, gather_rows),
        BatchBuilder(cache.page_size, device.type == "cuda", runner.backend.short_chunk),
        runner,
        groups,
        BeamScores(runner.model, job.options, groups, job.seed, notices, tensors),
        BeamEndings(lineup.requests, job.rules, clock, device, rows=job.rows, scores=scores),
        timekeeper,
    )


def _group(root: object, cache: PagedCache, job: Job) -> BeamGroup:
    assert isinstance(root, Branch)
    samples = job.options[root.index].num_return_sequences
    return BeamGroup(root, cache, [Answer(root, sample) for sample in range(samples)])


_DEPTH = {"cuda": 2}  # one step runs while the host prepares the next
_LONGEST_BURST = 256  # whatever `steps_per_sync` is: nothing is gained beyond, and each row keeps room for it


def launcher_for(
    runner: ModelRunner,
    requests: Sequence[Request],
    job: Job,
    config: BatchConfig,
    scheduler: Scheduler,
    extras: ExtraOutputs,
    timekeeper: Timekeeper,
    notices: Notices,
) -> tuple[Launcher, int]:
    """And how many steps may be on their way at a time."""
    architecture, model = runner.architecture, runner.model
    device = architecture.device
    launcher = extras.launcher(runner, timekeeper)
    if launcher is not None:
        return launcher, _DEPTH.get(device.type, 1)
    depth = config.steps_per_sync
    if depth is None:
        depth = 2 * times_in_a_row(model) if device.type == "cuda" else 1
    reason = why_by_host(model, architecture, job, extras, depth)
    if reason is not None:
        if device.type == "cuda":
            notices(f"host: {reason}", reason)
        tensors = extras.tensors
        record = None if tensors is None else tensors.record
        sampler = HostSampler(model, job.options, job.seed, record=record, notices=notices)
        return AtOnce(runner, extras.around(sampler), timekeeper), 1
    kernels = sampling_kernels(device)
    pick = SeatedSampler(requests, job.options, job.seed, device, kernels)
    places = Seats.of([job.rules[request.index].stop_tokens for request in requests], device)
    longest = max((request.max_new_tokens for request in requests), default=1)
    # One burst runs, one waits for its turn.
    times = max(1, min(depth // 2, longest, _LONGEST_BURST)) if runs_ahead(scheduler) else 1
    graphs = graphs_for(config, runner, places, pick, kernels.advance, times, notices)
    if graphs is None and config.steps_per_sync is None:
        depth = _DEPTH.get(device.type, 1)
    if device.type == "cuda" and not runs_ahead(scheduler):
        notices(
            "scheduler",
            f"{type(scheduler).__name__} does not run ahead, so the device waits while a step is prepared: "
            "see `runs_ahead` in hf_batchllm.Scheduler",
        )
    return RunAhead(runner, pick, places, graphs, device), depth


def why_by_host(
    model: nn.Module, architecture: Architecture, job: Job, extras: ExtraOutputs, depth: int | None = None
) -> str | None:
    """Why tokens are not picked on the device; None if they are. ``depth``: how many steps may be on their way."""
    if extras.why_by_host is not None:
        return extras.why_by_host
    if job.widths is not None:
        return "beams are chosen by the host, which waits for each step"
    depth = _DEPTH.get(architecture.device.type, 1) if depth is None else depth
    return why_picked_by_host(job.kinds, model, architecture.device, depth, job.penalised, architecture.vocab_size)


# A CPU's decode steps get cheaper by the row up to about a hundred rows.
_GATHER_ROWS = {"cpu": 128}


def scheduler_for(choice: str | Scheduler, device: torch.device) -> Scheduler:
    return make_scheduler(choice, _GATHER_ROWS.get(device.type, 0))
