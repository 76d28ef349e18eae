"""Decode steps as CUDA graphs: captured once for a number of rows, replayed for any rows, whatever they share.

Where a model cannot be captured, its rows run the same way without a graph, and a warning says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from ...config import BatchConfig
from ...errors import RanksError
from ...kernels.lists.work_lists import NoRoom
from ...model.attention.kv_storage import KVStorage
from ...model.attention.triton_attention import StepWork, TritonBackend, WorkSeen
from ...model.batch import ModelBatch
from ...model.draft_rows import DraftRows
from ...model.inspection.owners_state import HeldMemory, not_in_graphs
from ...model.runner import ModelRunner
from ...notices import Notices
from ...sampling.device_logprobs import DeviceLogProbs
from .decode_rows import Advance, DecodeRows, Pick, Produced
from .graph_sizes import SMALLEST_PREPARED, WORTHWHILE_STEPS, draft_size_of, size_of, sizes_to_come
from .seats import Seats

_CAPTURE = "graphs: capture"
_WARM_ROWS = 16  # rows of the run in which kernels are compiled
# A capture cannot use the memory in PyTorch's cache. With so many bytes free beside it, the cache need not be emptied
# first, which would make the host wait.
_PLENTY_OF_BYTES = 2 << 30
_ANOTHER = "another of the devices that run this model could not capture its part"
_LARGER = 1.6  # a graph of up to so many times the rows serves them for longer than a few steps


class _Kind(NamedTuple):
    rows: int
    drafts: bool = False  # whether tokens that are guessed are among them


class DecodeGraphs:
    """The decode rows of a call, by their number, each number with a graph once it is worth it.

    ``capture``: whether there are graphs at all; without, the same rows run one kernel after the other.
    """

    def __init__(
        self,
        runner: ModelRunner,
        backend: TritonBackend,
        seats: Seats,
        pick: Pick | None,
        advance: Advance | None,
        most_times: int,
        notices: Notices,
        noting: DeviceLogProbs | None,
        capture: bool = True,
    ) -> None:
        self._noting = noting
        self._runner = runner
        # Whether any of the devices that run the model together says so: all of them capture a graph, or none.
        self.any_says: Callable[[bool], bool] = bool
        self._backend = backend
        self._seats = seats
        self._pick = pick
        self._advance = advance
        self.most_times = most_times
        fewest = backend.fewest_rows
        # The size of the graph for so many rows.
        self.size_of: Callable[[int], int] = lambda rows: size_of(max(rows, fewest))
        self._notices = notices
        self._graphs: dict[_Kind, DecodeRows] = {}  # captured or not
        self._met: dict[tuple[Any, ...], WorkSeen] = {}
        self._sizes: set[int] = set()  # of steps so far, where the host picks
        self._pool: Any = None
        # A model that could not be captured in an earlier call cannot be captured in this one.
        self._given_up = not capture or notices.was_given(_CAPTURE)
        self._memory: HeldMemory | None = None  # of the model that was captured
        self._adapter: str | None = None
        # Whether a run has compiled the kernels of all sizes that are prepared, with drafts and without.
        self._warm = {False: False, True: False}
        self._draft_sizes: Sequence[int] = ()  # that steps with drafts will need
        self._model_may_have_changed = True  # the caller had control since the last step
        self.why_not_prepared = ""  # why graphs are only captured when a step needs them
        self._preparing = False
        self.seconds = 0.0  # that captures took
        self.seconds_beside = 0.0  # of these, the seconds while the device was at work on other steps
        self.bytes = 0  # that the graphs take
        self.captured = 0
        self.steps = 0  # that graphs have run
        self.replays = False  # whether the latest step is a captured graph
        self.is_steady = True  # whether it was neither captured nor will be
        self._uncaptured: set[_Kind] = set()  # memory does not suffice for a graph with drafts, and others go on

    def run(self, batch: ModelBatch, steps_to_come: int) -> Produced | None:
        """Run a burst. Returns what comes of it, or None if the kernels cannot do every layer.

        In that case nothing has run.
        """
        if batch.burst is None or not self.does_all:
            return None
        with_drafts, attention = batch.draft_rows, batch.attention
        drafts = with_drafts is not None
        rows = attention.rows if with_drafts is None else with_drafts.total
        size = self._size_for(rows, steps_to_come) if with_drafts is None else self._size_of(with_drafts)
        kind = _Kind(size, drafts)
        self._drop_outdated()
        graph = self._graphs.get(kind) or self._make(kind)

        @cache
        def work() -> StepWork:
            return self._backend.work_of(batch.first_in_room or attention)

        try:
            graph.load(batch, work)
        except NoRoom:  # rows made for this burst have room for it
            self._forget(graph)
            graph = self._make(kind)
            graph.load(batch, work)
        if batch.states is not None:
            self.storage.states.copy(batch.states.copies)
        times = batch.burst.times
        self.replays = graph.captured
        self.is_steady = graph.captured or self._given_up or kind in self._uncaptured
        if not graph.captured:
            graph.run()
            self._warm[drafts] |= kind.rows % _WARM_ROWS == 0
            times -= 1
            if not self.is_steady and steps_to_come >= WORTHWHILE_STEPS:
                self._capture(graph)
        for _ in range(times):
            graph.run()
        self.steps += times if graph.captured else 0
        return graph.settle(rows, keep=not drafts)

    def only_replays(self, batch: ModelBatch) -> bool:
        """Whether a step with drafts is no more than a replay of a graph, whose lists are there."""
        drafts, burst = batch.draft_rows, batch.burst
        if drafts is None or burst is None or self._model_may_have_changed or not self.does_all:
            return False
        kind = _Kind(self._size_of(drafts), True)
        graph = self._graphs.get(kind)
        return graph is not None and graph.captured and graph.has_lists_of(drafts.room)

    def _size_for(self, rows: int, steps_to_come: int) -> int:
        """Where the host picks, the device waits while a graph is captured, so graphs of more rows serve these, too.

        The sizes of earlier steps decide, not the graphs there are: see graph_sizes.
        """
        size = self.size_of(rows)
        if self._picked_on_device or self._given_up:
            return size
        larger = min((other for other in self._sizes if other >= size), default=size)
        if steps_to_come < WORTHWHILE_STEPS or larger <= _LARGER * rows:
            size = larger
        self._sizes.add(size)
        return size

    @staticmethod
    def _size_of(drafts: DraftRows) -> int:
        return draft_size_of(drafts.total) if drafts.room is None else drafts.room.size

    @property
    def _picked_on_device(self) -> bool:
        return self._pick is not None

    def _drop_outdated(self) -> None:
        """Drop graphs of other weights than the model has by now, or of another adapter."""
        captured = [graph for graph in self._graphs.values() if graph.captured]
        if not self._model_may_have_changed or (self._given_up and not captured):
            return
        control = self._runner.control
        control.restore()  # what is looked at is the owner's model
        adapter = None if control.adapters is None else control.adapters.name  # which that does not show
        self._model_may_have_changed = False
        holds = adapter == self._adapter and self._memory is not None and self._memory.is_in_use()
        if not self.any_says(not holds):
            return
        for graph in captured:
            self._forget(graph)
        self._memory, self._adapter = HeldMemory(self._runner.model), adapter
        reason = not_in_graphs(self._runner.model)
        if self.any_says(reason is not None):
            self._give_up(reason or _ANOTHER)

    def owner_had_control(self) -> None:
        """Before the next step it is looked whether the model's weights are where they were."""
        self._model_may_have_changed = True

    @property
    def storage(self) -> KVStorage:
        return self._backend.storage

    @property
    def does_all(self) -> bool:
        """Whether the kernels can do every layer, so that rows may run several times in a row."""
        return self._backend.does_all

    @property
    def prepares(self) -> bool:
        """Whether graphs may be captured before a step needs them."""
        return not (self._given_up or self.why_not_prepared)

    def ready_for_drafts(self, sizes: Sequence[int]) -> bool:
        """Steps with drafts of these sizes will be needed. Whether no graph for them can be captured beforehand now."""
        self._draft_sizes = sizes
        there = self._captured()
        missing = any(_Kind(size, drafts=True) not in there for size in sizes)
        return not missing or not self.prepares or self._is_tight()

    def _captured(self) -> set[_Kind]:
        return {kind for kind, graph in self._graphs.items() if graph.captured}

    def prepare(self, left: Sequence[int], may_stop: bool, only_next: bool) -> None:
        """Capture one of the graphs that steps to come will need, while the device is at work on earlier ones.

        ``left``: how many tokens each of the running sequences may still get; ``may_stop``: some may end before that.
        ``only_next``: none but that of a step of all of these.
        """
        known = self._met or self._backend.work_seen  # the kinds of work that layers have had so far
        if not self.prepares or not known or not self.does_all:
            return
        if self._runner.model.training:  # in an extra run, dropout would draw noise: the tokens would depend on timing
            return
        self._drop_outdated()
        sizes = sizes_to_come(left, may_stop)
        if not self._picked_on_device:
            sizes = sizes[:1]  # it serves fewer rows as well
        kinds = [*(_Kind(size, drafts=True) for size in self._draft_sizes), *map(_Kind, sizes)]
        if only_next:
            kinds = [_Kind(size_of(len(left)))] if size_of(len(left)) >= SMALLEST_PREPARED else []
        there = self._captured()
        kind = next((kind for kind in kinds if kind not in there), None)
        if not self.prepares or kind is None or self._is_tight():
            return  # where memory is short, capture only what a step needs
        together = kind.rows == len(left) and not may_stop and max(left) - min(left) < WORTHWHILE_STEPS
        together &= self._picked_on_device and not kind.drafts
        seconds, self._preparing = self.seconds, True
        try:
            if not self._failed_somewhere(lambda: self._make_ready(kind, known, idle=not together)):
                self._failed_somewhere(lambda: self._capture(self._graphs[kind]))
        finally:
            self._preparing = False
        self.seconds_beside += self.seconds - seconds
        self.is_steady = False  # the host comes late to this step's tokens, or to those of the one before
        if self.why_not_prepared:
            self._graphs.pop(kind, None)

    def _failed_somewhere(self, prepare: Callable[[], None]) -> bool:
        """Whether it has, on any of the devices: then ``why_not_prepared`` says so."""
        try:
            prepare()
        except RanksError:
            raise
        except Exception as error:  # steps run without this graph; if the error is theirs, they raise it themselves
            self.why_not_prepared = f"{type(error).__name__}: {error}"
        if self.any_says(bool(self.why_not_prepared)):
            self.why_not_prepared = self.why_not_prepared or _ANOTHER
        return bool(self.why_not_prepared)

    def _make_ready(self, kind: _Kind, known: dict[tuple[Any, ...], WorkSeen], idle: bool) -> None:
        if not self._warm[kind.drafts]:
            # A run of a few padding rows makes whatever is made on first use: a capture could not make it.
            self._new(_Kind(_WARM_ROWS, kind.drafts)).run_idle(known)
            self._warm[kind.drafts] = True
        self._make(kind).work.make_rooms(known, idle=idle)

    def _make(self, kind: _Kind) -> DecodeRows:
        self._graphs[kind] = self._new(kind)
        return self._graphs[kind]

    def _new(self, kind: _Kind) -> DecodeRows:
        return DecodeRows(
            kind.rows, self.most_times, self._runner, self._backend, self._seats, self._pick, self._advance, self._met,
            self._noting, kind.drafts,
        )  # fmt: skip

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
            self._captured_by_all(graph)
        except BaseException as error:  # the model does something that a graph cannot hold; or an interrupt
            graph.drop_capture()
            # A capture that breaks off leaves its own stream and generator state in place: put both back.
            torch.cuda.set_stream(stream)
            fresh = torch.Generator(device)
            fresh.set_state(noise)
            generator.graphsafe_set_state(fresh)
            if not isinstance(error, Exception) or isinstance(error, RanksError):
                raise
            if self._preparing:  # it may work when a step needs it, after a run of these very rows
                self.why_not_prepared = f"{type(error).__name__}: {error}"
            elif isinstance(error, torch.OutOfMemoryError) and graph.drafts:
                self._uncaptured.add(_Kind(graph.rows, drafts=True))
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

    def _captured_by_all(self, graph: DecodeRows) -> None:
        failed: Exception | None = None
        try:
            graph.capture(self._pool)
        except Exception as error:
            failed = error
        if self.any_says(failed is not None):
            raise failed or RuntimeError(_ANOTHER)

    def _is_tight(self) -> bool:
        device = self._seats.last.device
        tight = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _PLENTY_OF_BYTES
        return self.any_says(tight)

    def _give_up(self, reason: str, kind: str = "graphs") -> None:
        self._given_up = True
        self._notices(kind, f"decode steps run without CUDA graphs, which is slower: {reason}")

    def _forget(self, graph: DecodeRows) -> None:
        """Drop a graph, once all that was launched has ended."""
        if graph.captured and self._seats.last.device.type == "cuda":
            torch.cuda.current_stream(self._seats.last.device).synchronize()
        self._graphs = {kind: other for kind, other in self._graphs.items() if other is not graph}
        graph.drop_capture()

    def close(self, stream: torch.cuda.Stream | None = None) -> None:
        """``stream``: of the steps, if that is not the current one."""
        captured = any(graph.captured for graph in self._graphs.values())
        if stream is None and self._seats.last.device.type == "cuda":
            stream = torch.cuda.current_stream(self._seats.last.device)
        try:
            if stream is not None and self._graphs:
                stream.synchronize()
        finally:  # after a CUDA error, waiting raises it again
            for graph in self._graphs.values():
                graph.drop_capture()
            self._graphs.clear()
            self._sizes.clear()
            self._memory = None
            self._model_may_have_changed = True
        if stream is not None and captured:
            torch.cuda.empty_cache()  # until then, nothing else can use the memory of the graphs' pool


def graphs_for(
    config: BatchConfig,
    runner: ModelRunner,
    seats: Seats,
    pick: Pick | None,
    advance: Advance | None,
    most_times: int,
    notices: Notices,
    noting: DeviceLogProbs | None,
) -> DecodeGraphs | None:
    """None where the backend cannot keep the state of decode rows on the device."""
    if not isinstance(runner.backend, TritonBackend):
        return None
    capture = config.cuda_graphs and seats.last.device.type == "cuda"
    return DecodeGraphs(runner, runner.backend, seats, pick, advance, most_times, notices, noting, capture)
