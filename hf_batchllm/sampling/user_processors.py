"""Logits processors of the user's own: what they return is checked, and state that they keep is noticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessor

from ..errors import OptionValueError
from ..inputs.processors_and_criteria import PROCESSORS, callable_name
from ..wording import a_kind

_OPTION = PROCESSORS.name
_WATCHED_CALLS = 32  # of each processor: one that keeps state shows it soon
_MOST_ITEMS_COMPARED = 16  # larger containers are compared by their length alone


class UserProcessor(LogitsProcessor):
    """A processor of the user's, called for one row; the scores that it returns are checked.

    ``warn``: called once if the processor keeps state from call to call: it is called for rows of several sequences.
    """

    def __init__(self, processor: Any, warn: Callable[[str], None] | None = None) -> None:
        self.processor = processor
        self._warn = warn
        self._calls = 0

    @property
    def name(self) -> str:
        return callable_name(self.processor)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        shape = scores.shape
        if self._warn is not None and 0 < self._calls <= _WATCHED_CALLS:  # the first may prepare it
            before = _state(self.processor)
            result = self.processor(input_ids, scores)
            self._compare(before, _state(self.processor))
        else:
            result = self.processor(input_ids, scores)
        self._calls += 1
        if not isinstance(result, torch.Tensor) or result.shape != shape:
            got = f"scores of shape {list(result.shape)}" if isinstance(result, torch.Tensor) else a_kind(result)
            raise OptionValueError(
                _OPTION, f"{callable_name(self.processor)} gave {got}: it must return scores of shape {list(shape)}"
            )
        return result if result.dtype is scores.dtype and result.device == scores.device else result.to(scores)

    def _compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        changed = [name for name in after if name not in before or before[name] != after[name]]
        if not changed or self._warn is None:
            return
        name = callable_name(self.processor)
        self._warn(
            f"`{_OPTION}`: {name} seems to keep state from call to call (`{changed[0]}` changes), and it is called for "
            "the rows of all sequences in turn. Pass a factory instead, so that each sequence has one of its own: "
            f"`{_OPTION}=lambda index, prompt_token_ids: [{name}(...)]`"
        )
        self._warn = None


def _state(holder: Any, depth: int = 2) -> dict[str, Any]:
    """An object's attributes and theirs, in a form that can be compared."""
    return {name: _mark(value, depth) for name, value in getattr(holder, "__dict__", {}).items()}


def _mark(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)  # in which NaN equals itself, and 1 differs from True
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, list | tuple | dict | set | deque | bytearray):
        inside = (
            list(value.values() if isinstance(value, dict) else value) if len(value) <= _MOST_ITEMS_COMPARED else []
        )
        return id(value), len(value), [_mark(each, depth - 1) for each in inside] if depth else []
    if depth and not callable(value) and not isinstance(value, nn.Module | type | ModuleType):
        return id(value), _state(value, depth - 1)
    return id(value)
