"""The package ``ray``, imported when it is needed: without it this library is whole."""

from __future__ import annotations

from typing import Any

_INSTALL = "pip install 'hf-batchllm[ray]'"
_OLDEST = (2, 54)  # the first that is tried: its checkpoints are those of docs/ray.md


def ray_data() -> Any:
    """``ray``, with ``ray.data``; ModuleNotFoundError says what to install."""
    try:
        import ray
        import ray.data
    except ImportError as missing:
        raise ModuleNotFoundError(f"generate_dataset() needs Ray Data: {_INSTALL}", name=missing.name) from missing
    major, minor = ray.__version__.split(".")[:2]
    if (int(major), int(minor)) < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        raise ImportError(f"generate_dataset() needs Ray {needed} or newer, and {ray.__version__} is here: {_INSTALL}")
    return ray
