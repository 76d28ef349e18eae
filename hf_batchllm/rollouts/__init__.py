"""Rollouts of TRL's GRPOTrainer: ``rollout_func`` for its hook, ``RolloutMixin`` for tools and environments."""

from __future__ import annotations

from .rollout_func import Rollouts, rollout_func
from .trainer_mixin import RolloutMixin

__all__ = ["RolloutMixin", "Rollouts", "rollout_func"]
