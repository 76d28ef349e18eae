"""``accelerated(model)``: code that calls ``model.generate`` (a harness, a trainer) runs faster without a change."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, _GeneratorContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import GenerationMixin

from ..config import BatchConfig
from ..engine.job import Job, JobChecks
from ..engine.tensor_results import refuse_no_cache
from ..errors import GeneratorBusyError, UnsupportedModelError, UnsupportedOptionError
from ..generator import BatchGenerator
from ..inputs.call_arguments import CallArguments
from ..inputs.config_names import without_foreign_names
from ..inputs.options import Options
from ..inputs.resolve_options import resolve_each
from ..notices import warn_user
from ..patches.attention_swap import AttentionSwap
from ..sampling import processor_chains
from .batch_methods import BatchMethods
from .batch_requests import without_own_defaults
from .fallbacks import (
    Fallback,
    ReportLeft,
    reason_to_fall_back,
    refuse_custom_generate,
    refuse_what_sees_all_rows,
    right_padding,
)
from .method_stand_in import MethodStandIn

Model = TypeVar("Model")  # a model, or a pipeline

_SIGNATURE = inspect.signature(GenerationMixin.generate)
_CALLED_WITH_ALL_ROWS = (
    "`generate` calls with all rows at once: pass one row at a time, or use BatchGenerator, which calls it for each row"
)


class _Block(_GeneratorContextManager[Model]):
    """What ``accelerated`` returns. It warns where it is thrown away and no block was ever run with it."""

    _used = False

    def __enter__(self) -> Model:
        self._used = True
        return super().__enter__()

    def __call__(self, function: Any) -> Any:  # as a decorator; each call of the function gets a block of its own
        self._used = True
        return super().__call__(function)

    def _recreate_cm(self) -> Any:
        return type(self)(self.func, self.args, self.kwds)

    def __del__(self) -> None:
        if not self._used and not sys.is_finalizing():
            kind = "pipe" if "pipeline" in type(self.args[0]).__name__.lower() else "model"
            warn_user(f"accelerated({kind}) does nothing by itself: write `with accelerated({kind}):` around the calls")


def accelerated(
    model: Model, tokenizer: Any = None, config: BatchConfig | None = None, **fields: Any
) -> AbstractContextManager[Model]:
    """While the block runs, a BatchGenerator serves ``model.generate``; afterwards the model is as it was.

        with accelerated(model):
            model.generate(**inputs, max_new_tokens=50)

        with accelerated(pipe):
            pipe(prompts, max_new_tokens=50)

    A call that cannot be served goes to the model's own ``generate``, with one warning that says why. Sampling draws
    other tokens than ``generate`` would, from the same distribution; it repeats after ``set_seed``. Prefixes are shared
    within a call; between calls only with ``keep_prefixes``. ``tokenizer``, ``config`` and ``fields`` are those of
    BatchGenerator.

    ``model.last_report`` (or ``pipe.last_report``) says how the last call went: a RunReport; None if the call was not
    served. It stays when the block has ended, if any call was served. An attribute of your own of that name comes back.

    ``model.generate_batch``, and the manager of ``model.init_continuous_batching``, are served in the same way.

    A pipeline, for text-generation or image-text-to-text, computes all inputs of a call at once, whatever its
    ``batch_size``. Datasets and generators are read to their end first. A call that cannot be served goes the
    pipeline's usual way.
    """
    return _Block(_block, (model, tokenizer, config, fields), {})


def _block(
    model: Model, tokenizer: Any, config: BatchConfig | None, fields: dict[str, Any]
) -> Generator[Model, None, None]:
    pipelines = sys.modules.get("transformers.pipelines")  # not loaded: no pipeline; and importing it takes long
    if pipelines is not None and isinstance(model, pipelines.Pipeline):
        from .accelerated_pipeline import accelerated_pipeline

        with accelerated_pipeline(model, tokenizer, BatchConfig.of(config, fields), _StandIn):
            yield model
        return
    if not isinstance(model, nn.Module) or not callable(getattr(model, "generate", None)):
        inside = ": is the model in its `.model`?" if hasattr(model, "model") else ""
        raise UnsupportedModelError(
            f"accelerated(model) takes a model that has a `generate`, not {type(model).__name__}{inside}"
        )
    stand_in = _StandIn(model, tokenizer, BatchConfig.of(config, fields))
    try:
        stand_in.enter()
        yield model
    finally:
        stand_in.leave()


class _EndTogether:
    """The evaluation harness's stop strings for a batch: its rows end together, once all of them have held a string.

    Copies of the harness's criteria look at each row by itself. A row goes on until the others have held the string,
    too, and may be longer by then: ``cut`` takes away what ``generate`` would not have computed.
    """

    def __init__(self, job: Job) -> None:
        assert job.rows is not None
        rules = job.rules[0]
        rows, self._width = job.rows.shape
        self._criteria, self._stop_tokens, self._padding = rules.others, rules.stop_tokens, job.options[0].pad_token_id
        # The new tokens of each row when it first held the string; 0: never.
        self._found = [[0] * rows for _ in self._criteria]
        self._length: int | None = None  # new tokens of all rows in the end
        self.job = replace(job, rules=[replace(rules, others=(), factory=self._of_row)] * len(job.rules))

    @staticmethod
    def serves(job: Job) -> bool:
        assert job.rows is not None
        (rows, width), given = job.rows.shape, job.rules[0].others
        return (
            bool(given)
            and not job.options[0].config.return_dict_in_generate
            and all(type(each).__name__ == "MultiTokenEOSCriteria" for each in given)
            and all(type(each).__module__.startswith("lm_eval.") for each in given)
            and all(
                each.done_tracker == [False] * rows and each.initial_decoder_input_length == width for each in given
            )
        )

    def cut(self, sequences: torch.Tensor) -> torch.Tensor:
        return sequences if self._length is None else sequences[:, : self._width + self._length]

    def _of_row(self, index: int, prompt_token_ids: list[int]) -> list[Any]:
        own = [copy.copy(each) for each in self._criteria]
        for each in own:
            each.done_tracker = [False]

        def look(ids: torch.Tensor, scores: Any) -> None:
            for each, found in zip(own, self._found, strict=True):
                if not found[index] and each(ids, scores):
                    found[index] = ids.shape[1] - self._width
                    self._length = min((max(lengths) for lengths in self._found if all(lengths)), default=None)

        def ends(ids: torch.Tensor, scores: Any) -> bool:
            made = ids.shape[1] - self._width
            look(ids, scores)
            if int(ids[0, -1]) in self._stop_tokens:  # `generate` goes on with padding, at which the harness looks, too
                for _ in range(max(each.sequence_id_len for each in own)):
                    ids = nn.functional.pad(ids, (0, 1), value=self._padding)
                    look(ids, scores)
            return self._length is not None and made >= self._length

        return [ends]


class _ChecksAsGenerate(JobChecks):
    """Refuses calls whose results would differ from a batch of ``generate``, which runs all rows in step."""

    together: _EndTogether | None = None  # the latest call's

    def job(self, architecture: Any, prompts: Any, generation_config: Any, *given: Any) -> Job:
        self.together = None
        job = super().job(architecture, prompts, without_foreign_names(generation_config), *given)
        if job.rows is None:  # of generate_batch, which runs each request by itself
            return job
        if job.options and _is_padded(job):
            _refuse_callables_that_see_padding(job.options[0].arguments)
        # The beams of a prompt are passed together here, too.
        searching = bool(job.options) and job.options[0].num_beams > 1
        if (len(job.options) if searching else sum(options.num_return_sequences for options in job.options)) > 1:
            arguments = job.options[0].arguments
            if not searching and _EndTogether.serves(job):
                self.together = _EndTogether(job)
                job, arguments = self.together.job, replace(arguments, stopping_criteria=None)
            refuse_what_sees_all_rows(arguments, _CALLED_WITH_ALL_ROWS)
            rules = job.rules[0]
            if rules.looks_back and not rules.stop_tokens and not searching:
                ending = "stop_strings" if rules.strings else "stopping_criteria"
                why = "ends rows one by one, and without an EOS token `generate` goes on with all rows until all end"
                raise UnsupportedOptionError(ending, why)
        return job

    def _resolved(self, generation_config: Any, generate_kwargs: dict[str, Any], padded: Any) -> list[Options]:
        if not isinstance(generation_config, list):
            return super()._resolved(generation_config, generate_kwargs, padded)
        model = without_own_defaults(self._model, generation_config)
        return resolve_each(model, generation_config, generate_kwargs, None, self._notices)

    def _see_right_padding(self) -> None:
        raise right_padding()

    def _warn_of_greedy(self, *given: Any) -> None:
        """Nothing: the caller writes for `generate`, whose names mean what they mean there."""


class _AsGenerate(BatchGenerator):
    _kind_of_checks = _ChecksAsGenerate
    _logprobs_of_scores = True  # as generate_batch has them
    _at_hand = False

    def as_generate(self, named: dict[str, Any]) -> Any:
        result = self.generate(progress=False, **named)
        checks = self._checks
        together = checks.together if isinstance(checks, _ChecksAsGenerate) else None
        return result if together is None else together.cut(result)


class _StandIn(MethodStandIn, Fallback):
    """Takes the place of ``model.generate`` within the block; and, beside it, of the methods of its batches."""

    _generator: _AsGenerate | None
    instead = "the model's own generate runs instead"
    item = "row"

    def __init__(self, model: nn.Module, tokenizer: Any, config: BatchConfig, pipe: Any = None) -> None:
        """``pipe``: the pipeline that runs on the model, batch by batch; the report is left there, too."""
        MethodStandIn.__init__(self, model, "generate")
        Fallback.__init__(self)
        self._reports = [ReportLeft(holder) for holder in (model, pipe) if holder is not None]
        try:
            self._generator = _AsGenerate(model, tokenizer, config)
            refuse_custom_generate(model)
        except UnsupportedModelError as refusal:
            self._refusal = refusal
        self._batches = BatchMethods(model, self._generator, self._refusal, self._note_report)

    def enter(self) -> None:
        self.put_in_place()
        self._batches.enter()
        for report in self._reports:
            report.begin()

    def leave(self) -> None:
        self._batches.leave()
        first = self.put_back()
        if isinstance(first, _StandIn):
            for place, report in enumerate(self._reports):
                report.end(first._reports[place] if place < len(first._reports) else None)
        if self._generator is not None:
            try:
                self._generator.close()
            except GeneratorBusyError:  # another thread is in a call: wait for it
                with AttentionSwap(self.model).others_wait():
                    self._generator.close()

    def serve(self, *args: Any, **kwargs: Any) -> Any:
        def original() -> Any:
            with self._batches.aside():
                return self.original(*args, **kwargs)

        if self._generator is None:
            return self._run_original(self._refusal, original)
        with self._batches.turn():
            self._generator.last_report = None
            generate, named = self._generator.as_generate, _named(self.model, args, kwargs)
            reason = self._refusal or self._batches.busy or _reason_to_fall_back(named)
            try:
                refuse_no_cache(named)
                if reason is not None:
                    return self._run_original(reason, original)
                return self._attempt(lambda: generate(named), original)
            finally:
                self._note_report()

    def _note_report(self) -> None:
        for report in [] if self.ended else self._reports:
            report.note(self.last_report)


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name; none if it is not a valid call of ``generate``."""
    try:
        named = dict(_SIGNATURE.bind(model, *args, **kwargs).arguments)
    except TypeError:
        return {}  # ``generate`` raises its own error
    named.pop("self")
    more: dict[str, Any] = named.pop("kwargs", {})
    return named | more


def _reason_to_fall_back(named: dict[str, Any]) -> Exception | None:
    if all(named.get(name) is None for name in ("inputs", "input_ids", "inputs_embeds")):
        return ValueError("there are no `input_ids`")
    return reason_to_fall_back(named)


def _is_padded(job: Job) -> bool:
    return job.rows is not None and any(len(prompt.ids) < job.rows.shape[1] for prompt in job.prompts)


def _refuse_callables_that_see_padding(arguments: CallArguments) -> None:
    """Refuse what ``generate`` would call with padded ``input_ids``; criteria get padded rows here, too."""
    lookers = [each for each in arguments.logits_processor or () if not processor_chains.looks_at_no_padding(each)]
    name = "prefix_allowed_tokens_fn" if arguments.prefix_allowed_tokens_fn is not None else "logits_processor"
    if lookers or arguments.prefix_allowed_tokens_fn is not None:
        raise UnsupportedOptionError(
            name,
            "is called by `generate` with padded rows: pass rows without padding, or call BatchGenerator, which leaves "
            "the padding out",
        )
