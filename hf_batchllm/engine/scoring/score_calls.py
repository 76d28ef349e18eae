"""Runs calls of ``score``, and hands their results out."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...inputs.option_checks import check_progress
from ...inputs.preparing import bars_wanted
from ...results.dataframes import index_of
from ...results.scores import ScoreResult
from ..calls import Calls
from ..report import progress_of
from ..unfinished import FinishedScores
from .score_call import ScoreJob, ScoreOutputs
from .score_inputs import ScoreInputs, checked_scores


class ScoreCalls(Calls):
    def _score(self, given: tuple[Any, ...], strict: bool, progress: bool | None) -> ScoreResult:
        finished = FinishedScores()
        return self._collected(partial(self._run_score, finished, given, strict, progress), finished)

    def _run_score(
        self, finished: FinishedScores, given: tuple[Any, ...], strict: bool, progress: bool | None
    ) -> ScoreResult:
        check_progress(progress)
        with self._taking() as call:
            with bars_wanted(progress, call.timekeeper.during):
                inputs = self._checked_scores(given)
            job = ScoreJob.of(inputs)
            finished.inputs, finished.expected, self.interrupted = inputs, len(inputs.items), None
            finished.index = index_of(given[1] if given[0] is None else given[0])
            outputs = ScoreOutputs(job)
            with bars_wanted(progress), job.problems_named():
                call.begin(job.job, outputs, strict)
            try:
                with progress_of(call, progress) as bar:
                    for request in call.run(bar.step):
                        scores = list(outputs.scores(request, self._tokenizer.decode, call.adapter_for(request.index)))
                        finished.results.update({(score.index, score.choice): score for score in scores})
                        bar.finish(request, len(scores))
            finally:
                self.last_report = finished.report = self._report(call)
        result = ScoreResult([*finished.results.values(), *job.failures()], finished.report)
        result._index = finished.index
        return result

    def _checked_scores(self, given: tuple[Any, ...]) -> ScoreInputs:
        return checked_scores(self._checks.reader, self.architecture, *given)
