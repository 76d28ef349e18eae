"""A call's steps run under the autocast that the call began under, whatever its caller enters between two results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

State = tuple[bool, torch.dtype]  # whether autocast is on, and its type


class KeptAutocast:
    """Notes the state when it is made.

    Under another state, a step would compute keys and values of another type than those in the call's cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._exists = torch.amp.is_autocast_available(device.type)
        self._kept = self._now() if self._exists else None

    def _now(self) -> State:
        return torch.is_autocast_enabled(self._kind), torch.get_autocast_dtype(self._kind)

    def _set(self, state: State) -> None:
        torch.set_autocast_enabled(self._kind, state[0])
        torch.set_autocast_dtype(self._kind, state[1])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While the block runs, autocast is as it was in the beginning."""
        now = self._now() if self._exists else None
        if now is None or self._kept is None or now == self._kept or not (now[0] or self._kept[0]):
            yield
            return
        cached = torch.is_autocast_cache_enabled()
        try:
            # Autocast looks up copies of weights by the weight alone: the caller's may be of another type.
            torch.set_autocast_cache_enabled(False)
            self._set(self._kept)
            yield
        finally:
            self._set(now)
            torch.set_autocast_cache_enabled(cached)
