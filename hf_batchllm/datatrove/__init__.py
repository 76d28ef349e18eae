"""A step of a datatrove pipeline that generates: ``GenerateStep``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generate_step import GenerateStep

__all__ = ["GenerateStep"]


def __getattr__(name: str) -> Any:
    if name != "GenerateStep":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .generate_step import GenerateStep
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "datatrove":
            raise
        install = "pip install 'hf-batchllm[datatrove]'"
        raise ModuleNotFoundError(f"{name} needs the package datatrove: {install}", name=missing.name) from missing
    return GenerateStep
