"""What launchers that use graphs have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from ...model.batch import ModelBatch
from ...planning.requests_and_prefixes import Request
from .steps_as_graphs import StepsAsGraphs


class GraphLauncher(StepsAsGraphs, ABC):
    """A ``Launcher`` whose steps run in that way."""

    def launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        with self.surroundings():
            return self._launch(batch, sampling)

    @abstractmethod
    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        """Launch the step on the stream."""

    def tokens_were_seen(self) -> None:
        """As ``Launcher`` has it."""

    @abstractmethod
    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        """As ``Launcher`` has it."""
