"""Features of images that are known already, in the place of what a model's vision tower would make of pixels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MISSING = object()


class ImageFeaturesSwap:
    """``inner``: the module whose forward pass calls its own ``get_image_features``."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._own: list[tuple[Any, str, Any]] = []  # (module, attribute, what stood there in the module itself)

    @contextmanager
    def applied(self, features: Any) -> Iterator[None]:
        """While the block runs, ``get_image_features`` gives these, whatever it is called with."""
        self._put(self._inner, "get_image_features", lambda *_, **__: features)
        language_model = getattr(self._inner, "language_model", None)
        if hasattr(language_model, "_deepstack_process"):
            self._put(language_model, "_deepstack_process", _added_in_place)
        yield
        self.restore()

    def restore(self) -> None:
        """After an error or an interrupt, too."""
        while self._own:
            module, name, own = self._own[-1]
            if own is _MISSING:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = own
            self._own.pop()

    def _put(self, module: Any, name: str, given: Any) -> None:
        self._own.append((module, name, vars(module).get(name, _MISSING)))
        vars(module)[name] = given


def _added_in_place(
    hidden_states: torch.Tensor,  # [1, tokens, dim]
    visual_pos_masks: torch.Tensor,  # [1, tokens]
    visual_embeds: torch.Tensor,  # [tokens of images, dim]
) -> torch.Tensor:
    """As Qwen3-VL's method, in the tensor itself, which fused layers know by its identity. Nothing is waited for."""
    beside = torch.zeros_like(hidden_states)
    beside.masked_scatter_(visual_pos_masks[..., None], visual_embeds.to(hidden_states.dtype))
    return hidden_states.add_(beside)
