"""The engine of a call, put together: its scheduler, its launcher, its collector and what ends its sequences."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ..planning.base_scheduler import BaseScheduler, scheduler_name
from ..planning.scheduler import make_scheduler
from ..sampling.stopping import Endings
from .at_once import AtOnce
from .beams.wiring import wire_beams
from .collector import TokenCollector
from .device_loop.steps_as_graphs import GraphLauncher
from .drafts.choose_drafts import drafts_for
from .drafts.collector import DraftCollector
from .drafts.scheduler import DraftingScheduler
from .launchers import choose_launcher
from .loop import Engine
from .parts import Parts
from .step_size import gather_rows


def wire(parts: Parts) -> Engine:
    """The loop of the call."""
    return wire_tokens(parts) if parts.job.widths is None else wire_beams(parts)


def wire_tokens(parts: Parts) -> Engine:
    """Where tokens are picked, or scores looked up."""
    scheduler = scheduler_for(parts.config.scheduler, parts.use.device)
    launcher, depth, jump = choose_launcher(parts, scheduler)
    watcher = parts.outputs.watcher
    graphs = launcher.graphs if isinstance(launcher, GraphLauncher) else None
    builder = parts.use.builder(
        most_times=0 if graphs is None else graphs.most_times,
        wanted=None if watcher is None else watcher.wanted,
    )
    endings = _endings(parts, scheduler)
    drafts = drafts_for(parts, scheduler, launcher)
    if drafts is not None:
        scheduler = DraftingScheduler(scheduler, drafts, parts.timekeeper)
    given = parts.requests, scheduler, endings, parts.timekeeper
    turns: dict[str, Any] = {
        "criterias_turn": parts.runner.control.users_turn if parts.job.calls_criteria else nullcontext,
        "schedulers_turn": parts.schedulers_turn,
    }
    if drafts is None:
        collector = TokenCollector(*given, jump=jump, **turns)
    else:
        by_host = launcher if isinstance(launcher, AtOnce) else None
        collector = DraftCollector(drafts, by_host, *given, jump=jump, **turns)
    return parts.engine(scheduler, builder, launcher, collector, depth)


def _endings(parts: Parts, scheduler: BaseScheduler) -> Endings:
    job, tensors = parts.job, parts.outputs.tensors
    by_token = not scheduler.ends_waiting
    if by_token and any(rules.deadlines for rules in job.rules):
        parts.notices(
            "max_time",
            f"{scheduler_name(scheduler)} cannot end requests that wait, so when the time is over each prompt "
            "still gets a token: see `ends_waiting` in hf_batchllm.BaseScheduler",
        )
    scores = None if tensors is None else tensors.scores_of
    return Endings(parts.requests, job.rules, parts.began, parts.use.device, by_token, scores, rows=job.rows)


def scheduler_for(choice: str | BaseScheduler, device: torch.device) -> BaseScheduler:
    return make_scheduler(choice, gather_rows(device))
