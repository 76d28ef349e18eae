"""Rollouts of TRL's GRPOTrainer: ``rollout_func`` for its hook, ``RolloutMixin`` for tools and environments."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .completions import Rollouts, rollout_func
    from .trainer_mixin import RolloutMixin

__all__ = ["RolloutMixin", "Rollouts", "rollout_func"]
_HOMES = {"RolloutMixin": "trainer_mixin", "Rollouts": "completions", "rollout_func": "completions"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
