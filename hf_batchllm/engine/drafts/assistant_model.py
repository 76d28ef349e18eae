"""Models that guess tokens for another: whether one can, and what is kept of it between calls."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn

from ...errors import BatchLLMError, UnsupportedModelError
from ...inputs.base_model import base_model, without_compile
from ...model.inspection.architecture import Architecture, inspect_model, look_again
from ...notices import Notices
from ...patches.fusion import Fusion


class _OfAssistant(Notices):
    """Says whose warning it is."""

    def __call__(self, kind: str, message: str) -> None:
        super().__call__(kind, f"`assistant_model`: {message}")


class AssistantModel:
    """A model that guesses tokens, and its layers, which are fused during calls."""

    def __init__(self, model: nn.Module) -> None:
        self.given = model
        self.model = without_compile(model)
        self.architecture = inspect_model(self.model)
        self.fusion = Fusion(self.model)
        self.notices = _OfAssistant()

    def look_again(self) -> None:
        """A call begins."""
        self.architecture = look_again(self.architecture, self.model)


class Assistants:
    """The assistant of a generator's latest call, if that had one. Its weights stay merged for the next."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._latest: AssistantModel | None = None

    def of(self, given: Any, model: nn.Module, architecture: Architecture) -> AssistantModel | None:
        """``given``: as ``assistant_model``, for calls of ``model``. None where it cannot guess: a warning says why."""
        if given is None:
            self.close()
            return None
        try:
            known = self._known(given)
            why_not = _why_not(known, model, architecture)
        except BatchLLMError as error:
            why_not = str(error)
        if why_not:
            self._notices(f"assistant: {why_not}", f"`assistant_model` has no effect here: {why_not}")
            return None
        return known

    def _known(self, given: nn.Module) -> AssistantModel:
        if self._latest is not None and self._latest.given is given:
            with suppress(UnsupportedModelError):  # it has other layers by now
                self._latest.look_again()
                return self._latest
        self.close()
        self._latest = AssistantModel(given)
        return self._latest

    def close(self) -> None:
        if self._latest is not None:
            self._latest.fusion.unmerge()
            self._latest = None


def _why_not(assistant: AssistantModel, model: nn.Module, architecture: Architecture) -> str:
    """Why it cannot guess what the model says; empty where it can."""
    theirs = assistant.architecture
    if theirs.states:
        return (
            f"layers of {theirs.name} carry a state from token to token, which would have moved on over wrong guesses"
        )
    if theirs.vocab_size != architecture.vocab_size:
        return f"{theirs.name} has {theirs.vocab_size:,} tokens and the model {architecture.vocab_size:,}"
    if assistant.model.training:
        return f"{theirs.name} is in training mode, where it may draw random numbers: call its eval() first"
    if theirs.device != architecture.device:
        return f"{theirs.name} is on {theirs.device}, and the model on {architecture.device}"
    if theirs.parts > 1:
        return f"several processes run {theirs.name} together"
    own = {id(module) for module in base_model(model).modules()}
    if any(id(module) in own for module in base_model(assistant.model).modules()):
        return "it shares layers with the model"
    return ""
