"""``output_scores`` and ``output_logits``: a tensor of each step, shaped as ``generate`` gives them.

Where the device picks the tokens, it puts them there itself, at a request's row and its number of tokens. What rows
that ran past their end have left is cleared in the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..model.device_memory import is_out_of_memory
from ..model.transfers import to_device
from ..planning.requests_and_prefixes import Request


class StepTensors:
    """A tensor [rows, vocabulary] of each step, for all rows of the call: 0 in rows that had ended."""

    def __init__(self, prompts: int, samples: int, scores: bool, logits: bool) -> None:
        self._rows, self._samples = prompts * samples, samples
        self._steps: dict[str, list[torch.Tensor]] = {}
        self._rooms: dict[str, torch.Tensor] = {}  # [steps, rows + 1, vocabulary]  where the device puts them itself
        if scores:
            self._steps["scores"] = []
        if logits:
            self._steps["logits"] = []

    @property
    def has_scores(self) -> bool:
        return "scores" in self._steps

    @property
    def names(self) -> list[str]:
        return [f"output_{name}" for name in self._steps]

    def bytes(self, steps: int, vocabulary: int) -> int:
        return len(self._steps) * 4 * (self._rows + 1) * steps * vocabulary

    def release(self) -> None:
        """Free them after an error: its traceback would keep them alive."""
        for steps in self._steps.values():
            steps.clear()
        self._rooms.clear()

    def make_room(self, steps: int, vocabulary: int, device: torch.device) -> None:
        """For so many steps at once, at fixed addresses, for ``note``. The last row is nobody's."""
        shape = steps, self._rows + 1, vocabulary
        with torch.inference_mode(False):  # steps may run outside of it
            for name in self._steps:
                self._rooms[name] = torch.zeros(shape, dtype=torch.float32, device=device)
        for name, each in self._steps.items():
            each += self._rooms[name][:, : self._rows].unbind()

    def row_of(self, request: Request) -> int:
        return request.index * self._samples + request.sample

    @property
    def nobodys_row(self) -> int:
        return self._rows

    def note(self, rows: torch.Tensor, made: torch.Tensor, logits: torch.Tensor, scores: torch.Tensor | None) -> None:
        """Put down those of a step, on the device. ``rows``, ``made`` [requests], on the device as well."""
        for name, values in (("scores", scores), ("logits", logits)):
            if name in self._rooms and values is not None:
                room = self._rooms[name]
                last = len(room) - 1
                row = torch.where(made > last, self._rows, rows.long())  # it has ended
                room.index_put_((made.long().clamp(max=last), row), values.float())

    @torch.no_grad()
    def record(self, requests: Sequence[Request], logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Called before tokens are picked. Both are [requests, vocabulary]; logits are as the model gave them."""
        made = np.array([len(request.generated) for request in requests])
        rows = np.array([self.row_of(request) for request in requests])
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
        row = self.row_of(request)
        steps = self._steps.get("scores")
        return None if steps is None else tuple(step[row : row + rows] for step in steps[:made])

    def outputs(
        self, longest: int | None, device: torch.device, lengths: Sequence[int] = ()
    ) -> dict[str, tuple[torch.Tensor, ...]]:
        """The tensors by their names in a ModelOutput. ``longest``: new tokens of the longest row; None: all steps.

        lengths: new tokens of each row.
        """
        for room in self._rooms.values():
            for step, values in enumerate(room[:longest, : self._rows]):
                ended = [row for row, length in enumerate(lengths) if length <= step]
                if ended:
                    values[to_device(np.array(ended), room.device)] = 0
        found: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, steps in self._steps.items():
            handed_out = [step.to(device) for step in steps[:longest]]
            if name in self._rooms and device == self._rooms[name].device:
                handed_out = self._apart(handed_out)
            found[name] = tuple(handed_out)
        return found

    @staticmethod
    def _apart(steps: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each with memory of its own: somebody who keeps one need not keep all, nor steps that nobody came to."""
        try:
            return [step.clone() for step in steps]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return steps
