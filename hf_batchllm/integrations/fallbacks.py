"""What ``accelerated`` does about a call that a BatchGenerator cannot serve: the original does, and it is said why."""

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
from ..inputs.given import Given
from ..inputs.option_row import OptionKind
from ..inputs.option_table import names
from ..notices import warn_user
from ..results.run_report import RunReport
from ..sampling import processor_chains, stop_rules
from ..wording import a_kind

_OURS = sorted(names(kind=OptionKind.OURS))  # which model.generate does not know


class Fallback:
    """What stands in for an original, and can always ask it."""

    instead = ""  # what runs then
    item = ""  # what errors about one of several things call it

    def __init__(self) -> None:
        self._said: set[str] = set()
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
            interrupt.of_a_generator = False
            raise
        except (GeneratorBusyError, ValueError, TypeError, NotImplementedError) as error:
            if self._had_begun(error):
                raise
            reason = error
        torch.set_rng_state(random_state)  # as if the attempt had not been made
        return self._run_original(reason, original)

    def _had_begun(self, error: Exception) -> bool:
        """Whether an error came out of the call's work, and not out of the checks before it."""
        report = self.last_report
        if report is not None and not report.steps and isinstance(error, UnsupportedModelError):
            self._refusal = error  # its first step has shown it, and so would that of every other call
            return False
        return report is not None

    def _run_original(self, reason: Exception | None, original: Callable[[], Any]) -> Any:
        if isinstance(reason, BatchLLMError) and not isinstance(reason, OptionValueError):
            self._say(reason)
            return original()
        # Most likely generate refuses the call, too, and then its own error says everything.
        result = original()
        self._say(reason)
        return result

    def _say(self, reason: Exception | None) -> None:
        text = str(reason)
        if isinstance(reason, PromptError):
            (place, why), *others = reason.problems.items()
            text = f"{self.item} {place}: {why}" + (f" (and so for {len(others)} more)" if others else "")
        kind = reason.option if isinstance(reason, UnsupportedOptionError) else re.sub(r"\d+", "", text)
        if kind not in self._said:
            self._said.add(kind)
            warn_user(f"not accelerated, {self.instead}: {text}")


def not_of_generate(given: dict[str, Any]) -> Exception | None:
    """What a BatchGenerator would take for something else than ``generate`` does."""
    for name in _OURS:
        if name in given:
            return ValueError(f"`{name}` is not an option of model.generate")
    for name in ("stopping_criteria", "logits_processor"):
        if callable(given.get(name)) and not isinstance(given[name], list | tuple):  # to a generator, a factory
            return ValueError(f"`{name}` is not a list")
    if given.get("adapter_names") is not None:  # PEFT's, of a model with several
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


def refuse_what_sees_the_batch(given: Given, why: str) -> None:
    """``why``: what ``generate`` does with it, and what to do."""
    for name, is_harmless in _ROW_BY_ROW.items():
        for each in getattr(given, name) or ():
            if not is_harmless(each):
                raise UnsupportedOptionError(name, f"has {a_kind(each)}, which {why}")


def refuse_a_generate_of_its_own(model: nn.Module) -> None:
    inner = type(base_model(model))
    if inner.generate is not GenerationMixin.generate:
        raise UnsupportedModelError(f"{inner.__name__} has a `generate` of its own, not that of transformers")
