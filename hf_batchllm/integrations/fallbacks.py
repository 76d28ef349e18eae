"""Calls that a BatchGenerator cannot serve: ``accelerated`` runs the original, with a warning that says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from ..errors import (
    BatchLLMError,
    GenerationInterrupted,
    GeneratorBusyError,
    OptionValueError,
    PromptError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from ..generator import BatchGenerator
from ..inputs.base_model import base_model
from ..inputs.call_arguments import CallArguments
from ..inputs.option_row import OptionKind
from ..inputs.option_table import names
from ..inputs.other_names import ALIASES, asks_for_nothing
from ..notices import warn_user
from ..results.run_report import RunReport
from ..sampling import processor_chains, stop_rules
from ..wording import a_kind

_REPORT = "last_report"
_ABSENT = object()
_ADDED = sorted({*names(kind=OptionKind.ADDED), *ALIASES, "top_logprobs"})  # options that model.generate does not have


class Fallback:
    """Base of what takes the place of an original method, which can run instead at any time."""

    instead = ""  # for warnings: what runs then
    item = ""  # for warnings: the noun for one prompt

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._generator: BatchGenerator | None = None
        self._refusal: UnsupportedModelError | None = None

    @property
    def last_report(self) -> RunReport | None:
        return None if self._generator is None else self._generator.last_report

    def _attempt(self, serve: Callable[[], Any], original: Callable[[], Any]) -> Any:
        random_state = torch.get_rng_state()
        try:
            return serve()
        except GenerationInterrupted as interrupt:
            interrupt.caller_has_generator = False
            raise
        except (GeneratorBusyError, ValueError, TypeError, NotImplementedError) as error:
            if self._work_had_begun(error):
                raise
            reason = error
        torch.set_rng_state(random_state)  # as if there had been no attempt
        return self._run_original(reason, original)

    def _work_had_begun(self, error: Exception) -> bool:
        """Whether the error came from the call's work, and not from the checks before it."""
        report = self.last_report
        if report is not None and not report.steps and isinstance(error, UnsupportedModelError):
            self._refusal = error  # found in the first step, and so it would be in every other call
            return False
        return report is not None

    def _run_original(self, reason: Exception | None, original: Callable[[], Any]) -> Any:
        if isinstance(reason, BatchLLMError) and not isinstance(reason, OptionValueError):
            self._warn(reason)
            return original()
        # Most likely the original refuses the call, too. Its own error then says everything, and no warning is needed.
        result = original()
        self._warn(reason)
        return result

    def _warn(self, reason: Exception | None) -> None:
        text = str(reason)
        if isinstance(reason, PromptError):
            (place, why), *others = reason.problems.items()
            text = f"{self.item} {place}: {why}" + (f" (and so for {len(others)} more)" if others else "")
        kind = reason.option if isinstance(reason, UnsupportedOptionError) else re.sub(r"\d+", "", text)
        if kind not in self._warned:
            self._warned.add(kind)
            warn_user(f"not accelerated, {self.instead}: {text}")


class ReportLeft:
    """The attribute ``last_report`` of a model, or of a pipeline: it stays when ``accelerated`` has ended.

    An attribute of that name that its owner had put there comes back instead. Where no call was served, none is left.
    """

    def __init__(self, holder: Any) -> None:
        self._attributes: dict[str, Any] = vars(holder)
        self._before = self._attributes.get(_REPORT, _ABSENT)
        # Within another accelerated(): what was there before that one.
        self._owners = self._before is not _ABSENT and not isinstance(self._before, RunReport | None)

    def begin(self) -> None:
        self._attributes[_REPORT] = None

    def note(self, report: RunReport | None) -> None:
        self._attributes[_REPORT] = report

    def end(self, outer: ReportLeft | None = None) -> None:
        """``outer``: of another accelerated() that began earlier and ended before this one."""
        first = outer or self
        if first._owners or self._attributes.get(_REPORT) is None:
            if first._before is _ABSENT:
                self._attributes.pop(_REPORT, None)
            else:
                self._attributes[_REPORT] = first._before


def reason_to_fall_back(given: dict[str, Any]) -> Exception | None:
    """Why arguments must go to ``generate`` itself: a BatchGenerator would understand them differently."""
    for name in _ADDED:
        if name in given:
            return ValueError(f"`{name}` is not an option of model.generate")
    for name, value in given.items():
        if value is not None and asks_for_nothing(name, value):
            return ValueError(f"`{name}` is not an option of model.generate")
    for name in ("stopping_criteria", "logits_processor"):
        # A BatchGenerator would take a function for a factory of lists.
        if callable(given.get(name)) and not isinstance(given[name], list | tuple):
            return ValueError(f"`{name}` is not a list")
    if given.get("adapter_names") is not None:  # PEFT's, for a model with several adapters
        return UnsupportedOptionError("adapter_names", "goes to BatchGenerator.generate, where it is called `adapter`")
    if isinstance(given.get("generation_config"), list | tuple):
        return ValueError("`generation_config` is a list")
    if given.get("cache_implementation") == "paged":
        return UnsupportedOptionError("cache_implementation", 'is "paged": transformers\' own continuous batching')
    return None


_ROW_BY_ROW: dict[str, Callable[[Any], bool]] = {
    "stopping_criteria": stop_rules.looks_at_each_row_alone,
    "logits_processor": processor_chains.looks_at_each_row_alone,
}


def refuse_what_sees_all_rows(arguments: CallArguments, why: str) -> None:
    """``why``: how ``generate`` calls it, and what to do instead."""
    for name, is_harmless in _ROW_BY_ROW.items():
        for each in getattr(arguments, name) or ():
            if not is_harmless(each):
                raise UnsupportedOptionError(name, f"has {a_kind(each)}, which {why}")


def right_padding() -> UnsupportedOptionError:
    why = "marks padding on the right, and `generate` goes on from the padding: set tokenizer.padding_side = 'left'"
    return UnsupportedOptionError("attention_mask", why)


def refuse_custom_generate(model: nn.Module) -> None:
    inner: Any = type(base_model(model))
    if inner.generate is not GenerationMixin.generate:
        raise UnsupportedModelError(f"{inner.__name__} has a `generate` of its own, not that of transformers")
