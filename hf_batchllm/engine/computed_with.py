"""What kept K and V were computed with: noted when a call begins, and compared when the next one does."""

from __future__ import annotations

from torch import nn

from ..model.inspection.architecture import Architecture
from ..model.inspection.user_state import stamp_of, tensors_of
from ..model.inspection.weights_digest import Digest


class ComputedWith:
    """The model as it is when a call begins. The prompts' keys tell which adapters are active."""

    def __init__(self, model: nn.Module, architecture: Architecture) -> None:
        self._stamp = stamp_of(model, architecture.device), architecture.look.code
        self._digest = Digest(tensors_of(model))

    def holds_for(self, now: ComputedWith) -> bool:
        """Whether K and V computed then are right now."""
        return self._stamp == now._stamp and self._digest == now._digest
