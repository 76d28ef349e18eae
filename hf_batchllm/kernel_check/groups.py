"""The groups of kernels that are checked one by one: a model without experts does not wait for the experts' kernels."""

from __future__ import annotations

from collections.abc import Callable

from . import attention_cases, expert_cases, layer_cases, part_cases, sampling_cases, state_cases
from .comparing import Where

GROUPS: dict[str, Callable[[Where], dict[str, Callable[[], None]]]] = {
    "attention": attention_cases.cases,
    "layers": layer_cases.layers,
    "sampling": sampling_cases.sampling,
    "experts": expert_cases.experts,
    "states": state_cases.states,
    "parts": part_cases.cases,
}
