"""GeneratorPool: the methods of a BatchGenerator, over several processes with a GPU each."""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Unpack

from transformers import AutoTokenizer, GenerationConfig

from ..config import BatchConfig
from ..engine.progress import call_bar
from ..engine.unfinished import Finished, FinishedGenerations, results_kept
from ..errors import GeneratorBusyError, OptionValueError
from ..inputs.config_fields import ConfigFields, shows_config_fields
from ..inputs.named_options import GenerateOptions, shows_options
from ..inputs.option_checks import check_progress
from ..inputs.preparing import bars_wanted
from ..inputs.seeds import Seeds
from ..inputs.short_tracebacks import with_short_tracebacks
from ..notices import Notices
from ..results.generations import Generation
from .crew import Crew
from .devices import worker_devices
from .list_calls import PATIENCE, ListCalls, checked_patience
from .loaders import LoadGenerator, loader_for, sendable_tokenizer
from .part_generator import PartGenerator
from .pool_call import PoolCall
from .pool_report import count_in, report_of
from .work import ScoreWork, Work, key_of


class GeneratorPool(ListCalls):
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

    _still_running = "a call is running already, or a stream is still open: let it end (a stream also by its close())"

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
        patience: float = PATIENCE,
        **fields: Unpack[ConfigFields],
    ) -> None:
        super().__init__(BatchConfig.of(config, dict(fields)), Notices())
        patience = checked_patience(patience)
        load, tokenizer = loader_for(model, model_options, processes=tp), sendable_tokenizer(tokenizer)
        devices = worker_devices(gpus, tp)
        # An object, or the path or name that it comes from; None if a worker is asked for it.
        self._tokenizer: Any = getattr(load, "name", None) if tokenizer is None else tokenizer
        self._crew = Crew(devices, LoadGenerator(load, tokenizer, self._config, tp), patience, self._notices)
        self._end = weakref.finalize(self, Crew.end, self._crew)
        try:
            self._crew.leader()
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the one saved beside the model; None if there is neither."""
        if self._tokenizer is None:
            self._tokenizer = self._ask(attrgetter("tokenizer"))
        elif isinstance(self._tokenizer, str):
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer)
            except Exception:
                return None
        return self._tokenizer

    # -- the public calls ----------------------------------------------------------------------------------------

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
        """Like ``generate``, but gives each result once it is finished. Prompts and options are checked at once."""
        check_progress(progress)
        began = time.perf_counter()
        with self._taking():
            work = self._generate_work(prompts, generation_config, seed, on_error, dict(generate_kwargs))
        return self._streamed(work, on_error == "raise", progress or False, time.perf_counter() - began)

    def _streamed(self, work: Work, strict: bool, progress: bool, planning_seconds: float) -> Iterator[Any]:
        with self._taking():
            known = {key_of(failure): failure for failure in work.failures()}
            yield from known.values()
            yield from self._results(work, strict, progress, planning_seconds)
            yield from (failure for failure in work.failures() if key_of(failure) not in known)  # found while it ran

    def wait(self) -> None:
        """Until all processes have loaded the model, or are lost. A call does not need that: late ones join it."""
        with self._taking():
            self._crew.everybody()

    def close(self) -> None:
        """End the processes, and give back all of their memory."""
        if self._running:
            raise GeneratorBusyError(f"{self._still_running}, then close()")
        self._closed = True
        self._end()

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
        with super()._taking():
            self._crew.check()
            yield

    def _found(self, function: Callable[..., Any], *given: Any) -> Any:
        return self._crew.ask(function, *given)

    def _generate_work(self, prompts: Any, config: Any, seed: Any, on_error: str, options: dict[str, Any]) -> Work:
        if options.get("assistant_model") is not None:
            why = "is a model of this process, and those of the pool have none: leave it out, or use BatchGenerator"
            raise OptionValueError("assistant_model", why)
        return super()._generate_work(prompts, config, seed, on_error, options)

    def _run(self, make: Callable[[], Work], strict: bool, progress: bool | None, index: Any) -> Finished[Any]:
        finished: Finished[Any] = FinishedGenerations()
        with self._taking(), results_kept(self, lambda: finished, self._decode):
            check_progress(progress)
            began = time.perf_counter()
            work = make()
            finished, took = work.finished, time.perf_counter() - began
            finished.index = index
            for result in self._results(work, strict, progress, took):
                finished.results[key_of(result)] = result
            finished.results.update((key_of(failure), failure) for failure in work.failures())
        return finished

    def _results(self, work: Work, strict: bool, progress: bool | None, planning_seconds: float) -> Iterator[Any]:
        """Results as they come. The report is in ``work.finished`` afterwards."""
        began = time.perf_counter()
        with bars_wanted(progress):
            self._label(work)
            self._crew.leader()
            call = PoolCall(self._crew, work, strict)
        planning_seconds += time.perf_counter() - began
        counts, finished = Counter[str](), work.finished
        things = f"{'scores' if isinstance(work, ScoreWork) else 'results'} on {len(call.shares)} processes"
        try:
            with call_bar(finished.expected, things, work.plan.saving, progress) as bar:
                for result in call.results(lambda: call.draw(bar, counts["finished"])):
                    count_in(counts, result)
                    yield result
        finally:
            report = report_of(
                [*call.shares.values()],
                work,
                counts,
                over=not call.is_open,
                seconds=call.seconds,
                planning_seconds=planning_seconds,
            )
            finished.report = self.last_report = report

    def _label(self, work: Work) -> None:
        """The first words of what is shared most, decoded by a worker, which has the tokenizer."""
        prompts, wanted = work.sequences, list[list[int]]()
        work.plan.add_labels(prompts, lambda ids: wanted.append(ids))
        if wanted:
            texts = iter(self._found(PartGenerator.texts_of, wanted))
            work.plan.add_labels(prompts, lambda ids: next(texts))

    def _decode(self, ids: list[int]) -> str | None:
        if self._closed or self._running or not self._crew.alive:
            return None
        text: str | None = self._found(PartGenerator.texts_of, [ids])[0]
        return text
