"""``accelerated(model)``: code that calls ``model.generate`` (a pipeline, a harness) gains without a change.

The module is not called ``accelerated``: a submodule of that name would hide the function in the package.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import GenerationMixin

from . import endings, processing
from .architecture import base_model
from .attention import ATTENTION_NAME
from .config import BatchConfig
from .errors import (
    BatchLLMError,
    GeneratorBusyError,
    OptionValueError,
    PromptError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from .generator import BatchGenerator
from .kinds import a_kind
from .option_rows import Kind
from .option_table import names
from .options import Given
from .patches.attention_swap import AttentionSwap
from .results import RunReport
from .work import Checks, Work

Model = TypeVar("Model", bound=nn.Module)

_SIGNATURE = inspect.signature(GenerationMixin.generate)
_OURS = sorted(names(kind=Kind.OURS))  # which model.generate does not know
_ABSENT = object()


@contextmanager
def accelerated(
    model: Model, tokenizer: Any = None, config: BatchConfig | None = None, **fields: Any
) -> Iterator[Model]:
    """While the block runs, ``model.generate`` is served by a BatchGenerator; afterwards it is what it was.

        with accelerated(model):
            model.generate(**inputs, max_new_tokens=50)

    A call that cannot be served goes to the model's own ``generate``, with one warning that says why. Sampling draws
    other tokens than ``generate`` would, from the same distribution; after ``set_seed`` it repeats. Each call is looked
    at by itself: what several have in common is computed once only with ``keep_prefixes``. How a call went is in
    ``model.generate.last_report``. ``tokenizer``, ``config`` and ``fields`` are those of BatchGenerator.
    """
    if not isinstance(model, nn.Module) or not callable(getattr(model, "generate", None)):
        inside = ": does it hold one, as .model?" if hasattr(model, "model") else ""
        raise UnsupportedModelError(
            f"accelerated(model) takes a model that has a `generate`, not {type(model).__name__}{inside}"
        )
    stand_in = _StandIn(model, tokenizer, BatchConfig.of(config, fields))
    try:
        vars(model)["generate"] = stand_in
        yield model
    finally:
        stand_in.leave()


class _ChecksAsGenerate(Checks):
    """Refuses what comes out otherwise than in a batch of ``generate``, which runs all rows in step."""

    def work(self, *given: Any) -> Work:
        work = super().work(*given)
        if work.options and _is_padded(work):
            _refuse_what_counts_the_padding(work.options[0].given)
        if sum(options.num_return_sequences for options in work.options) > 1:
            _refuse_what_sees_the_batch(work.options[0].given)
            rules = work.rules[0]
            if rules.looks and not rules.stop_tokens:
                ending = "stop_strings" if rules.strings else "stopping_criteria"
                why = "ends rows one by one, and without an EOS token `generate` goes on with all rows until all end"
                raise UnsupportedOptionError(ending, why)
        return work


class _AsGenerate(BatchGenerator):
    checks = _ChecksAsGenerate


class _StandIn:
    """What ``model.generate`` is meanwhile."""

    def __init__(self, model: nn.Module, tokenizer: Any, config: BatchConfig) -> None:
        self._model = model
        self._before = vars(model).get("generate", _ABSENT)
        # A stand-in further out would only find out again what this one knows.
        self._original = self._before._original if isinstance(self._before, _StandIn) else model.generate
        self._ended = False
        self._said: set[str] = set()
        self._generator: _AsGenerate | None = None
        self._refusal: UnsupportedModelError | None = None
        try:
            self._generator = _AsGenerate(model, tokenizer, config)
            _refuse_a_generate_of_its_own(model)
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

    @property
    def last_report(self) -> RunReport | None:
        return None if self._generator is None else self._generator.last_report

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
        if self._generator is None:
            return self._run_original(self._refusal, args, kwargs)
        # One call at a time: while another thread is in a step, the model's attention is not its own.
        with AttentionSwap(self._model).others_wait() as attention:
            if attention == ATTENTION_NAME:
                raise GeneratorBusyError(
                    "model.generate was called from within a step of a call that is running (by a hook?), while the "
                    "model's attention is swapped: make that call without accelerated(model), or the inner one later"
                )
            named = _named(self._model, args, kwargs)
            reason = self._refusal or _beyond_us(named)
            if reason is None:
                random_state = torch.get_rng_state()
                try:
                    return self._generator.generate(progress=False, **named)
                except (GeneratorBusyError, ValueError, TypeError, NotImplementedError) as error:
                    if self._had_begun(error):
                        raise
                    reason = error
                torch.set_rng_state(random_state)  # as if the attempt had not been made
            return self._run_original(reason, args, kwargs)

    def _had_begun(self, error: Exception) -> bool:
        """Whether an error came out of the call's work, and not out of the checks before it."""
        report = self.last_report
        if report is not None and not report.steps and isinstance(error, UnsupportedModelError):
            self._refusal = error  # its first step has shown it, and so would that of every other call
            return False
        return report is not None

    def _run_original(self, reason: Exception | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(reason, BatchLLMError) and not isinstance(reason, OptionValueError):
            self._say(reason)
            return self._original(*args, **kwargs)
        # Most likely generate refuses the call, too, and then its own error says everything.
        result = self._original(*args, **kwargs)
        self._say(reason)
        return result

    def _say(self, reason: Exception | None) -> None:
        text = str(reason)
        if isinstance(reason, PromptError):
            (row, why), *others = reason.problems.items()
            text = f"row {row}: {why}" + (f" (and so for {len(others)} more)" if others else "")
        kind = reason.option if isinstance(reason, UnsupportedOptionError) else re.sub(r"\d+", "", text)
        if kind in self._said:
            return
        self._said.add(kind)
        warnings.warn(f"not accelerated, the model's own generate runs instead: {text}", UserWarning, stacklevel=4)


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names."""
    try:
        named = dict(_SIGNATURE.bind(model, *args, **kwargs).arguments)
    except TypeError:
        return {}  # no call of ``generate``: it will say so itself
    named.pop("self")
    return named | named.pop("kwargs", {})


def _beyond_us(named: dict[str, Any]) -> Exception | None:
    """What a BatchGenerator would take for something else."""
    for name in _OURS:
        if name in named:
            return ValueError(f"`{name}` is not an option of model.generate")
    if all(named.get(name) is None for name in ("inputs", "input_ids", "inputs_embeds")):
        return ValueError("there are no `input_ids`")
    for name in ("stopping_criteria", "logits_processor"):
        if callable(named.get(name)) and not isinstance(named[name], list | tuple):  # to a generator, a factory
            return ValueError(f"`{name}` is not a list")
    if named.get("cache_implementation") == "paged":
        return UnsupportedOptionError("cache_implementation", 'is "paged": transformers\' own continuous batching')
    return None


_ROW_BY_ROW: dict[str, Callable[[Any], bool]] = {
    "stopping_criteria": endings.looks_at_each_row_alone,
    "logits_processor": processing.looks_at_each_row_alone,
}


def _refuse_what_sees_the_batch(given: Given) -> None:
    for name, is_harmless in _ROW_BY_ROW.items():
        for each in getattr(given, name) or ():
            if not is_harmless(each):
                raise UnsupportedOptionError(
                    name,
                    f"has {a_kind(each)}, which `generate` calls with all rows at once: pass one row at a time, or "
                    "call BatchGenerator, which asks it for each row by itself",
                )


def _is_padded(work: Work) -> bool:
    return work.rows is not None and any(len(prompt.ids) < work.rows.shape[1] for prompt in work.prompts)


def _refuse_what_counts_the_padding(given: Given) -> None:
    """What is called with ``input_ids`` that have it in ``generate``; criteria are given it here, too."""
    others = [each for each in given.logits_processor or () if not processing.looks_at_each_row_alone(each)]
    name = "prefix_allowed_tokens_fn" if given.prefix_allowed_tokens_fn is not None else "logits_processor"
    if others or given.prefix_allowed_tokens_fn is not None:
        raise UnsupportedOptionError(
            name,
            "is called by `generate` with rows as they are padded: pass rows without padding, or call BatchGenerator, "
            "which leaves the padding out",
        )


def _refuse_a_generate_of_its_own(model: nn.Module) -> None:
    inner = type(base_model(model))
    if inner.generate is not GenerationMixin.generate:
        raise UnsupportedModelError(f"{inner.__name__} has a `generate` of its own, not that of transformers")


def _itself(value: Any) -> Any:
    return value
