"""The generator of a worker: it checks a whole call for the pool, and runs parts of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..engine.adapter_turns import AdapterTurns
from ..engine.call import Call
from ..engine.checks import JobChecks
from ..engine.job import Job
from ..engine.report import progress_of, report_of
from ..engine.scoring.score_call import ScoreJob
from ..errors import OptionValueError
from ..generator import BatchGenerator
from ..inputs.prompts import Prompt
from ..kernels.cards import card_on
from ..parallel.follower import Follower
from ..planning.claims import Claims
from ..planning.pieces import TokenCosts
from ..planning.requests_and_prefixes import Request
from ..planning.sharing import plan_sharing
from ..planning.step import Step

Begin = Callable[[Call], Callable[[Request], list[Any]]]  # gives what makes results of a request that has ended
_NO_PLAN = plan_sharing([])


class PartChecks(JobChecks):
    takes_images = False  # a prompt's pixels would go to the pool's process and back

    def _drawn_seed(self) -> int:
        return 0  # the pool draws one, from the random numbers of the process that calls it


class PartGenerator(BatchGenerator):
    _kind_of_checks = PartChecks
    _at_hand = False
    _hands_on = False
    loaded: dict[str, str] | None = None  # the fingerprint of a worker's model, which nobody changes
    _of_the_call: dict[str, Any] = {}  # noqa: RUF012 -- replaced, never changed

    def _new_call(self, **of_several: Any) -> Call:
        return super()._new_call(**self._of_the_call, **of_several)

    # -- what the pool asks of one worker ------------------------------------------------------------------------

    def checked_job(
        self,
        prompts: Sequence[Any],
        config: Any,
        seed: Any,
        on_error: str,
        options: dict[str, Any],
        names: Sequence[str] | None,
    ) -> Job:
        """The checked call of ``generate``, with the prompts as the plan takes them. ``names``: of prompts.

        A prompt that runs as it was passed is empty: it need not be sent back.
        """
        self._refuse_if_closed()
        with self._notices.naming(names):
            job = self._checks.job(self.architecture, prompts, config, seed, on_error, options)
        if job.feed is not None:
            raise OptionValueError("streamer", "follows one sequence in its own process: use BatchGenerator")
        good = self._keyed(job)
        empty = {key: Prompt(np.empty(0, np.int32), key) for key in {prompt.key for prompt in good}}
        for at, prompt in enumerate(good):
            passed = prompts[job.places[at]]
            if isinstance(passed, np.ndarray) and len(passed) == len(prompt):
                good[at] = empty[prompt.key]
        # Workers find their own rules, which may hold tables of the whole vocabulary; the pool knows the prompts.
        return replace(job, prompts=good, rules=[], passed=None)

    def checked_scores(self, *given: Any) -> ScoreJob:
        """The checked call of ``score``, with the sequences to run as the plan takes them."""
        self._refuse_if_closed()
        scores = ScoreJob.of(self._checked_scores(given))
        scores.job = replace(scores.job, prompts=self._keyed(scores.job))
        return scores

    def texts_of(self, lists: Sequence[list[int]]) -> list[str | None]:
        """The texts of token ids; None where there is no tokenizer."""
        return [self._tokenizer.decode(ids) for ids in lists]

    def token_costs(self) -> TokenCosts:
        """What reading keys and values costs beside running a token, on this card with this model."""
        device, weights = self.architecture.device, sum(each.numel() for each in self.model.parameters())
        if device.type != "cuda" or not weights:
            return TokenCosts()
        card = card_on(device)
        token = 2 * weights / card.operations
        return TokenCosts(self.architecture.kv_bytes_per_token / card.bytes / token)

    def _keyed(self, job: Job) -> list[Prompt]:
        adapters = AdapterTurns(self._resources.model_in_use(), job.adapters)
        return adapters.keyed(job.prompts, job.places)

    # -- parts of a call -----------------------------------------------------------------------------------------

    def run_part(
        self,
        begin: Begin,
        deliver: Callable[[list[Any]], None],
        watch: Callable[[Step, int], None],
        *,
        claims: Claims | None = None,
        began: float | None = None,  # when the call did, if that was elsewhere
        progress: bool | None = False,
    ) -> None:
        """Run what is claimed; without ``claims``, all of it. ``last_report`` is there even after an interrupt.

        ``watch``: is told of each step, and may raise. ``progress``: whether a bar is shown over this part.
        """

        def run() -> None:
            with self._taking() as call:
                finish = begin(call)
                try:
                    with progress_of(call, progress) as bar:

                        def stepped(step: Step, new_tokens: int) -> None:
                            bar.step(step, new_tokens)
                            watch(step, new_tokens)

                        for request in call.run(stepped):
                            # It may have ended before it had begun, for want of time.
                            if claims is None or claims.take(request.index):
                                results = finish(request)
                                bar.finish(request, len(results))
                                deliver(results)
                finally:
                    report = report_of(call)
                    self.last_report = None if report is None else replace(report, plan=_NO_PLAN)  # others have it

        self._of_the_call = {"claims": claims, "began": began}
        try:
            self._together("part", run)
        finally:
            self._of_the_call = {}

    @property
    def group_has_ended(self) -> bool:
        """Another process of this model has failed: this one is of no further use."""
        return self._group is not None and self._group.watch.failure is not None

    def follow(self) -> None:
        """Do what the leader of those that have the model together is asked for next."""
        assert isinstance(self._side, Follower)
        with self._call("part"), self._taking() as call:
            for _ in self._side.follow(call):
                pass
