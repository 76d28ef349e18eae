"""``accelerated(pipe)``: a pipeline of the user's, for text or for images, gives all its inputs to a BatchGenerator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

from transformers import ImageTextToTextPipeline, Pipeline, TextGenerationPipeline

from ..config import BatchConfig
from ..engine.job import Job, JobChecks
from ..errors import GeneratorBusyError, UnsupportedModelError, UnsupportedOptionError
from ..inputs.config_names import without_foreign_names
from ..notices import warn_user
from ..patches.attention_interface import ATTENTION_NAME
from ..patches.attention_swap import AttentionSwap
from ..results.run_report import RunReport
from .batch_pipeline import BatchPipeline
from .fallbacks import (
    Fallback,
    ReportLeft,
    reason_to_fall_back,
    refuse_custom_generate,
    refuse_what_sees_all_rows,
    right_padding,
)
from .image_pipeline_call import ImagePipelineCall
from .pipeline_call import AROUND_THE_MODEL, PipelineCall, PreparedInputs, TokenGenerator
from .pipeline_inputs import read_inputs
from .pipeline_options import Parameters
from .pipeline_results import ResultIterator

_SERVED: dict[type[Pipeline], type[PipelineCall]] = {
    TextGenerationPipeline: PipelineCall,
    ImageTextToTextPipeline: ImagePipelineCall,
}
_REPLACED = ("get_iterator", "run_single")  # methods that every call of a pipeline goes through
_MUST_BE_STOCK = (*AROUND_THE_MODEL, *_REPLACED)  # if the user changes one, this module would pass over the change
_TOO_LATE = "accelerated() ended before these results were read: read them in its block"
_ABSENT = object()


@contextmanager
def accelerated_pipeline(
    pipe: Pipeline, tokenizer: Any, config: BatchConfig, stand_in: Callable[..., Any]
) -> Iterator[Pipeline]:
    """``stand_in`` makes the stand-in for ``model.generate``, for a pipeline that must run batch by batch."""
    if isinstance(pipe, BatchPipeline):
        raise UnsupportedModelError(f"a {pipe.task} pipeline runs whole lists as it is: leave accelerated() out")
    if not isinstance(pipe, tuple(_SERVED)):
        raise UnsupportedModelError(
            "accelerated(pipe) takes a pipeline for text-generation or image-text-to-text, not one for "
            f"{pipe.task or type(pipe).__name__}: pass the model in it, accelerated(pipe.model)"
        )
    tokenizer = pipe.tokenizer if tokenizer is None else tokenizer
    changed = _changed_method(pipe)
    if changed is not None:
        warn_user(
            f"{type(pipe).__name__} has {changed} of its own, so its batches are accelerated one by one, and a prefix "
            "that batches share is computed for each of them: make batches large (`batch_size`)"
        )
    whole = changed is None
    acting: Any = _PipelineStandIn(pipe, tokenizer, config) if whole else stand_in(pipe.model, tokenizer, config, pipe)
    try:
        acting.enter()
        yield pipe
    finally:
        acting.leave()


def _stock_of(pipe: Pipeline) -> type[Pipeline]:
    return next(each for each in _SERVED if isinstance(pipe, each))


def _changed_method(pipe: Pipeline) -> str | None:
    """A method that the pipeline, or its class, has changed: "a `forward`"; None if there is none."""
    for name in _MUST_BE_STOCK:
        own = vars(pipe).get(name)
        if own is not None and not isinstance(own, _MethodStandIn):
            return f"a `{name}`"
        if getattr(type(pipe), name) is not getattr(_stock_of(pipe), name):
            return f"a `{name}`"
    return None


class _ChecksAsPipeline(JobChecks):
    """Refuses callables that a pipeline would call for one prompt after the other: they might keep state."""

    def job(self, architecture: Any, prompts: Any, generation_config: Any, *given: Any) -> Job:
        job = super().job(architecture, prompts, without_foreign_names(generation_config), *given)
        if job.sequences > 1:
            why = "a pipeline calls for one batch after the other: use BatchGenerator, which calls it for each row"
            refuse_what_sees_all_rows(job.options[0].arguments, why)
            if job.options[0].arguments.prefix_allowed_tokens_fn is not None:
                raise UnsupportedOptionError("prefix_allowed_tokens_fn", f"is a function that {why}")
        return job

    def _warn_of_greedy(self, *given: Any) -> None:
        """Nothing: the caller writes for `generate`, whose names mean what they mean there."""


class _GeneratorAsPipeline(TokenGenerator):
    _kind_of_checks = _ChecksAsPipeline


class _MethodStandIn:
    """Takes the place of a method of the pipeline within the block."""

    def __init__(self, stand_in: _PipelineStandIn, name: str, serve: Callable[..., Any]) -> None:
        self.stand_in = stand_in
        self._name = name
        self._serve = serve

    def __repr__(self) -> str:
        return f"<accelerated {self._name} of {type(self.stand_in.pipe).__name__}>"

    @property
    def last_report(self) -> RunReport | None:
        return self.stand_in.last_report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._serve(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles of the pipeline: a copy gets the method of its own class."""
        return getattr, (self.stand_in.pipe, self._name)


class _PipelineStandIn(Fallback):
    instead = "the pipeline runs as it does without"
    item = "prompt"

    def __init__(self, pipe: Pipeline, tokenizer: Any, config: BatchConfig) -> None:
        super().__init__()
        self.pipe = pipe
        self._model = pipe.model
        self._before: dict[str, Any] = {}
        self._report = ReportLeft(pipe)
        self._ended = False
        self._open: weakref.WeakSet[ResultIterator] = weakref.WeakSet()
        try:
            self._generator = _GeneratorAsPipeline(pipe.model, tokenizer, config)
            refuse_custom_generate(pipe.model)
        except UnsupportedModelError as refusal:
            self._refusal = refusal

    def enter(self) -> None:
        attributes = vars(self.pipe)
        self._before = {name: attributes.get(name, _ABSENT) for name in _REPLACED}
        serve: tuple[Callable[..., Any], ...] = (self._iterator, self._single)
        for name, method in zip(_REPLACED, serve, strict=True):
            attributes[name] = _MethodStandIn(self, name, method)
        self._report.begin()

    def leave(self) -> None:
        self._ended = True
        attributes = vars(self.pipe)
        if self._is_mine(attributes.get(_REPLACED[0])):  # else an inner accelerated() replaced it, and restores it
            before, report = self._before, self._report
            while isinstance(outer := before[_REPLACED[0]], _MethodStandIn) and outer.stand_in._ended:
                before, report = outer.stand_in._before, outer.stand_in._report
            self._report.end(report)
            for name, value in before.items():
                if value is _ABSENT:
                    attributes.pop(name, None)
                else:
                    attributes[name] = value
        with AttentionSwap(self._model).others_wait():  # for calls of other threads
            for results in list(self._open):
                with suppress(ValueError):  # "already executing": the thread that reads it sees `_ended` by itself
                    results.break_off(GeneratorBusyError(_TOO_LATE))
            self._close_if_ended()

    def _close_if_ended(self) -> None:
        if self._ended and self._generator is not None:
            with suppress(GeneratorBusyError):  # the thread that runs its last call closes it
                self._generator.close()

    def _is_mine(self, method: Any) -> bool:
        return isinstance(method, _MethodStandIn) and method.stand_in is self

    # -- calls -------------------------------------------------------------------------------------------------

    def _single(self, given: Any, preprocess: Any, forward: Any, postprocess: Any) -> Any:
        def original() -> Any:
            return type(self.pipe).run_single(self.pipe, given, preprocess, forward, postprocess)

        def serve(call: PipelineCall, generator: TokenGenerator, prepared: PreparedInputs) -> Any:
            return call.results(generator, prepared)[0]

        return self._served([given], (preprocess, forward, postprocess), serve, original)

    def _iterator(
        self, inputs: Any, num_workers: int, batch_size: int, preprocess: Any, forward: Any, postprocess: Any
    ) -> Any:
        parameters = preprocess, forward, postprocess

        def original(inputs: Any = inputs) -> Any:
            return type(self.pipe).get_iterator(self.pipe, inputs, num_workers, batch_size, *parameters)

        batched = batch_size > 1
        if isinstance(inputs, list):
            return self._served(inputs, parameters, PipelineCall.results, lambda: list(original()), batched)
        if self._ended:
            return original()
        results = ResultIterator(lambda: self._stream(inputs, parameters, original, batched), inputs)
        self._open.add(results)
        return results

    def _stream(
        self, inputs: Any, parameters: tuple[Parameters, ...], original: Callable[[Any], Any], batched: bool
    ) -> Generator[Any, None, None]:
        if self._ended:
            self._warn(GeneratorBusyError("accelerated() had ended when the first result was asked for"))
            yield from original(inputs)
            return
        given = read_inputs(inputs)

        def begin(call: PipelineCall, generator: TokenGenerator, prepared: PreparedInputs) -> Iterator[Any]:
            results = call.stream(generator, prepared)
            return chain([next(results)], results) if given else results

        results = self._served(given, parameters, begin, lambda: iter(original(given)), batched)
        try:
            while True:
                with self._turn():  # for each result: the reader may call the pipeline in between
                    if self._ended:
                        raise GeneratorBusyError(_TOO_LATE)
                    try:
                        result = next(results)
                    except StopIteration:
                        return
                yield result
        finally:
            del results  # ends the engine's call where results are left
            self._note_report()
            self._close_if_ended()

    def _served(
        self,
        inputs: list[Any],
        parameters: tuple[Parameters, ...],
        serve: Callable[..., Any],
        original: Callable[[], Any],
        batched: bool = False,
    ) -> Any:
        """``batched``: the original would pad inputs to run several together."""
        if self._ended:
            return original()
        with self._turn():
            generator: Any = self._generator
            reason = self._refusal
            if self.pipe.model is not self._model:
                reason = UnsupportedModelError("the pipeline was given another model since accelerated(pipe) began")
            elif (changed := _changed_method(self.pipe)) is not None:
                reason = UnsupportedModelError(f"the pipeline was given {changed} since accelerated(pipe) began")
            if reason is not None:
                return self._run_original(reason, original)
            generator.last_report = None
            preprocess, forward, postprocess = parameters
            call = _SERVED[_stock_of(self.pipe)](self.pipe, preprocess, forward, postprocess, lenient=False)
            unlike = reason_to_fall_back(call.options)
            if unlike is not None:
                return self._run_original(unlike, original)
            call.options["progress"] = False
            prepared = call.prepare(inputs, generator)
            try:
                on_the_right = getattr(self.pipe.tokenizer, "padding_side", None) == "right"
                if prepared.padded_right or (batched and len(inputs) > 1 and on_the_right):
                    return self._run_original(right_padding(), original)
                return self._attempt(lambda: serve(call, generator, prepared), original)
            finally:
                self._note_report()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time: while another thread is in a step, the model's attention is swapped."""
        with AttentionSwap(self._model).others_wait() as attention:
            if attention == ATTENTION_NAME:
                raise GeneratorBusyError(
                    "the pipeline was called from within a step of a running call (by a hook?), while the model's "
                    "attention is swapped: make the outer call without accelerated(), or the inner call later"
                )
            yield

    def _note_report(self) -> None:
        if not self._ended:
            self._report.note(self.last_report)
