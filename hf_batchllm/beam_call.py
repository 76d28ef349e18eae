"""The parts of a beam search, wired."""

from __future__ import annotations

from .batch import BatchBuilder
from .beam_endings import BeamEndings
from .beam_engine import BeamEngine
from .beam_scheduler import BeamScheduler
from .beam_scores import BeamScores
from .beams import Answer, Group
from .cache import PagedCache
from .lineup import Lineup
from .notices import Notices
from .recorder import Recorder
from .recording import Recording
from .request import Branch
from .runner import ModelRunner
from .work import Work


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
