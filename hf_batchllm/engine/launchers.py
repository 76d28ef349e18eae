"""Which launcher runs the steps of a call: whether the host or the device picks tokens, and what runs as graphs."""

from __future__ import annotations

from ..planning.base_scheduler import BaseScheduler, scheduler_name
from ..sampling.forced_tokens import ForcedTokens
from ..sampling.token_picking import TokenPicking
from .at_once import AtOnce
from .device_loop.decode_graphs import DecodeGraphs
from .device_loop.run_ahead import RunAhead
from .device_loop.seats import Seats
from .device_loop.step_by_step import StepByStep
from .loop import Launcher
from .parts import Parts
from .picking import DEPTH, picking_of, why_by_host
from .step_size import times_in_a_row

_LONGEST_BURST = 256  # whatever `steps_per_sync` is: nothing is gained beyond, and each row keeps room for it

Chosen = tuple[Launcher, int, ForcedTokens | None]
"""The launcher, how many steps may be on their way at a time, and what jumps over tokens that a grammar forces."""


def choose_launcher(parts: Parts, scheduler: BaseScheduler) -> Chosen:
    device, config, outputs = parts.use.device, parts.config, parts.outputs
    launcher = outputs.launcher(parts.runner, parts.timekeeper)
    if launcher is not None:
        return launcher, DEPTH.get(device.type, 1), None
    depth = config.steps_per_sync
    if depth is None:
        depth = 1
        if device.type == "cuda":
            depth = 2 * times_in_a_row(parts.use.model, device)
    picking = picking_of(parts.job, parts.use)
    longest = max((request.max_new_tokens for request in parts.requests), default=1)
    reason = why_by_host(parts.job, outputs, picking, depth)
    if reason is None:
        outputs.set_aside(longest, parts.use.architecture.head_rows, device)
        reason = outputs.why_by_host
    if reason is not None:
        return _by_host(parts, scheduler, picking, reason)
    return _by_device(parts, scheduler, picking, depth, longest)


def _by_host(parts: Parts, scheduler: BaseScheduler, picking: TokenPicking, reason: str) -> Chosen:
    job, outputs, device = parts.job, parts.outputs, parts.use.device
    if device.type == "cuda":
        parts.notices(f"host: {reason}", reason)
    alone = outputs.why_by_host is not None
    sampler = picking.by_host(outputs.record_scores, parts.notices, parts.requests, alone)
    jump = None
    # A step with a chunk is no graph: whether fewer steps are faster then has not been measured.
    if sampler.grammars and scheduler.takes_jumps and outputs.tensors is None and not picking.in_graphs:
        jump = ForcedTokens(sampler.grammars, job.rules, job.options)
    around, may_repeat = outputs.around(sampler), sampler.may_repeat
    if not picking.in_graphs:
        return AtOnce(parts.runner, around, parts.timekeeper, may_repeat, job.picks_by_model), 1, jump
    seats = parts.devices.seats([frozenset()] * len(parts.requests), device)
    launcher = StepByStep(
        parts.runner, around if around is not sampler else sampler.without_waiting, sampler.prepare, may_repeat,
        seats, graphs_without_picking(parts, seats), device, parts.timekeeper,
        sampler.calls_custom_code or job.calls_criteria, job.picks_by_model, parts.notices,
    )  # fmt: skip
    # A criterion of the user's may do anything to the model before the next step.
    return launcher, 1 if job.calls_criteria else min(2, parts.config.steps_per_sync or 2), jump


def _by_device(parts: Parts, scheduler: BaseScheduler, picking: TokenPicking, depth: int, longest: int) -> Chosen:
    outputs, config, device = parts.outputs, parts.config, parts.use.device
    pick, advance = picking.on_device(parts.requests, outputs.wants_scores, outputs.tensors)
    seats = parts.devices.seats([parts.job.rules[request.index].stop_tokens for request in parts.requests], device)
    # One burst runs, one waits for its turn.
    times = max(1, min(depth // 2, longest, _LONGEST_BURST)) if scheduler.runs_ahead else 1
    notes = outputs.notes(device, picking.kernels, pick.take_scores)
    noting = None if notes is None else notes.on_device
    graphs = parts.devices.graphs(config, parts.runner, seats, pick, advance, times, parts.notices, noting)
    if graphs is None and config.steps_per_sync is None:
        depth = DEPTH.get(device.type, 1)
    if device.type == "cuda" and not scheduler.runs_ahead:
        parts.notices(
            "scheduler",
            f"{scheduler_name(scheduler)} does not run ahead, so the device waits while a step is prepared: "
            "see `runs_ahead` in hf_batchllm.BaseScheduler",
        )
    return RunAhead(parts.runner, pick, seats, graphs, device, notes), depth, None


def graphs_without_picking(parts: Parts, seats: Seats) -> DecodeGraphs | None:
    """Their logits are for the host to pick from."""
    return parts.devices.graphs(parts.config, parts.runner, seats, None, None, 1, parts.notices, None)
