"""GeneratorPool: the methods of a BatchGenerator, over several processes with a GPU each."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from transformers import AutoTokenizer, GenerationConfig

from ..config import BatchConfig
from ..engine.unfinished import Finished, FinishedGenerations, results_kept
from ..errors import ConfigError, GeneratorBusyError, OptionValueError
from ..inputs.adapters import AS_IT_IS
from ..inputs.config_fields import ConfigFields, shows_config_fields
from ..inputs.named_options import LEFT_OUT, GenerateOptions, shows_options
from ..inputs.option_checks import check_progress
from ..inputs.preparing import bars_wanted
from ..inputs.prompts import as_list
from ..inputs.seeds import Seeds
from ..inputs.short_tracebacks import with_short_tracebacks
from ..notices import Notices
from ..results.dataframes import index_of
from ..results.generations import BatchResult, Generation
from ..results.missing_names import OF_A_GENERATOR, no_such
from ..results.run_report import RunReport
from ..results.scores import ScoreResult
from ..results.sharing_plan import SharingPlan
from ..wording import is_number, shown
from .asked import decoded, plan_of, tokenizer_of
from .checked_work import checked_score_work, checked_work, listed
from .crew import Crew
from .devices import WorkerDevice, worker_devices
from .lead import Lead
from .loaders import ByName, LoadGenerator, in_parts, loader_for, sendable_tokenizer
from .part_generator import PartGenerator
from .pool_call import PoolCall
from .pool_progress import pool_bar
from .pool_report import Tally, report_of
from .work import GenerateWork, ScoreWork, Work

_PATIENCE = 900.0  # seconds: a first step may compile kernels, and check them
_STILL_RUNNING = "a call is running already, or a stream is still open: let it end (a stream also by its close())"


class GeneratorPool:
    """One list of prompts on several GPUs: as BatchGenerator, with a process and a whole model on each of them.

        with GeneratorPool("path/or/name", gpus=8) as gen:
            out = gen.generate(prompts, max_new_tokens=100)

    model: a path or name for ``from_pretrained``, or a function that loads the model and returns it (or the model and
        its tokenizer). Each process loads its own.
    tokenizer: a tokenizer, or a path or name; by default the one saved beside the model.
    config: a BatchConfig; its fields may be given as keyword arguments instead. They hold for each process.
    gpus: how many, or a list of their numbers; by default all that there are. ``["cpu", "cpu"]`` are two processes on
        the CPU.
    tp: how many GPUs have a model together, each a part of it, where it does not fit into one: ``gpus=8, tp=2`` are
        four models (docs/larger-models.md).
    model_options: of ``from_pretrained``, such as ``{"dtype": torch.bfloat16}``.
    patience: seconds after which a process that does not get on is ended.

    The list is planned as a whole. Prompts that share a prefix go to one process, and are parted only where others
    would wait. Answers are those of one process, in the order of the prompts, and with a seed so are samples. The loss
    of a process is told of once, and the others run what it had. The processes live until ``close()``, or as long as
    this one.
    """

    @shows_config_fields
    @with_short_tracebacks
    def __init__(
        self,
        model: str | os.PathLike[str] | Callable[[], Any],
        tokenizer: Any = None,
        config: BatchConfig | None = None,
        *,
        gpus: int | Sequence[int | str] | None = None,
        tp: int = 1,
        model_options: Mapping[str, Any] | None = None,
        patience: float = _PATIENCE,
        **fields: Unpack[ConfigFields],
    ) -> None:
        self._config = BatchConfig.of(config, dict(fields))
        if not is_number(patience) or not patience > 0:
            raise ConfigError(f"`patience` is {shown(patience)}: it is a number of seconds above 0")
        load, tokenizer = loader_for(model, model_options), sendable_tokenizer(tokenizer)
        devices = worker_devices(gpus, tp)
        load = in_parts(load, tp)
        self._notices = Notices()
        self.last_report: RunReport | None = None
        self.interrupted: BatchResult | ScoreResult | None = None
        named = tokenizer if isinstance(tokenizer, str) else load.name if isinstance(load, ByName) else None
        self._tokenizer_name = None if tokenizer is not None and not isinstance(tokenizer, str) else named
        self._tokenizer: Any = None if isinstance(tokenizer, str) else tokenizer
        self._running = self._closed = False
        self._calls = 0

        def load_on(device: WorkerDevice) -> LoadGenerator:
            return LoadGenerator(load, tokenizer, self._config, device.device, device.processes)

        self._crew = Crew(devices, load_on, float(patience), self._notices)
        self._end = weakref.finalize(self, Crew.end, self._crew)
        self._lead = Lead(self._crew)
        try:
            self._lead.worker()
        except BaseException:
            self.close()
            raise

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_such(self, name, OF_A_GENERATOR)

    @property
    def config(self) -> BatchConfig:
        """The settings of each process."""
        return self._config

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the one saved beside the model; None if there is neither."""
        if self._tokenizer is None and self._tokenizer_name is not None:
            with contextlib.suppress(Exception):
                self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_name)
        elif self._tokenizer is None:
            self._tokenizer = self._ask(tokenizer_of)
        return self._tokenizer

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
        finished: Finished[Any] = _Nothing()

        def body() -> BatchResult:
            nonlocal finished
            began = time.perf_counter()
            work = self._generate_work(prompts, generation_config, seed, on_error, dict(generate_kwargs))
            finished, took = work.finished(), time.perf_counter() - began
            finished.index = index_of(prompts)
            for result in self._results(work, finished, on_error == "raise", progress, took):
                finished.results[work.key(result)] = result
            rows = finished.results | {work.key(failure): failure for failure in work.failures()}
            result = BatchResult([rows[key] for key in sorted(rows)], finished.report, self._decode)
            result._index = finished.index
            return result

        with self._taking(), results_kept(self, lambda: finished, self._decode):
            check_progress(progress)
            return body()

    @shows_options
    @with_short_tracebacks
    def stream(
        self,
        prompts: Any,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        *,
        seed: Seeds | None = None,
        on_error: str = "raise",
        progress: bool | None = None,
        **generate_kwargs: Unpack[GenerateOptions],
    ) -> Iterator[Generation]:
        """As ``generate``, but each result as soon as it is finished. Prompts and options are checked at once."""
        return self._stream_named(
            None, prompts, generation_config, seed=seed, on_error=on_error, progress=progress, **generate_kwargs
        )

    def _stream_named(
        self,
        names: Sequence[str] | None,  # of the prompts, in warnings
        prompts: Any,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        *,
        seed: Seeds | None,
        on_error: str,
        progress: bool | None,
        **options: Any,
    ) -> Iterator[Generation]:
        check_progress(progress)
        began = time.perf_counter()
        with self._taking():
            work = self._generate_work(prompts, generation_config, seed, on_error, options, names)
        return self._streamed(work, on_error == "raise", progress or False, time.perf_counter() - began)

    def _ask(self, function: Callable[..., Any], *given: Any) -> Any:
        """``function(generator, *given)``, as a worker finds it."""
        with self._taking():
            return self._lead.ask(function, *given)

    def _streamed(self, work: Work, strict: bool, progress: bool, planning_seconds: float) -> Iterator[Any]:
        with self._taking():
            known = len(work.problems)
            yield from work.failures()
            yield from self._results(work, work.finished(), strict, progress, planning_seconds)
            if len(work.problems) > known:  # found while it ran
                yield from list(work.failures())[known:]

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
        finished: Finished[Any] = _Nothing()

        def body() -> ScoreResult:
            nonlocal finished
            began = time.perf_counter()
            ask = partial(self._lead.ask, PartGenerator.checked_scores, what="what is to be scored")
            given = contexts, continuations, choices, on_error, adapter, chat_options
            work = checked_score_work(ask, *given, self._config)
            finished, took = work.finished(), time.perf_counter() - began
            finished.index = index_of(continuations if contexts is None else contexts)
            for result in self._results(work, finished, on_error == "raise", progress, took):
                finished.results[work.key(result)] = result
            result = ScoreResult([*finished.results.values(), *work.failures()], finished.report)
            result._index = finished.index
            return result

        with self._taking(), results_kept(self, lambda: finished, self._decode):
            check_progress(progress)
            return body()

    @with_short_tracebacks
    def plan(self, prompts: Any, *, adapter: Any = AS_IT_IS, **prompt_options: Any) -> SharingPlan:
        """What these prompts share, and what that would save. Runs no model."""
        with self._taking():
            plan: SharingPlan = self._lead.ask(
                plan_of, listed(as_list(prompts)), adapter, prompt_options, what="a prompt or an option"
            )
            return plan

    def wait(self) -> None:
        """Until all processes have loaded the model, or are lost. A call does not need that: late ones join it."""
        with self._taking():
            self._lead.everybody()

    def close(self) -> None:
        """End the processes, and give back all of their memory."""
        if self._running:
            raise GeneratorBusyError(f"{_STILL_RUNNING}, then close()")
        self._closed = True
        self._end()

    def __enter__(self) -> GeneratorPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._running = False  # a stream may be open, and the error goes on
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a GeneratorPool holds processes of its own, so it cannot be copied or pickled")

    def __len__(self) -> int:
        """How many processes there are that have a model: with ``tp``, groups of them."""
        return len(self._crew.alive)

    def __repr__(self) -> str:
        loaded = self._crew.loaded
        name = "loading" if loaded is None else loaded.name
        places = ", ".join(worker.device.name for worker in self._crew.alive)
        return f"GeneratorPool({name}, {'closed' if self._closed else places or 'no process is left'})"

    # -- a call --------------------------------------------------------------------------------------------------

    @contextmanager
    def _taking(self) -> Iterator[None]:
        if self._closed:
            raise GeneratorBusyError("this GeneratorPool is closed: make a new one")
        if self._running:
            raise GeneratorBusyError(f"{_STILL_RUNNING}. One call at a time")
        self._crew.check()
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _generate_work(
        self,
        prompts: Any,
        config: Any,
        seed: Any,
        on_error: str,
        options: dict[str, Any],
        names: Sequence[str] | None = None,
    ) -> GenerateWork:
        if options.get("assistant_model") is not None:
            why = "is a model of this process, and those of the pool have none: leave it out, or use BatchGenerator"
            raise OptionValueError("assistant_model", why)
        ask = partial(self._lead.ask, PartGenerator.checked_job, what="a prompt or an option of this call")
        return checked_work(ask, prompts, config, seed, on_error, options, names, self._config)

    def _results(
        self,
        work: Work,
        finished: Finished[Any],
        strict: bool,
        progress: bool | None,
        planning_seconds: float,
    ) -> Iterator[Any]:
        """Results as they come. The report is in ``finished`` afterwards."""
        self._calls += 1
        began = time.perf_counter()
        with bars_wanted(progress):
            plan = work.plan
            self._label(plan, work)
            self._lead.worker()
            assert self._crew.loaded is not None
            workers = self._crew.alive
            split = work.split(len(workers), self._crew.loaded.costs)
        planning_seconds += time.perf_counter() - began
        call = PoolCall(self._calls, self._crew, workers, work, split, self._notices, strict)
        tally, noun = Tally(), "scores" if isinstance(work, ScoreWork) else "results"
        try:
            with pool_bar(finished.expected, noun, plan.computed_tokens, plan.saving, len(workers), progress) as show:
                for result in call.results(lambda: show(call, tally.finished)):
                    tally.add(result)
                    yield result
        finally:
            report = report_of(
                [(worker.device.name, share) for worker, share in call.shares.items()],
                plan,
                work,
                tally,
                expected=finished.expected,
                over=not call.is_open,
                seconds=call.seconds,
                planning_seconds=planning_seconds,
            )
            finished.report = self.last_report = report

    def _label(self, plan: SharingPlan, work: Work) -> None:
        """The first words of what is shared most, decoded by a worker, which has the tokenizer."""
        wanted: list[list[int]] = []
        prompts = work.sequences
        plan.add_labels(prompts, lambda ids: wanted.append(ids))
        if wanted:
            texts = iter(self._lead.ask(decoded, wanted))
            plan.add_labels(prompts, lambda ids: next(texts))

    def _decode(self, ids: list[int]) -> str | None:
        """For a picture of results in a notebook."""
        if self._closed or self._running or not self._crew.alive:
            return None
        text: str | None = self._lead.ask(decoded, [ids])[0]
        return text


class _Nothing(FinishedGenerations):
    """Before a call has been checked."""
