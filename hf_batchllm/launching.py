"""What runs a call's steps: ahead of what the host has seen, or one after the other where the host picks the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .ahead import Ahead, SeatedSampler
from .architecture import Architecture
from .backends import sampling_kernels
from .config import BatchConfig
from .decode_graphs import graphs_for
from .decode_rows import Seats
from .device_sampling import picked_by_host
from .engine import AtOnce, Launcher, runs_ahead
from .notices import Notices
from .pace import times_in_a_row
from .recorder import Recorder
from .recording import Recording
from .request import Request
from .runner import ModelRunner
from .sampling import Sampler
from .scheduler import Scheduler
from .work import Work

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
            "see `runs_ahead` in hf_batchllm.scheduler.Scheduler",
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
