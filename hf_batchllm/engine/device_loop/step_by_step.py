"""Steps whose tokens the host has picked: the model runs as a graph, and the host sees the tokens of each step.

A step is picked from once the tokens before it have been seen, and the next one follows at once: tokens stay on the
device, where it finds them. While it runs, the host takes down the tokens of the step before, schedules and builds the
step after, and gets processors and masks ready.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...model.batch import ModelBatch
from ...model.device_memory import device_memory, is_out_of_memory
from ...model.runner import ModelRunner
from ...model.transfers import start_copy_to_host, to_device
from ...notices import Notices
from ...planning.requests_and_prefixes import Request
from ..timekeeper import Timekeeper
from .decode_graphs import DecodeGraphs
from .seats import Seats
from .steps_as_graphs import GraphLauncher

_NONE = -1  # in the place of a token: the row had ended before


@dataclass(eq=False)
class _Launched:
    """A step whose tokens have been picked, or will be before the next one runs."""

    sampling: Sequence[Request]
    logits: torch.Tensor | None  # [samples, vocabulary]  None once its tokens have been picked
    going: list[Request] | None = None  # those that had not ended when picking was prepared
    rows: list[int] = field(default_factory=list)  # of the samples that tokens have been picked for
    tokens: torch.Tensor | None = None  # of these rows
    picked: Callable[[], np.ndarray] | None = None  # waits for the tokens of these rows; negative: nothing to draw


class StepByStep(GraphLauncher):
    """``sampler``: picks the tokens of some requests from their logits, in float32. A tensor [requests] that it gives
    is not waited for before the next step is launched; it has negative numbers where there is nothing to draw from.

    prepare: gets it ready for these requests, while the device runs.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Callable[[torch.Tensor, Sequence[Request]], torch.Tensor | list[int]],
        prepare: Callable[[Sequence[Request], torch.device], None],
        may_pick_again: Callable[[Sequence[Request]], bool],
        seats: Seats,
        graphs: DecodeGraphs | None,
        device: torch.device,
        timekeeper: Timekeeper,
        custom_code: bool,
        runs_model: bool,
        notices: Notices,
    ) -> None:
        super().__init__(runner, seats, graphs, device, custom_code, runs_model)
        self.sampler = sampler
        self.prepare = prepare
        self.may_pick_again = may_pick_again
        self.timekeeper = timekeeper
        self._notices = notices
        self._latest: _Launched | None = None  # the step that was launched last
        self._at_once = sys.maxsize  # tokens that are picked at a time
        self._failed = False  # whether picking ran out of memory where it cannot be tried again

    def _launch(self, batch: ModelBatch, sampling: Sequence[Request]) -> Callable[[], np.ndarray]:
        before = self._latest
        if before is not None:
            self._pick(before)
            self.timekeeper.switch(self.timekeeper.launching)
        launched = _Launched(sampling, self.logits(batch))
        if batch.burst is None:  # between steps of decode rows alone the device would wait for a capture
            self.prepare_graphs(sampling, only_largest=True)
        if not any(request.pending for request in sampling):  # otherwise tokens before those have yet to be seen
            self._prepare(launched)
        self._latest = launched
        return lambda: self._tokens_of(launched)

    def tokens_were_seen(self) -> None:
        latest = self._latest
        if latest is not None and latest.picked is None and latest.going is None:
            with self.surroundings():
                self._prepare(latest)

    def _prepare(self, launched: _Launched) -> None:
        going = [request for request in launched.sampling if not request.done]
        try:
            with self.users_turn():
                self.prepare(going, self.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._free(error)  # picking gets ready by itself, in parts if need be
        else:
            launched.going = going

    def _tokens_of(self, launched: _Launched) -> np.ndarray:  # [samples, 1]
        if launched.picked is None:
            with self.surroundings():
                self._pick(launched)
        assert launched.picked is not None
        tokens = np.full(len(launched.sampling), _NONE, dtype=np.int64)
        tokens[launched.rows] = launched.picked()
        return tokens[:, None]

    def _pick(self, launched: _Launched) -> None:
        """Pick the step's tokens, once. The tokens before them must have been seen."""
        if launched.picked is not None:
            return
        if launched.tokens is None:  # memory may have run out after that: processors are not to be called twice
            logits, sampling, going = launched.logits, launched.sampling, launched.going
            assert logits is not None
            rows = launched.rows = [row for row, request in enumerate(sampling) if not request.done]
            if going is None or len(going) != len(rows):
                going = [sampling[row] for row in rows]
            if rows:
                self.timekeeper.switch("tokens")
                if len(rows) < len(sampling):
                    logits = logits[to_device(np.array(rows), self.device)]
                launched.tokens = self._picked(logits, going)
            else:
                launched.tokens = torch.empty(0, dtype=torch.long, device=self.device)
            launched.logits = None
        seats = [launched.sampling[row].seat for row in launched.rows]
        on_host = torch.tensor(seats, dtype=torch.long, device="cpu", pin_memory=self.device.type == "cuda")
        self.seats.store(on_host, launched.tokens)
        launched.picked = start_copy_to_host(launched.tokens)

    def _picked(self, logits: torch.Tensor, going: list[Request]) -> torch.Tensor:  # [going] int64
        """In parts, where memory does not suffice for all at once."""
        parts: list[torch.Tensor] = []
        done = 0
        while done < len(going):
            part = slice(done, done + self._at_once)
            some = going if self._at_once >= len(going) else going[part]
            try:
                with self.users_turn():
                    tokens = self.sampler(self.runner.in_float32(logits[part]), some)
                if not isinstance(tokens, torch.Tensor):
                    tokens = to_device(np.array(tokens, dtype=np.int64), self.device)
                elif len(some) < len(going):  # memory for masks serves again, once it has been read
                    tokens.cpu()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if not self.may_pick_again(some):
                    self._failed = True
                    raise
                if len(some) == 1:
                    raise
                self._at_once = len(some) // 2
                self._free(error)
                self._notices(
                    "smaller picks",
                    f"memory ran out on {self.device} when the tokens of {len(some):,} sequences were picked: they are "
                    "picked in smaller parts, which is slower. The results stay the same. To leave more room, set a "
                    "smaller `kv_memory`",
                )
            else:
                parts.append(tokens.to(self.device))  # a head of the user's may be elsewhere
                done += len(some)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _free(self, error: Exception) -> None:
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        gc.collect()
        device_memory(self.device).trim()

    def may_repeat(self, sampling: Sequence[Request]) -> bool:
        return not self._failed  # the step itself fails before any of its tokens are picked

    def _put_back(self, going: Sequence[Request]) -> None:
        self.seats.put(going)
