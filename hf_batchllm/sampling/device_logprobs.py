"""Log-probabilities of tokens that the device picks: noted there beside each token, and handed to the host later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..model.transfers import start_copy_to_host
from .sampling_kernels import SamplingKernels

MOST_LIKELY = 32  # tokens beside the picked one: the kernel finds one after the other


@dataclass(frozen=True)
class NotedRows:
    """What was noted of some rows, on their device or, as arrays, on the host."""

    ids: torch.Tensor  # [rows, places, k] int32  the most likely tokens
    values: torch.Tensor  # [rows, places, k + 1] float32  their log-probabilities, then that of the picked token

    def first(self, rows: int) -> NotedRows:
        return NotedRows(self.ids[:rows], self.values[:rows])

    def copied(self) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """Start a copy to the host. What comes back waits for it."""
        ids, values = start_copy_to_host(self.ids), start_copy_to_host(self.values)
        return lambda: (ids(), values())


class DeviceLogProbs:
    """Notes the log-probabilities of picked tokens, and of the ``k`` most likely beside each.

    scores: gives what the latest tokens were drawn from, where that is asked for in place of the model's logits.
    """

    def __init__(
        self, k: int, device: torch.device, kernels: SamplingKernels, scores: Callable[[], torch.Tensor] | None = None
    ) -> None:
        self.k = k
        self._scores = scores
        self._device = device
        self._note = kernels.note_top_logprobs

    def room(self, rows: int, places: int = 1) -> NotedRows:
        with torch.inference_mode(False):  # a later step may run outside of it
            return NotedRows(
                torch.zeros(rows, places, self.k, dtype=torch.int32, device=self._device),
                torch.zeros(rows, places, self.k + 1, dtype=torch.float32, device=self._device),
            )

    def note(
        self, room: NotedRows, logits: torch.Tensor, picked: torch.Tensor, made: torch.Tensor | None = None
    ) -> None:
        """``made`` [rows]: the place of each row is this, modulo the number of places."""
        self._note(logits if self._scores is None else self._scores(), picked, room.ids, room.values, made)
