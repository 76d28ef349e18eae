"""``accelerated(model)``: code that calls ``model.generate`` (a harness, a trainer) gains without a change.

The module is not called ``accelerated``: a submodule of that name would hide the function in the package.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from transformers import GenerationMixin

from ..config import BatchConfig
from ..engine.job import Job, JobChecks
from ..errors import GeneratorBusyError, UnsupportedModelError, UnsupportedOptionError
from ..generator import BatchGenerator
from ..inputs.given import Given
from ..patches.attention_interface import ATTENTION_NAME
from ..patches.attention_swap import AttentionSwap
from ..sampling import processor_chains
from .fallbacks import Fallback, not_of_generate, refuse_a_generate_of_its_own, refuse_what_sees_the_batch

Model = TypeVar("Model")  # a model, or a pipeline

_SIGNATURE = inspect.signature(GenerationMixin.generate)
_WITH_ALL_ROWS = (
    "`generate` calls with all rows at once: pass one row at a time, or call BatchGenerator, which asks it for each "
    "row by itself"
)
_ABSENT = object()


@contextmanager
def accelerated(
    model: Model, tokenizer: Any = None, config: BatchConfig | None = None, **fields: Any
) -> Iterator[Model]:
    """While the block runs, ``model.generate`` is served by a BatchGenerator; afterwards it is what it was.

        with accelerated(model):
            model.generate(**inputs, max_new_tokens=50)

        with accelerated(pipe):
            pipe(prompts, max_new_tokens=50)

    A call that cannot be served goes to the model's own ``generate``, with one warning that says why. Sampling draws
    other tokens than ``generate`` would, from the same distribution; after ``set_seed`` it repeats. Each call is looked
    at by itself: what several have in common is computed once only with ``keep_prefixes``. How a call went is in
    ``model.generate.last_report``. ``tokenizer``, ``config`` and ``fields`` are those of BatchGenerator.

    A text-generation pipeline computes all inputs of a call at once (Datasets and generators are read to their end
    first), whatever its ``batch_size``; what cannot be served goes its usual way. The report is ``pipe.last_report``.
    """
    pipelines = sys.modules.get("transformers.pipelines")  # no pipeline without them, and they take long to import
    if pipelines is not None and isinstance(model, pipelines.Pipeline):
        from .accelerated_pipeline import accelerated_pipeline

        with accelerated_pipeline(model, tokenizer, BatchConfig.of(config, fields), _StandIn):
            yield model
        return
    if not isinstance(model, nn.Module) or not callable(getattr(model, "generate", None)):
        inside = ": does it hold one, as .model?" if hasattr(model, "model") else ""
        raise UnsupportedModelError(
            f"accelerated(model) takes a model that has a `generate`, not {type(model).__name__}{inside}"
        )
    stand_in = _StandIn(model, tokenizer, BatchConfig.of(config, fields))
    try:
        stand_in.enter()
        yield model
    finally:
        stand_in.leave()


class _ChecksAsGenerate(JobChecks):
    """Refuses what comes out otherwise than in a batch of ``generate``, which runs all rows in step."""

    def job(self, *given: Any) -> Job:
        job = super().job(*given)
        if job.options and _is_padded(job):
            _refuse_what_counts_the_padding(job.options[0].given)
        # The beams of a prompt are seen together here, too.
        searching = bool(job.options) and job.options[0].num_beams > 1
        if (len(job.options) if searching else sum(options.num_return_sequences for options in job.options)) > 1:
            refuse_what_sees_the_batch(job.options[0].given, _WITH_ALL_ROWS)
            rules = job.rules[0]
            if rules.looks_back and not rules.stop_tokens and not searching:
                ending = "stop_strings" if rules.strings else "stopping_criteria"
                why = "ends rows one by one, and without an EOS token `generate` goes on with all rows until all end"
                raise UnsupportedOptionError(ending, why)
        return job


class _AsGenerate(BatchGenerator):
    checks = _ChecksAsGenerate


class _StandIn(Fallback):
    """What ``model.generate`` is meanwhile."""

    instead = "the model's own generate runs instead"
    item = "row"

    def __init__(self, model: nn.Module, tokenizer: Any, config: BatchConfig) -> None:
        super().__init__()
        self._model = model
        self._before = vars(model).get("generate", _ABSENT)
        # A stand-in further out would only find out again what this one knows.
        self._original = self._before._original if isinstance(self._before, _StandIn) else model.generate
        self._ended = False
        try:
            self._generator = _AsGenerate(model, tokenizer, config)
            refuse_a_generate_of_its_own(model)
        except UnsupportedModelError as refusal:
            self._refusal = refusal
        functools.update_wrapper(self, self._original, updated=())

    def __repr__(self) -> str:
        return f"<accelerated generate of {type(self._model).__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, made or pickled meanwhile, has a ``generate`` of its own that works on the copy."""
        if self._before is _ABSENT and hasattr(type(self._model), "generate"):
            return getattr, (self._model, "generate")
        return _itself, (self._original,)

    def enter(self) -> None:
        vars(self._model)["generate"] = self

    def leave(self) -> None:
        self._ended = True
        attributes = vars(self._model)
        if attributes.get("generate") is self:  # else somebody has put something else there: it is theirs
            before = self._before
            while isinstance(before, _StandIn) and before._ended:
                before = before._before
            if before is _ABSENT:
                del attributes["generate"]
            else:
                attributes["generate"] = before
        if self._generator is not None:
            try:
                self._generator.close()
            except GeneratorBusyError:  # a call of another thread
                with AttentionSwap(self._model).others_wait():
                    self._generator.close()

    # -- calls -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._ended:
            return self._original(*args, **kwargs)

        def original() -> Any:
            return self._original(*args, **kwargs)

        if self._generator is None:
            return self._run_original(self._refusal, original)
        # One call at a time: while another thread is in a step, the model's attention is not its own.
        with AttentionSwap(self._model).others_wait() as attention:
            if attention == ATTENTION_NAME:
                raise GeneratorBusyError(
                    "model.generate was called from within a step of a call that is running (by a hook?), while the "
                    "model's attention is swapped: make that call without accelerated(model), or the inner one later"
                )
            named = _named(self._model, args, kwargs)
            reason = self._refusal or _beyond_us(named)
            if reason is not None:
                return self._run_original(reason, original)
            generate = self._generator.generate
            return self._attempt(lambda: generate(progress=False, **named), original)


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names."""
    try:
        named = dict(_SIGNATURE.bind(model, *args, **kwargs).arguments)
    except TypeError:
        return {}  # no call of ``generate``: it will say so itself
    named.pop("self")
    return named | named.pop("kwargs", {})


def _beyond_us(named: dict[str, Any]) -> Exception | None:
    if all(named.get(name) is None for name in ("inputs", "input_ids", "inputs_embeds")):
        return ValueError("there are no `input_ids`")
    return not_of_generate(named)


def _is_padded(job: Job) -> bool:
    return job.rows is not None and any(len(prompt.ids) < job.rows.shape[1] for prompt in job.prompts)


def _refuse_what_counts_the_padding(given: Given) -> None:
    """What is called with ``input_ids`` that have it in ``generate``; criteria are given it here, too."""
    others = [each for each in given.logits_processor or () if not processor_chains.looks_at_no_padding(each)]
    name = "prefix_allowed_tokens_fn" if given.prefix_allowed_tokens_fn is not None else "logits_processor"
    if others or given.prefix_allowed_tokens_fn is not None:
        raise UnsupportedOptionError(
            name,
            "is called by `generate` with rows as they are padded: pass rows without padding, or call BatchGenerator, "
            "which leaves the padding out",
        )


def _itself(value: Any) -> Any:
    return value
