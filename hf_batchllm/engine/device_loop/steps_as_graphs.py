"""Steps on a stream of the call, decode steps as graphs, and what the report says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from ...model.batch import ModelBatch
from ...model.runner import ModelRunner
from ...planning.requests_and_prefixes import Request
from ...planning.step import Step
from ...wording import shown_size
from .decode_graphs import DecodeGraphs
from .seats import Seats


class StepsAsGraphs:
    """Runs the steps of a call; decode steps are replays of graphs, where the model allows it.

    owners_code: whether code of the model's owner is called between all steps, which may do anything to the model.
    """

    def __init__(
        self,
        runner: ModelRunner,
        seats: Seats,
        graphs: DecodeGraphs | None,
        device: torch.device,
        owners_code: bool = False,
    ) -> None:
        self.runner = runner
        self.seats = seats
        self.graphs = graphs
        self.device = device
        self._owners_code = owners_code
        if owners_code and graphs is not None:
            graphs.check_later()
        # All steps go to one stream, also if the caller's stream changes between two results: a row that runs past its
        # end writes only to pages that it held at launch, earlier on this stream than their next owner's first step.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._outside: torch.cuda.Stream | None = None  # the caller's stream, during a step

    def start(self, requests: Sequence[Request], most_rows: int) -> None:
        """The call begins, or the turn of the next adapter, with these requests; a step has at most ``most_rows``."""
        if self.graphs is not None:
            self.graphs.model_may_have_changed = True  # its adapter has

    @property
    def most_times(self) -> int:
        return self.graphs.most_times if self.graphs is not None and self.graphs.does_all else 1

    @contextmanager
    def surroundings(self, runs_model: bool = True) -> Iterator[None]:
        """Where a step runs. ``runs_model``: False if it is a replay and nothing else, to save the host's time."""
        if self._stream is not None:
            self._outside = torch.cuda.current_stream()
        if self.graphs is not None:
            self.graphs.replays, self.graphs.is_steady = False, True
        with torch.cuda.stream(self._stream), self.runner.surroundings() if runs_model else nullcontext():
            yield
        self._outside = None

    def logits(self, batch: ModelBatch) -> torch.Tensor:  # [samples, vocabulary]
        """Run a step whose tokens are picked outside of graphs. The logits are valid until the next one runs."""
        if self.graphs is not None and batch.burst is not None:
            produced = self.graphs.run(batch, int(batch.burst.left.max()))
            if produced is not None:
                assert produced.logits is not None
                return produced.logits
        return self.runner.step(self.seats.fill_in(batch))

    @contextmanager
    def owners_turn(self) -> Iterator[None]:
        """While processors or criteria are called, which may run the model."""
        if self._owners_code:
            self.owner_gets_control()
        try:
            with self.runner.adapted():
                yield
        finally:
            if self._owners_code:
                self.owner_had_control()

    def owner_gets_control(self) -> None:
        if self.graphs is not None:
            self.graphs.owner_gets_control()

    def owner_had_control(self) -> None:
        if self.graphs is not None:
            self.graphs.owner_had_control()

    def put_back(self, step: Step) -> None:
        with torch.cuda.stream(self._stream), self.runner.surroundings():  # which are those of the stream
            if self.graphs is not None:
                self.graphs.close(self._stream)  # they hold memory that no other step can use; new ones can be captured
            self.runner.restore()
            self._put_back([request for request in step.sampling() if not request.done])

    def _put_back(self, going: Sequence[Request]) -> None:
        """Forget what a step that failed has left of these requests."""

    @property
    def replays(self) -> bool:
        return self.graphs is not None and self.graphs.replays

    @property
    def is_steady(self) -> bool:
        """As ``Launcher`` has it."""
        return self.graphs is None or self.graphs.is_steady

    @property
    def summary(self) -> str:
        """A sentence for the report; empty where there are no graphs."""
        graphs = self.graphs
        if graphs is None or not graphs.captured:
            return ""
        count = f"{graphs.captured} graph{'s' if graphs.captured > 1 else ''}"
        taken = f"{1000 * graphs.seconds:,.0f} ms and {shown_size(graphs.bytes)}"
        beside = f" ({1000 * graphs.seconds_beside:,.0f} ms while other steps ran)" if graphs.seconds_beside else ""
        reason = graphs.why_not_prepared
        why = f"; no more while other steps run ({reason.splitlines()[0]})" if reason else ""
        return f"{graphs.steps:,} steps replayed from {count}, which took {taken} to capture{beside}{why}"

    def close(self) -> None:
        if self._outside is not None:  # an interrupt came before `launch` put the stream back
            torch.cuda.set_stream(self._outside)
            self._outside = None
        if self.graphs is not None:
            self.graphs.close(self._stream)
