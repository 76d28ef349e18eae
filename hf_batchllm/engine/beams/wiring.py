"""The engine of a beam search, put together."""

from __future__ import annotations

from ...planning.requests_and_prefixes import Branch, Request
from ..drafts.choose_drafts import say_no_drafts
from ..launchers import graphs_without_picking
from ..loop import Engine
from ..parts import Parts
from ..picking import DEPTH
from ..step_size import gather_rows
from .candidates import BeamScores
from .collector import BeamCollector, BeamEndings
from .group import Answer, BeamGroup
from .launcher import BeamLauncher
from .scheduler import BeamScheduler


def wire_beams(parts: Parts) -> Engine:
    job, tensors, device, notices = parts.job, parts.outputs.tensors, parts.use.device, parts.notices
    say_no_drafts(job, parts.use.model, "no tokens are guessed in a beam search", notices)
    if parts.config.scheduler != "groups":
        notices("beams", "`scheduler` has no effect on a beam search, whose beams go on together")
    roots = [request for request in parts.requests if isinstance(request, Branch)]
    groups: dict[Request, BeamGroup] = {root: _group(parts, root) for root in roots}
    beam_scores = BeamScores(parts.use.model, job.options, [*groups.values()], job.seed, notices, tensors)
    custom_code = beam_scores.calls_custom_code or job.calls_criteria
    # What belongs to the user may look at any of it, or change the model for the next step.
    depth = 1 if custom_code else DEPTH.get(device.type, 1)
    scheduler = BeamScheduler(groups, gather_rows(device), depth)
    seats = parts.devices.seats([], device, False)
    graphs = graphs_without_picking(parts, seats)
    launcher = BeamLauncher(
        groups, beam_scores, parts.timekeeper, parts.runner, seats, graphs, device, custom_code, job.picks_by_model
    )
    scores = None if tensors is None else lambda root, made: tensors.scores_of(root, made, root.width)
    endings = BeamEndings(roots, job.rules, parts.began, device, rows=job.rows, scores=scores)
    builder = parts.use.builder(most_times=0 if graphs is None else 1)
    collector = BeamCollector(launcher, scheduler, endings, parts.timekeeper)
    return parts.engine(scheduler, builder, launcher, collector, depth)


def _group(parts: Parts, root: Branch) -> BeamGroup:
    samples = parts.job.options[root.index].num_return_sequences
    return BeamGroup(root, parts.cache, [Answer(root, sample) for sample in range(samples)])
