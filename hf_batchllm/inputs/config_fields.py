"""The fields of ``BatchConfig`` as keyword arguments, by name and type: for editors, type checkers and notebooks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

from ..config import BatchConfig

Function = TypeVar("Function", bound=Callable[..., Any])


class ConfigFields(TypedDict, total=False):
    """Each field of BatchConfig."""

    page_size: int
    max_batch_tokens: int | None
    kv_memory: int | float | str | None
    share_prefixes: bool
    min_shared_tokens: int
    scheduler: Any
    steps_per_sync: int | None
    cuda_graphs: bool
    fuse: bool
    keep_prefixes: int
    backend: str
    invariant: bool


def shows_config_fields(function: Function) -> Function:
    """Names the fields in the signature that notebooks and ``help`` show, before ``**rest``. No call changes."""
    written = inspect.signature(function)
    *given, rest = written.parameters.values()
    named = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in dataclasses.fields(BatchConfig)
    ]
    function.__signature__ = written.replace(parameters=[*given, *named, rest])  # type: ignore[attr-defined]
    return function
