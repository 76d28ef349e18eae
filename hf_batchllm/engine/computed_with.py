"""What kept K and V were computed with: noted before they are computed, and looked at again when they have been."""

from __future__ import annotations

import torch
from torch import nn

from ..inputs.base_model import base_model
from ..model.architecture import Architecture
from ..model.owners_state import OwnersState
from ..model.owners_warnings import has_owners_hooks
from ..model.weights_digest import Digest


class ComputedWith:
    """The model as it is when a call begins."""

    def __init__(self, model: nn.Module, architecture: Architecture) -> None:
        self._own_code = architecture.own_code
        self._state = OwnersState(model, architecture.device)
        self._digest = Digest(self._state.tensors())
        self._answers = self._answers_of(model)
        self._change: str | None = None
        self._digests: list[Digest] = []  # of later looks; compared in the end, as a GPU has to be waited for

    def holds_for(self, model: nn.Module, now: ComputedWith) -> bool:
        """Whether K and V computed then are right ``now``. The prompts' keys tell which adapters are active."""
        return self._state.change(model, adapters=False, written=True) is None and (
            self._digest == now._digest and _alike(self._answers, now._answers)
        )

    def look_again(self, model: nn.Module, adapters: bool) -> None:
        """Something has been computed since the last look. ``adapters``: with those that the owner has activated."""
        self._change = self._change or self._state.change(model, adapters=adapters, written=True)
        if self._change is None and not _alike(self._answers, self._answers_of(model)):
            self._change = "what its owner's code computes"
        if self._change is None:
            self._digests.append(Digest(self._state.tensors()))

    def change(self) -> str | None:
        """What was another in one of the looks, for a message; None if nothing was."""
        if self._change is None and any(digest != self._digest for digest in self._digests):
            self._change = "a weight"
        self._digests.clear()
        return self._change

    def _answers_of(self, model: nn.Module) -> torch.Tensor | None:
        return self._own_code.answers(base_model(model), has_owners_hooks(model))


def _alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)
