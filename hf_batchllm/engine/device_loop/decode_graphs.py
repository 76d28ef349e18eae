"""Decode steps as CUDA graphs: captured once for so many rows, replayed whatever the rows are and share.

Where a model cannot be captured, its rows run by themselves in the same way, and that is said.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ...config import BatchConfig
from ...kernels.work_lists import NoRoom
from ...model.batch import ModelBatch
from ...model.kv_storage import KVStorage
from ...model.owners_state import not_in_graphs, owners_state
from ...model.runner import ModelRunner
from ...model.triton_attention import TritonBackend, WorkSeen
from ...notices import Notices
from .decode_rows import Advance, DecodeRows, Pick, Seats
from .graph_sizes import WORTH, size_of, sizes_to_come

_CAPTURE = "graphs: capture"
_WARM_ROWS = 16  # of the run in which kernels are compiled
# Bytes free on the device with which PyTorch's cache need not be emptied before a capture, to which what lies in it is
# of no use. Emptying it makes the host wait.
_PLENTY = 2 << 30


class DecodeGraphs:
    """The graphs of a call, by their rows. ``capture``: whether there are to be any; otherwise rows run without."""

    def __init__(
        self,
        runner: ModelRunner,
        backend: TritonBackend,
        seats: Seats,
        pick: Pick,
        advance: Advance,
        most_times: int,
        notices: Notices,
        capture: bool = True,
    ) -> None:
        self._runner = runner
        self._backend = backend
        self._seats = seats
        self._pick = pick
        self._advance = advance
        self.most_times = most_times
        self._notices = notices
        self._graphs: dict[int, DecodeRows] = {}  # captured or not
        self._met: dict[tuple[Any, ...], WorkSeen] = {}
        self._pool: Any = None
        # What could not be captured once cannot be the next time.
        self._given_up = not capture or notices.was_given(_CAPTURE)
        self._state: object = None  # of the model, as it was captured
        self._warm = False  # whether so many rows have run that kernels are compiled for those that are prepared
        self.look_again = True  # somebody else has been at work since the last step
        self.not_prepared = ""  # why graphs are only captured when they are wanted
        self._preparing = False
        self.seconds = 0.0  # that captures took
        self.seconds_beside = 0.0  # of these, while the device was at work
        self.bytes = 0  # and the memory
        self.captured = 0
        self.steps = 0  # run by graphs

    def run(self, batch: ModelBatch, steps_to_come: int) -> torch.Tensor | None:  # [rows, most_times]
        """What the rows of a burst produce: see ``DecodeRows.settle``. None if the kernels cannot do all of it; then
        nothing has been done."""
        if batch.burst is None or not self._backend.does_all:
            return None
        self._look()
        rows = batch.attention.rows
        size = size_of(rows)
        graph = self._graphs.get(size) or self._made(size)
        step = self._backend.work_of(batch.attention)
        try:
            graph.load(batch, step)
        except NoRoom:  # an odd burst: what is made for it has room enough
            self._forget(graph)
            graph = self._made(size)
            graph.load(batch, step)
        times = batch.burst.times
        if not graph.captured:
            graph.run()
            self._warm |= size % _WARM_ROWS == 0
            times -= 1
            if not self._given_up and steps_to_come >= WORTH:
                self._capture(graph)
        for _ in range(times):
            graph.run()
        self.steps += times if graph.captured else 0
        return graph.settle()[:rows]

    def _look(self) -> None:
        """The owner may do anything to the model between two results."""
        if not self.look_again or (self._given_up and not any(graph.captured for graph in self._graphs.values())):
            return
        adapters = self._runner.adapters
        of_steps = None if adapters is None else adapters.name  # which the owner's model has in steps alone
        state = owners_state(self._runner.model, self._seats.last.device), of_steps
        self.look_again = False
        if state == self._state:
            return
        for graph in [graph for graph in self._graphs.values() if graph.captured]:
            self._forget(graph)
        self._state = state
        if (reason := not_in_graphs(self._runner.model)) is not None:
            self._give_up(reason)

    @property
    def storage(self) -> KVStorage:
        return self._backend.storage

    @property
    def prepares(self) -> bool:
        """Whether graphs may be captured beforehand."""
        return not (self._given_up or self.not_prepared)

    def prepare(self, left: Sequence[int], may_stop: bool) -> None:
        """Capture one of the graphs that steps to come will want, while the device is at work on what it was given.

        ``left``: how many tokens each of the sequences that run at a time may still get; some ``may_stop`` before.
        """
        known = self._met or self._backend.work_seen  # the kinds of work that there are
        if not self.prepares or not known or not self._backend.does_all:
            return
        if self._runner.model.training:  # dropout would draw noise in a run that is made when there is time for it
            return
        self._look()
        there = {size for size, graph in self._graphs.items() if graph.captured}
        wanted = next((size for size in sizes_to_come(left, may_stop) if size not in there), None)
        if not self.prepares or wanted is None or self._is_tight():
            return  # where memory is short, they are captured when they are wanted
        together = wanted == len(left) and not may_stop and max(left) - min(left) < WORTH
        seconds, self._preparing = self.seconds, True
        try:
            if not self._warm:
                # What is made on first use is made in a run of a few idle rows: in a capture it could not be.
                self._new(_WARM_ROWS).run_idle(known)
                self._warm = True
            graph = self._made(wanted)
            graph.work.make_rooms(known, idle=not together)
            self._capture(graph)
        except Exception as error:  # of steps that can do without, or fail by themselves
            self.not_prepared = f"{type(error).__name__}: {error}"
        finally:
            self._preparing = False
        self.seconds_beside += self.seconds - seconds
        if self.not_prepared:
            self._graphs.pop(wanted, None)

    def _made(self, size: int) -> DecodeRows:
        self._graphs[size] = self._new(size)
        return self._graphs[size]

    def _new(self, size: int) -> DecodeRows:
        return DecodeRows(
            size, self.most_times, self._runner, self._backend, self._seats, self._pick, self._advance, self._met
        )

    def _capture(self, graph: DecodeRows) -> None:
        began = time.perf_counter()
        device = self._seats.last.device
        index = torch.cuda.current_device() if device.index is None else device.index
        stream, generator = torch.cuda.current_stream(device), torch.cuda.default_generators[index]
        noise = generator.get_state()
        if not self._preparing and self._is_tight():
            torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(device)
        try:
            if not any(other.captured for other in self._graphs.values()):
                self._pool = torch.cuda.graph_pool_handle()  # a pool goes with its last graph
            graph.capture(self._pool)
        except BaseException as error:  # whatever a model does that a graph cannot hold; an interrupt
            # A capture that breaks off leaves both as they are while it goes on.
            torch.cuda.set_stream(stream)
            fresh = torch.Generator(device)
            fresh.set_state(noise)
            generator.graphsafe_set_state(fresh)
            if not isinstance(error, Exception):
                raise
            if self._preparing:  # when it is wanted, after a run of its own, it may do
                self.not_prepared = f"{type(error).__name__}: {error}"
            elif isinstance(error, torch.OutOfMemoryError):
                self._give_up("too little memory is left to capture them: set a smaller `kv_memory`")
            else:
                said = str(error).strip().splitlines()
                reason = f"this model cannot be captured ({type(error).__name__}: {said[0] if said else ''})"
                self._give_up(reason, _CAPTURE)
        else:
            self.captured += 1
            self.bytes += max(0, torch.cuda.memory_reserved(device) - reserved)
        self.seconds += time.perf_counter() - began

    def _is_tight(self) -> bool:
        device = self._seats.last.device
        return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _PLENTY

    def _give_up(self, reason: str, kind: str = "graphs") -> None:
        self._given_up = True
        self._notices(kind, f"decode steps run without CUDA graphs, which is slower: {reason}")

    def _forget(self, graph: DecodeRows) -> None:
        """Let it go, once what was launched has ended."""
        if graph.captured and self._seats.last.device.type == "cuda":
            torch.cuda.current_stream(self._seats.last.device).synchronize()
        self._graphs = {rows: other for rows, other in self._graphs.items() if other is not graph}

    def close(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None and self._graphs:
            stream.synchronize()
        captured = any(graph.captured for graph in self._graphs.values())
        self._graphs.clear()
        if stream is not None and captured:
            torch.cuda.empty_cache()  # the memory of their pool is not used for anything else until then


def graphs_for(
    config: BatchConfig,
    runner: ModelRunner,
    seats: Seats,
    pick: Pick,
    advance: Advance,
    most_times: int,
    notices: Notices,
) -> DecodeGraphs | None:
    """None where the device does not keep the state of decode rows."""
    if not isinstance(runner.backend, TritonBackend):
        return None
    capture = config.cuda_graphs and seats.last.device.type == "cuda"
    return DecodeGraphs(runner, runner.backend, seats, pick, advance, most_times, notices, capture)
