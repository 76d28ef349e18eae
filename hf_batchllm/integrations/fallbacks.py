"""What a block of ``accelerated`` puts in the place of methods: a BatchGenerator serves their calls, or the original.

A call that cannot be served goes to the original, with one warning that says why.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GenerationMixin

from ..config import BatchConfig
from ..engine.checks import JobChecks
from ..engine.job import Job
from ..errors import (
    BatchLLMError,
    GenerationInterrupted,
    GeneratorBusyError,
    OptionValueError,
    PromptError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from ..generator import DoorGenerator
from ..inputs.base_model import base_model
from ..inputs.call_arguments import CallArguments
from ..inputs.config_names import without_foreign_names
from ..inputs.option_row import OptionKind
from ..inputs.option_table import ALIASES, names
from ..inputs.other_names import asks_for_nothing
from ..notices import warn_user
from ..patches.attention_interface import ATTENTION_NAME
from ..patches.attention_swap import AttentionSwap
from ..results.run_report import RunReport
from ..sampling import processor_chains, stop_rules
from ..wording import a_kind

Serve = Callable[..., Any]  # gets the original method first, and then what that would get

_REPORT = "last_report"
_ABSENT: Any = object()
_ADDED = sorted({*names(kind=OptionKind.ADDED), *ALIASES, "top_logprobs"})  # options that model.generate does not have
_ROW_BY_ROW: dict[str, Callable[[Any], bool]] = {
    "stopping_criteria": stop_rules.looks_at_each_row_alone,
    "logits_processor": processor_chains.looks_at_each_row_alone,
}


class Way(NamedTuple):
    """For warnings of calls that are not served."""

    instead: str  # what runs then
    item: str  # the noun for one prompt


class StandIn:
    """An entry in an object's ``__dict__``, which hides the method of its class. Blocks may be within blocks."""

    def __init__(self, block: Block, owner: Any, name: str, serve: Serve) -> None:
        self.block, self._owner, self._name, self._serve = block, owner, name, serve
        self._before: Any = vars(owner).get(name, _ABSENT)
        # Within another block: the original, as the outer stand-in would only refuse the same calls again.
        inner = isinstance(self._before, StandIn)
        self._original: Callable[..., Any] = self._before._original if inner else getattr(owner, name)
        functools.update_wrapper(self, self._original, updated=())

    def put_in_place(self) -> None:
        vars(self._owner)[self._name] = self

    @property
    def last_report(self) -> RunReport | None:
        report: RunReport | None = vars(self._owner).get(_REPORT)
        return report

    def __repr__(self) -> str:
        return f"<accelerated {self._name} of {type(self._owner).__name__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles of its owner: a copy gets the method of its own class."""
        if self._before is _ABSENT and hasattr(type(self._owner), self._name):
            return getattr, (self._owner, self._name)
        return _itself, (self._original,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.block.has_ended or self.block.falls_back_here:
            return self._original(*args, **kwargs)
        return self._serve(self._original, *args, **kwargs)

    def put_back(self) -> None:
        """Restore what was there before. What the owner has put there meanwhile stays."""
        before = self._before
        while isinstance(before, StandIn) and before.block.has_ended:  # blocks may end in any order
            before = before._before
        if vars(self._owner).get(self._name) is self:
            _put(self._owner, self._name, before)


@dataclass
class _Around:
    """Blocks around a holder of ``last_report``, which may end in any order. ``before``: what it had outside of all."""

    before: Any
    blocks: set[Any] = field(default_factory=set)


_AROUND: weakref.WeakKeyDictionary[Any, _Around] = weakref.WeakKeyDictionary()


class Block(ABC):
    """One block of ``accelerated``: its generator, and what it has put in the place of methods."""

    kind_of_checks: type[ChecksAsGenerate]

    def __init__(self, model: nn.Module, tokenizer: Any, config: BatchConfig) -> None:
        self.model = model
        self.generator: DoorGenerator | None = None
        self.refusal: UnsupportedModelError | None = None  # why no call can be served
        self.has_ended = False
        self.open_streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stand_ins: list[StandIn] = []
        self._holders: list[Any] = []  # of `last_report`
        self._warned: set[tuple[Way, str]] = set()
        self._falling_back = threading.local()  # in a thread that runs an original, `now` is true
        try:
            self.generator = DoorGenerator(model, tokenizer, config, self.kind_of_checks)
            _refuse_custom_generate(model)
        except UnsupportedModelError as refusal:
            self.refusal = refusal

    @property
    def last_report(self) -> RunReport | None:
        return None if self.generator is None else self.generator.last_report

    @property
    def falls_back_here(self) -> bool:
        """Whether this thread runs an original, which may call further methods of its own."""
        return getattr(self._falling_back, "now", False)

    # -- beginning and end -------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self) -> None:
        """Put everything in its place."""

    def replace(self, owner: Any, **methods: Serve) -> None:
        """Serve these methods of ``owner``, and leave the reports there."""
        for name, serve in methods.items():
            self._stand_ins.append(StandIn(self, owner, name, serve))  # an interrupt may come after this
            self._stand_ins[-1].put_in_place()
        self.leave_reports_on(owner)

    def leave_reports_on(self, holder: Any) -> None:
        around = _AROUND.setdefault(holder, _Around(vars(holder).get(_REPORT, _ABSENT)))
        self._holders.append(holder)
        around.blocks.add(self)
        if len(around.blocks) == 1:
            vars(holder)[_REPORT] = None

    def end(self) -> None:
        self.has_ended = True
        for stand_in in self._stand_ins:
            stand_in.put_back()
        for holder in self._holders:
            _AROUND[holder].blocks.discard(self)
            if not _AROUND[holder].blocks:
                before = _AROUND.pop(holder).before
                is_owners = before is not _ABSENT and not isinstance(before, RunReport | None)
                if is_owners or vars(holder).get(_REPORT) is None:  # else it stays behind
                    _put(holder, _REPORT, before)
        if self.generator is not None:
            with AttentionSwap(self.model).others_wait():  # a call of another thread ends first
                for stream in list(self.open_streams):
                    stream.close()
                self.generator.close()

    # -- calls -------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One call at a time: while another thread is in a step, the model's attention is swapped."""
        with AttentionSwap(self.model).others_wait() as attention:
            if attention == ATTENTION_NAME:
                raise GeneratorBusyError(
                    "an accelerated call came from within a step of a running one (from a hook?), while the model's "
                    "attention is swapped: make the outer call without accelerated(), or the inner call later"
                )
            yield

    def call(self, way: Way, serve: Callable[[DoorGenerator], Any], original: Callable[[], Any]) -> Any:
        """What ``serve`` gives; what ``original`` gives where ``serve`` refuses the call before any work."""
        if self.generator is None:
            return self._fall_back(way, self.refusal, original)
        with self.turn():
            self.generator.last_report = None
            reason: Exception | None = self.refusal
            random_state = torch.get_rng_state()
            try:
                if reason is None:
                    return serve(self.generator)
            except GenerationInterrupted as interrupt:
                interrupt.caller_has_generator = False
                raise
            except (GeneratorBusyError, ValueError, TypeError, NotImplementedError) as error:
                if self.work_had_begun(error):
                    raise
                reason = error
            finally:
                self.leave_report(self.last_report)
            torch.set_rng_state(random_state)  # as if there had been no attempt
            return self._fall_back(way, reason, original)

    def work_had_begun(self, error: Exception) -> bool:
        """Whether the error came from the call's work, and not from the checks before it."""
        report = self.last_report
        if report is not None and not report.steps and isinstance(error, UnsupportedModelError):
            self.refusal = error  # found in the first step, and so it would be in every other call
            return False
        return report is not None

    def leave_report(self, report: RunReport | None) -> None:
        """``report``: of the latest call; None where it was refused."""
        for holder in () if self.has_ended else self._holders:
            vars(holder)[_REPORT] = report

    def warn(self, way: Way, reason: Exception | None) -> None:
        text = str(reason)
        if isinstance(reason, PromptError):
            (place, why), *others = reason.problems.items()
            text = f"{way.item} {place}: {why}" + (f" (and so for {len(others)} more)" if others else "")
        kind = reason.option if isinstance(reason, UnsupportedOptionError) else re.sub(r"\d+", "", text)
        if (way, kind) not in self._warned:
            self._warned.add((way, kind))
            warn_user(f"not accelerated, {way.instead}: {text}")

    def _fall_back(self, way: Way, reason: Exception | None, original: Callable[[], Any]) -> Any:
        # Most likely the original refuses a wrong call, too. Its own error then says everything, and needs no warning.
        warns_first = isinstance(reason, BatchLLMError) and not isinstance(reason, OptionValueError)
        if warns_first:
            self.warn(way, reason)
        before, self._falling_back.now = self.falls_back_here, True
        try:
            result = original()
        finally:
            self._falling_back.now = before
        if not warns_first:
            self.warn(way, reason)
        return result


# -- what is refused -------------------------------------------------------------------------------------------


class ChecksAsGenerate(JobChecks):
    """The caller writes for ``generate``: names and padding mean what they mean there."""

    def job(self, architecture: Any, prompts: Any, generation_config: Any, *given: Any) -> Job:
        return super().job(architecture, prompts, without_foreign_names(generation_config), *given)

    def _see_right_padding(self) -> None:
        raise right_padding()

    def _warn_of_greedy(self, *given: Any) -> None:
        """Nothing."""


def refuse_other_meaning(given: dict[str, Any]) -> None:
    """Refuse arguments of ``generate`` that a BatchGenerator would understand differently."""
    for name, value in given.items():
        if name in _ADDED or (value is not None and asks_for_nothing(name, value)):
            raise ValueError(f"`{name}` is not an option of model.generate")
    for name in _ROW_BY_ROW:
        # A BatchGenerator would take a function for a factory of lists.
        if callable(given.get(name)) and not isinstance(given[name], list | tuple):
            raise ValueError(f"`{name}` is not a list")
    if given.get("adapter_names") is not None:  # PEFT's, for a model with several adapters
        raise UnsupportedOptionError("adapter_names", "goes to BatchGenerator.generate, where it is called `adapter`")
    if isinstance(given.get("generation_config"), list | tuple):
        raise ValueError("`generation_config` is a list")
    if given.get("cache_implementation") == "paged":
        raise UnsupportedOptionError("cache_implementation", 'is "paged": transformers\' own continuous batching')


def refuse_what_sees_all_rows(arguments: CallArguments, why: str) -> None:
    """``why``: how ``generate`` calls it, and what to do instead."""
    for name, is_harmless in _ROW_BY_ROW.items():
        for each in getattr(arguments, name) or ():
            if not is_harmless(each):
                raise UnsupportedOptionError(name, f"has {a_kind(each)}, which {why}")


def right_padding() -> UnsupportedOptionError:
    why = "marks padding on the right, and `generate` goes on from the padding: set tokenizer.padding_side = 'left'"
    return UnsupportedOptionError("attention_mask", why)


def _refuse_custom_generate(model: nn.Module) -> None:
    inner: Any = type(base_model(model))
    if inner.generate is not GenerationMixin.generate:
        raise UnsupportedModelError(f"{inner.__name__} has a `generate` of its own, not that of transformers")


def _put(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


def _itself(value: Any) -> Any:
    return value
