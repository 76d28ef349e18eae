"""What GeneratorPool and RankGenerator have alike: calls that several processes run together, one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack

from transformers import GenerationConfig

from ..config import BatchConfig
from ..engine.unfinished import Finished
from ..errors import ConfigError, GeneratorBusyError
from ..inputs.adapters import AS_IT_IS
from ..inputs.named_options import LEFT_OUT, GenerateOptions, shows_options
from ..inputs.prompts import as_list
from ..inputs.seeds import Seeds
from ..inputs.short_tracebacks import with_short_tracebacks
from ..notices import Notices
from ..results.dataframes import index_of
from ..results.generations import BatchResult
from ..results.missing_names import OF_A_GENERATOR, no_such
from ..results.run_report import RunReport
from ..results.scores import ScoreResult
from ..results.sharing_plan import SharingPlan
from ..wording import is_number, shown
from .part_generator import PartGenerator
from .work import GenerateWork, ScoreWork, Work, listed

PATIENCE = 900.0  # seconds: a first step may compile kernels, and check them


class ListCalls(ABC):
    """Those that have ended leave ``last_report`` and ``interrupted`` behind."""

    _instead: Mapping[str, str] = OF_A_GENERATOR  # what to write for names that it does not have
    _still_running: str  # in the words of an error

    def __init__(self, config: BatchConfig, notices: Notices) -> None:
        self._config = config
        self._notices = notices
        self._running = self._closed = False
        self.last_report: RunReport | None = None
        self.interrupted: BatchResult | ScoreResult | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_such(self, name, self._instead)

    @property
    def config(self) -> BatchConfig:
        """The settings of each process."""
        return self._config

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
        make = partial(self._generate_work, prompts, generation_config, seed, on_error, dict(generate_kwargs))
        finished = self._run(make, on_error == "raise", progress, index_of(prompts))
        rows = [finished.results[key] for key in sorted(finished.results)]
        result = BatchResult(rows, finished.report, self._decode)
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
        given = contexts, continuations, choices, on_error, adapter, chat_options
        make = partial(ScoreWork.checked, partial(self._found, PartGenerator.checked_scores), given, self._config)
        index = index_of(continuations if contexts is None else contexts)
        finished = self._run(make, on_error == "raise", progress, index)
        result = ScoreResult([*finished.results.values()], finished.report)
        result._index = finished.index
        return result

    @with_short_tracebacks
    def plan(self, prompts: Any, *, adapter: Any = AS_IT_IS, **prompt_options: Any) -> SharingPlan:
        """What these prompts share, and what that would save. Runs no model. A rank asks no other one."""
        plan: SharingPlan = self._ask(PartGenerator._plan, listed(as_list(prompts)), adapter, prompt_options)
        return plan

    def __enter__(self) -> Self:
        return self

    # -- a call --------------------------------------------------------------------------------------------------

    @contextmanager
    def _taking(self) -> Iterator[None]:
        if self._closed:
            raise GeneratorBusyError(f"this {type(self).__name__} is closed: make a new one")
        if self._running:
            raise GeneratorBusyError(f"{self._still_running}. One call at a time")
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _ask(self, function: Callable[..., Any], *given: Any) -> Any:
        """Ask a worker while no call runs: see ``_found``."""
        with self._taking():
            return self._found(function, *given)

    def _generate_work(self, prompts: Any, config: Any, seed: Any, on_error: str, options: dict[str, Any]) -> Work:
        ask, settings = partial(self._found, PartGenerator.checked_job), (config, seed, on_error, options)
        return GenerateWork.checked(ask, prompts, settings, self._notices.names, self._config)

    @abstractmethod
    def _found(self, function: Callable[..., Any], *given: Any) -> Any:
        """``function(generator, *given)``, as one of the processes finds it."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str | None:
        """For a picture of results in a notebook."""

    @abstractmethod
    def _run(self, make: Callable[[], Work], strict: bool, progress: bool | None, index: Any) -> Finished[Any]:
        """All of a call, with a result for what cannot be run, too. ``strict``: that is an error of the call."""


def checked_patience(patience: Any) -> float:
    if not is_number(patience) or not patience > 0:
        raise ConfigError(f"`patience` is {shown(patience)}: it is a number of seconds above 0")
    return float(patience)
