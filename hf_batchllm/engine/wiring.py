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
from ..sampling.device_sampler import picked_by_host
from ..sampling.host_sampler import Sampler
from ..sampling.sampling_kernels import sampling_kernels
from ..sampling.seated_sampler import SeatedSampler
from .beams.candidates import BeamScores
from .beams.group import Answer, Group
from .beams.loop import BeamEngine
from .beams.scheduler import BeamScheduler
from .beams.stopping import BeamEndings
from .device_loop.decode_graphs import graphs_for
from .device_loop.decode_rows import Seats
from .device_loop.run_ahead import Ahead
from .extra_outputs import Recording
from .job import Work
from .loop import AtOnce, Launcher, runs_ahead
from .step_size import times_in_a_row
from .timekeeper import Recorder


def beam_engine(
    runner: ModelRunner,
    lineup: Lineup,
    cache: PagedCache,
    work: Work,
    recording: Recording,
    recorder: Recorder,
    clock: float,
    gather_rows: int,
    notices: Notices,
) -> BeamEngine:
    """``clock``: when the call began. ``gather_rows``: as GroupScheduler has it."""
    device, tensors = runner.architecture.device, recording.tensors
    groups = [_group(root, cache, work) for root in lineup.requests]
    scores = None if tensors is None else lambda root, made: tensors.scores_of(root, made, root.width)
    return BeamEngine(
        BeamScheduler(groups, gather_rows),
        BatchBuilder(cache.page_size, device.type == "cuda", runner.backend.short_chunk),
        runner,
        groups,
        BeamScores(runner.model, work.options, groups, work.seed, notices, tensors),
        BeamEndings(lineup.requests, work.rules, clock, device, rows=work.rows, scores=scores),
        recorder,
    )


def _group(root: object, cache: PagedCache, work: Work) -> Group:
    assert isinstance(root, Branch)
    samples = work.options[root.index].num_return_sequences
    return Group(root, cache, [Answer(root, sample) for sample in range(samples)])


_DEPTH = {"cuda": 2}  # one step runs while the host prepares the next
_LONGEST_BURST = 256  # whatever `steps_per_sync` is: nothing is gained beyond, and each row keeps room for it


def launcher_for(
    runner: ModelRunner,
    requests: Sequence[Request],
    work: Work,
    config: BatchConfig,
    scheduler: Scheduler,
    recording: Recording,
    recorder: Recorder,
    notices: Notices,
) -> tuple[Launcher, int]:
    """And how many steps may be on their way at a time."""
    architecture, model = runner.architecture, runner.model
    device = architecture.device
    launcher = recording.launcher(runner, recorder)
    if launcher is not None:
        return launcher, _DEPTH.get(device.type, 1)
    depth = config.steps_per_sync
    if depth is None:
        depth = 2 * times_in_a_row(model) if device.type == "cuda" else 1
    reason = why_by_host(model, architecture, work, recording, depth)
    if reason is not None:
        if device.type == "cuda":
            notices(f"host: {reason}", reason)
        tensors = recording.tensors
        record = None if tensors is None else tensors.record
        sampler = Sampler(model, work.options, work.seed, record=record, notices=notices)
        return AtOnce(runner, recording.around(sampler), recorder), 1
    kernels = sampling_kernels(device)
    pick = SeatedSampler(requests, work.options, work.seed, device, kernels)
    places = Seats.of([work.rules[request.index].stop_tokens for request in requests], device)
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
    return Ahead(runner, pick, places, graphs, device), depth


def why_by_host(
    model: nn.Module, architecture: Architecture, work: Work, recording: Recording, depth: int | None = None
) -> str | None:
    """Why tokens are not picked on the device; None if they are. ``depth``: how many steps may be on their way."""
    if recording.why_by_host is not None:
        return recording.why_by_host
    if work.widths is not None:
        return "beams are chosen by the host, which waits for each step"
    depth = _DEPTH.get(architecture.device.type, 1) if depth is None else depth
    return picked_by_host(work.kinds, model, architecture.device, depth, work.penalised, architecture.vocab_size)


# A CPU's decode steps get cheaper by the row up to about a hundred rows.
_GATHER_ROWS = {"cpu": 128}


def scheduler_for(choice: str | Scheduler, device: torch.device) -> Scheduler:
    return make_scheduler(choice, _GATHER_ROWS.get(device.type, 0))
