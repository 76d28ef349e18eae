"""RankGenerator: one list over the ranks of torchrun or accelerate launch, each of which holds its model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn
from transformers import GenerationConfig

from ..config import BatchConfig
from ..engine.unfinished import Finished, FinishedGenerations, results_kept
from ..errors import ConfigError, GeneratorBusyError, UnsupportedModelError
from ..inputs.adapters import AS_IT_IS
from ..inputs.config_fields import ConfigFields, shows_config_fields
from ..inputs.named_options import LEFT_OUT, GenerateOptions, shows_options
from ..inputs.seeds import Seeds
from ..inputs.short_tracebacks import with_short_tracebacks
from ..results.dataframes import index_of
from ..results.generations import BatchResult
from ..results.missing_names import OF_A_GENERATOR, no_such
from ..results.run_report import RunReport
from ..results.scores import ScoreResult
from ..results.sharing_plan import SharingPlan
from ..wording import is_number, shown
from .checked_work import checked_score_work, checked_work
from .part_generator import PartGenerator
from .rank_call import RankCalls
from .ranks import Ranks
from .work import GenerateWork, ScoreWork, Work

_NO_STREAM = "a RankGenerator has no `stream`: results come in the end. A BatchGenerator has it, and a GeneratorPool"


class RankGenerator:
    """One list of prompts on the ranks of torchrun or accelerate launch: as BatchGenerator, called by all of them.

        gen = RankGenerator(model, tokenizer)               # on each rank, with the rank's own copy of the model
        out = gen.generate(prompts, max_new_tokens=100)     # on each rank, with the same prompts

    everywhere: whether each rank gets all results. Otherwise the first rank (0) does, and the others get none.
    patience: seconds after which a rank whose step does not end is taken to hang.
    model, tokenizer, config: as for BatchGenerator. ``config`` holds for each rank.

    The list is planned as a whole, and each rank runs a part of it that is expected to take as long as the others.
    Prompts that share a prefix stay together where that pays. Answers are those of one process, in the order of the
    prompts, and so are samples. Where no seed is given, the first rank draws one for all. An error of one rank is
    raised on all of them.
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
        if self._generator.architecture.parts > 1:
            raise UnsupportedModelError(
                f"{self._generator.architecture.name} is spread over {self._generator.architecture.parts} ranks, "
                "which run one list together, and a RankGenerator gives each rank a part of the list: use "
                "BatchGenerator(model) on each of them, with the whole list"
            )
        if not is_number(patience) or not patience > 0:
            raise ConfigError(f"`patience` is {shown(patience)}: it is a number of seconds above 0")
        self._ranks = Ranks(float(patience), self._generator._notices)
        self._runs = RankCalls(self._generator, self._ranks, everywhere)
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

        def make() -> GenerateWork:
            given = prompts, generation_config, seed, on_error, dict(generate_kwargs), None
            return checked_work(self._generator.checked_job, *given, self.config)

        finished = self._run(make, on_error, progress, seed, index_of(prompts))
        rows = [finished.results[key] for key in sorted(finished.results)]
        result = BatchResult(rows, finished.report, self._generator._tokenizer.decode)
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

        def make() -> ScoreWork:
            given = contexts, continuations, choices, on_error, adapter, chat_options
            return checked_score_work(self._generator.checked_scores, *given, self.config)

        index = index_of(continuations if contexts is None else contexts)
        finished = self._run(make, on_error, progress, None, index)
        result = ScoreResult([*finished.results.values()], finished.report)
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
        with self._taking(), self._ranks.call():
            self._ranks.exchange("here", True, arriving=True)
            yield self._ranks.exchange

    def _run(
        self, make: Callable[[], Work], on_error: str, progress: bool | None, seed: Any, index: Any
    ) -> Finished[Any]:
        """Everything of a call. What comes out is the same on all ranks, or, if asked so, on the first one alone."""
        finished: Finished[Any] = FinishedGenerations()
        decode = self._generator._tokenizer.decode
        with self._taking(), results_kept(self, lambda: finished, decode), self._ranks.call():
            began = time.perf_counter()
            work, split = self._runs.agreed(make, seed, progress)
            finished = work.finished()
            finished.index = index
            self._runs.run(work, split, finished, on_error == "raise", progress, began)
            self.last_report = finished.report
        return finished

    @contextmanager
    def _taking(self) -> Iterator[None]:
        if self._closed:
            raise GeneratorBusyError("this RankGenerator is closed: make a new one")
        if self._running:
            raise GeneratorBusyError("a call is running already: let it end")
        self._running = True
        try:
            yield
        finally:
            self._running = False
