"""How long autocast keeps the copies of weights that it has made.

It makes a copy of a weight when the weight is first used in a block, and lets all copies go at the block's end. Whoever
has noted where they lie, as a captured graph has, must know when that was: and PyTorch does not say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Seen(TorchDispatchMode):
    """The names of the operations that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class AutocastBlock:
    """A weight of its own, of which autocast keeps a copy as long as it keeps those of a model's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._weight: torch.nn.Parameter | None = None
        self._copies = 0

    def state(self) -> object:
        """Changes when copies that were made at an earlier call are gone. None where none are made."""
        kind = self._device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return None
        dtype = torch.get_autocast_dtype(kind)
        if not torch.is_autocast_cache_enabled():
            return dtype, None
        with torch.inference_mode(False), torch.no_grad():
            if self._weight is None:
                self._weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device=self._device))
            with _Seen() as seen:
                torch.mm(self._weight, self._weight)
        self._copies += any(name != "mm" for name in seen.names)
        return dtype, self._copies
