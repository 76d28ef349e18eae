"""The groups of kernels that are checked one by one: a model without experts does not wait for the experts' kernels."""

from __future__ import annotations

from collections.abc import Callable

from . import attention_cases, other_cases
from .comparing import Where

GROUPS: dict[str, Callable[[Where], dict[str, Callable[[], None]]]] = {
    "attention": attention_cases.cases,
    "layers": other_cases.layers,
    "sampling": other_cases.sampling,
    "experts": other_cases.experts,
    "states": other_cases.states,
}
