"""``output_scores`` and ``output_logits``: a tensor of each step, shaped as ``generate`` gives them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..model.transfers import to_device
from ..planning.requests_and_prefixes import Request


class StepTensors:
    """A tensor [rows, vocabulary] of each step, for all rows of the call: 0 in rows that had ended."""

    def __init__(self, prompts: int, samples: int, scores: bool, logits: bool) -> None:
        self._rows, self._samples = prompts * samples, samples
        self._steps: dict[str, list[torch.Tensor]] = {}
        if scores:
            self._steps["scores"] = []
        if logits:
            self._steps["logits"] = []

    @property
    def names(self) -> list[str]:
        return [f"output_{name}" for name in self._steps]

    def bytes(self, steps: int, vocabulary: int) -> int:
        return len(self._steps) * 4 * self._rows * steps * vocabulary

    def release(self) -> None:
        """Free them after an error: its traceback would keep them alive."""
        for steps in self._steps.values():
            steps.clear()

    @torch.no_grad()
    def record(self, requests: Sequence[Request], logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Called before tokens are picked. Both are [requests, vocabulary]; logits are as the model gave them."""
        made = np.array([len(request.generated) for request in requests])
        rows = np.array([request.index * self._samples + request.sample for request in requests])
        self.put(made, rows, logits, scores)

    def put(self, made: np.ndarray, rows: np.ndarray, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """``made`` and ``rows`` [requests]: new tokens so far, and the row of the results, of each request."""
        for step in np.unique(made).tolist():
            which = np.flatnonzero(made == step)
            there, here = (to_device(index, logits.device) for index in (rows[which], which))
            for name, values in (("scores", scores), ("logits", logits)):
                if name in self._steps:
                    self._of(name, step, values)[there] = values[here].float()

    def _of(self, name: str, step: int, like: torch.Tensor) -> torch.Tensor:
        steps = self._steps[name]
        while len(steps) <= step:
            steps.append(torch.zeros(self._rows, like.shape[-1], dtype=torch.float32, device=like.device))
        return steps[step]

    def scores_of(self, request: Request, made: int, rows: int = 1) -> tuple[torch.Tensor, ...] | None:
        """The scores of a request's first ``made`` tokens, [rows, vocabulary] each; None if they are not kept."""
        row = request.index * self._samples + request.sample
        steps = self._steps.get("scores")
        return None if steps is None else tuple(step[row : row + rows] for step in steps[:made])

    def outputs(self, longest: int | None, device: torch.device) -> dict[str, tuple[torch.Tensor, ...]]:
        """The tensors by their names in a ModelOutput. ``longest``: new tokens of the longest row; None: all steps."""
        return {name: tuple(step.to(device) for step in steps[:longest]) for name, steps in self._steps.items()}
