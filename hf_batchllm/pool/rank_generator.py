"""RankGenerator: one list over the ranks of torchrun or accelerate launch, each of which holds its model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch.distributed as dist
from torch import nn
from transformers import GenerationConfig

from ..config import BatchConfig
from ..engine.unfinished import Finished, FinishedGenerations, results_kept
from ..errors import ConfigError, GeneratorBusyError, PoolError, UnsupportedModelError
from ..inputs.adapters import AS_IT_IS
from ..inputs.config_fields import ConfigFields, shows_config_fields
from ..inputs.named_options import LEFT_OUT, GenerateOptions, shows_options
from ..inputs.option_checks import check_progress
from ..inputs.preparing import bars_wanted
from ..inputs.seeds import Seeds
from ..inputs.short_tracebacks import with_short_tracebacks
from ..model.inspection.fingerprint import fingerprint
from ..planning.pieces import Split
from ..results.dataframes import index_of
from ..results.generations import BatchResult
from ..results.missing_names import OF_A_GENERATOR, no_such
from ..results.run_report import RunReport
from ..results.scores import ScoreResult
from ..results.sharing_plan import SharingPlan
from ..wording import differing, first_line, is_number, shown
from .checked_work import checked_score_work, checked_work
from .part_generator import PartGenerator
from .pool_progress import pool_bar
from .pool_report import Tally, report_of
from .rank_call import OfAnotherRankError, RankCall, raise_failure, say_failure
from .rank_digest import digest_of
from .ranks import Ranks
from .share import Share
from .work import ScoreWork, Work

W = TypeVar("W", bound=Work)
_NO_STREAM = "a RankGenerator has no `stream`: results come in the end. A BatchGenerator has it, and a GeneratorPool"
_THE_SAME = "each rank has to pass the same prompts and options, and processors with the same attributes"


class RankGenerator:
    """One list of prompts on the ranks of torchrun or accelerate launch: as BatchGenerator, called by all of them.

        gen = RankGenerator(model, tokenizer)               # on each rank, with the rank's own copy of the model
        out = gen.generate(prompts, max_new_tokens=100)     # on each rank, with the same prompts

    everywhere: whether each rank gets all results. Otherwise the first rank (0) does, and the others get none.
    patience: seconds after which a rank whose step does not end is taken to hang.
    model, tokenizer, config: as for BatchGenerator. ``config`` holds for each rank.

    The list is planned as a whole and split by its prefixes. A rank that has run out of work takes over what others
    have not begun. Answers are those of one process, in the order of the prompts, and so are samples. Where no seed is
    given, the first rank draws one for all. An error of one rank is raised on all of them.
    """

    @shows_config_fields
    @with_short_tracebacks
    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        config: BatchConfig | None = None,
        *,
        everywhere: bool = True,
        patience: float = 900.0,
        **fields: Unpack[ConfigFields],
    ) -> None:
        self._generator = PartGenerator(model, tokenizer, config, **fields)
        if self._generator.architecture.ranks.size > 1:
            raise UnsupportedModelError(
                f"{self._generator.architecture.name} is spread over {self._generator.architecture.ranks.size} ranks, "
                "which run one list together, and a RankGenerator gives each rank a part of the list: use "
                "BatchGenerator(model) on each of them, with the whole list"
            )
        if not is_number(patience) or not patience > 0:
            raise ConfigError(f"`patience` is {shown(patience)}: it is a number of seconds above 0")
        self._ranks = Ranks(str(_next_number()), float(patience), self._generator._notices)
        self._everywhere = everywhere
        self._calls = 0
        self._fingerprint: dict[str, str] = {}
        self._written: list[tuple[int, int]] | None = None  # the weights that it was taken of
        self._running = self._closed = False
        self.last_report: RunReport | None = None
        self.interrupted: BatchResult | ScoreResult | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "stream":
                raise AttributeError(_NO_STREAM)
            raise no_such(self, name, OF_A_GENERATOR)

    @property
    def config(self) -> BatchConfig:
        """The settings of each rank."""
        return self._generator.config

    @property
    def tokenizer(self) -> Any:
        return self._generator.tokenizer

    @property
    def model(self) -> nn.Module:
        """This rank's own."""
        return self._generator.model

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def __len__(self) -> int:
        """How many ranks there are."""
        return self._ranks.count

    def __repr__(self) -> str:
        return f"RankGenerator({self._generator.architecture.name}, rank {self.rank} of {len(self)})"

    # -- the public calls ----------------------------------------------------------------------------------------

    @shows_options
    @with_short_tracebacks
    def generate(
        self,
        prompts: Any,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        seed: Seeds | None = None,
        on_error: str = "raise",
        progress: bool | None = None,
        **generate_kwargs: Unpack[GenerateOptions],
    ) -> BatchResult:
        """Generate for every prompt; results in the order of the prompts. As BatchGenerator.generate, for lists."""

        def make() -> Any:
            check_progress(progress)
            return checked_work(
                self._generator.checked_job,
                prompts,
                generation_config,
                seed,
                on_error,
                dict(generate_kwargs),
                None,
                self.config,
            )

        work, finished = self._run(make, on_error == "raise", progress, seed, index_of(prompts))
        rows = {work.key(failure): failure for failure in self._failures(work)} | finished.results
        result = BatchResult([rows[key] for key in sorted(rows)], finished.report, self._decode)
        result._index = finished.index
        return result

    @with_short_tracebacks
    def score(
        self,
        contexts: Any = LEFT_OUT,
        continuations: Any = None,
        *,
        choices: Any = None,
        adapter: Any = AS_IT_IS,
        on_error: str = "raise",
        progress: bool | None = None,
        **chat_options: Any,
    ) -> ScoreResult:
        """How likely continuations are, given their contexts. As BatchGenerator.score."""

        def make() -> Any:
            check_progress(progress)
            given = contexts, continuations, choices, on_error, adapter, chat_options
            return checked_score_work(self._generator.checked_scores, *given, self.config)

        work, finished = self._run(
            make, on_error == "raise", progress, None, index_of(continuations if contexts is None else contexts)
        )
        result = ScoreResult([*finished.results.values(), *self._failures(work)], finished.report)
        result._index = finished.index
        return result

    def plan(self, prompts: Any, *, adapter: Any = AS_IT_IS, **prompt_options: Any) -> SharingPlan:
        """What these prompts share, and what that would save. Runs no model, and asks no other rank."""
        return self._generator.plan(prompts, adapter=adapter, **prompt_options)

    def close(self) -> None:
        """Give this rank's memory back."""
        self._closed = True
        self._ranks.close()
        self._generator.close()

    def __enter__(self) -> RankGenerator:
        return self

    def __exit__(self, *rest: object) -> None:
        self.close()

    # -- a call --------------------------------------------------------------------------------------------------

    @contextmanager
    def _together(self) -> Iterator[Callable[[str, Any], list[Any]]]:
        """For what all ranks do beside calls: gives a function that tells all ranks what each of them says."""

        def look() -> None:
            raise_failure(self._ranks, name)

        with self._taking() as name, self._said_to_all(name):
            self._ranks.exchange(f"{name}/here", True, look, arriving=True)
            yield lambda what, value: self._ranks.exchange(f"{name}/{what}", value, look)

    def _run(
        self, make: Callable[[], W], strict: bool, progress: bool | None, seed: Any, index: Any
    ) -> tuple[W, Finished[Any]]:
        """Everything of a call. What comes out is the same on all ranks, or, if asked so, on the first one alone."""
        finished: Finished[Any] = FinishedGenerations()
        wanted = False if self.rank else progress
        with self._taking() as name, results_kept(self, lambda: finished, self._decode):
            began = time.perf_counter()
            with self._said_to_all(name):
                with bars_wanted(wanted):
                    work, costs = self._agreed(name, make, seed)
                    finished = work.finished()
                    finished.index = index
                    plan = work.plan
                    plan.add_labels(work.sequences, self._generator._tokenizer.decode)
                split = self._split_of_first(name, work, costs)
                planning = time.perf_counter() - began
                call = RankCall(name, self._ranks, self._generator, work, split, finished.expected)
                noun = "scores" if isinstance(work, ScoreWork) else "results"
                computed, saving = plan.computed_tokens, plan.saving
                with pool_bar(finished.expected, noun, computed, saving, len(self), wanted) as show:
                    try:
                        call.run(show)
                        seconds = call.seconds
                        # Once a rank has said this, the others can do without it.
                        said = self._gathered(name, call)
                        call.end()
                    finally:
                        for result in call.results:
                            finished.results[work.key(result)] = work.whole(result)
            problems = {place: why for mine in said for place, why in mine.problems.items()}
            if self._everywhere or not self.rank or problems:
                for result in (result for rank in range(len(self)) for result in self._results_of(name, rank)):
                    finished.results[work.key(result)] = work.whole(result)
            sending = call.seconds - seconds
            for mine in said:
                mine.share.seconds += sending
            finished.report = self.last_report = report_of(
                [(f"rank {rank}", mine.share) for rank, mine in enumerate(said)],
                plan,
                work,
                Tally.of(mine.tally for mine in said),
                expected=finished.expected,
                over=True,
                seconds=seconds + sending,
                planning_seconds=planning,
            )
            self._note_problems(work, problems, finished, strict)
            if self.rank and not self._everywhere:
                finished.results.clear()
        return work, finished

    def _agreed(self, name: str, make: Callable[[], W], seed: Any) -> tuple[W, Any]:
        """What each rank is asked for, checked, with the first one's seed and costs. Raises what any rank refuses."""
        problem: Exception | None = None
        said: dict[str, Any] = {}
        try:
            work = make()
            said["asked"] = digest_of(work, seed is not None, self._everywhere)
            said["model"] = self._fingerprint_now()
            drawn = seed is None and work.job.seed is not None
            said["seed"], said["costs"] = work.job.seed if drawn else None, self._generator.token_costs()
        except Exception as error:
            problem, said["error"] = error, first_line(error) or type(error).__name__
        everybody = self._ranks.exchange(f"{name}/asked", said, lambda: raise_failure(self._ranks, name), arriving=True)
        if problem is not None:
            raise problem
        for rank, theirs in enumerate(everybody):
            if "error" in theirs:
                raise PoolError(f"rank {rank} has refused this call: {theirs['error']}")
            if theirs["asked"] != everybody[0]["asked"]:
                raise PoolError(f"rank {rank} was asked for something else than rank 0: {_THE_SAME}")
            if other := differing(everybody[0]["model"], theirs["model"]):
                raise PoolError(f"rank {rank} has {other} than rank 0: each rank has to hold the same model")
        if drawn:
            work.job = replace(work.job, seed=everybody[0]["seed"])
        return work, everybody[0]["costs"]

    def _fingerprint_now(self) -> dict[str, str]:
        """Taken anew once a weight was written to: in a training, between two calls."""
        written = [(each.data_ptr(), each._version) for each in self.model.parameters()]
        if written != self._written:
            tokenizer = None if self._fingerprint else self._generator._tokenizer.found()
            self._fingerprint |= fingerprint(self.model, tokenizer)
            self._written = written
        return self._fingerprint

    def _split_of_first(self, name: str, work: Work, costs: Any) -> Split:
        """The first rank's: other versions of NumPy might come to another one."""
        if not self.rank:
            self._ranks.say(f"{name}/split", work.split(len(self), costs))
        split: Split = self._ranks.wait_for(f"{name}/split", 0, lambda: raise_failure(self._ranks, name))
        return split

    def _gathered(self, name: str, call: RankCall) -> list[_Said]:
        """What each rank says in the end. Its results are in the store by then."""
        tally = Tally()
        for result in call.results:
            tally.add(result)
        self._ranks.say(f"{name}/results/{self.rank}", call.results)
        return self._ranks.exchange(f"{name}/ended", _Said(call.share, tally, call.problems), call.look)

    def _results_of(self, name: str, rank: int) -> list[Any]:
        results: list[Any] = self._ranks.heard(f"{name}/results/{rank}")
        return results

    def _note_problems(self, work: Work, problems: dict[Any, str], finished: Finished[Any], strict: bool) -> None:
        """Those of units that fitted into no rank's memory."""
        left = False
        for place, why in problems.items():
            unit = work.problem_units({place: why})[0]
            if any(key not in finished.results for key in work.keys(unit)):
                work.problems[place] = why
                left = True
        if strict and left:
            raise work.error()

    def _failures(self, work: Work) -> list[Any]:
        return list(work.failures()) if self._everywhere or not self.rank else []

    def _decode(self, ids: list[int]) -> str | None:
        return self._generator._tokenizer.decode(ids)

    @contextmanager
    def _taking(self) -> Iterator[str]:
        """Gives the call's name, which is that of no other call."""
        if self._closed:
            raise GeneratorBusyError("this RankGenerator is closed: make a new one")
        if self._running:
            raise GeneratorBusyError("a call is running already: let it end")
        self._running = True
        try:
            self._calls += 1
            self._ranks.begin_call()
            yield str(self._calls)
        finally:
            self._running = False

    @contextmanager
    def _said_to_all(self, name: str) -> Iterator[None]:
        """An error or an interrupt of this rank ends the call of this name on the others; theirs is raised here."""
        try:
            yield
        except OfAnotherRankError as theirs:
            raise theirs.error from None
        except dist.DistError as error:
            why = f"the other ranks cannot be reached, as if rank 0 had ended: {first_line(error)}"
            raise PoolError(why) from None
        except BaseException as error:
            say_failure(self._ranks, name, error)
            raise


@dataclass(frozen=True)
class _Said:
    """In the end, by a rank."""

    share: Share
    tally: Tally
    problems: dict[Any, str]


_made = 0


def _next_number() -> int:
    """Ranks make their generators in the same order."""
    global _made
    _made += 1
    return _made
