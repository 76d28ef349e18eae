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
from ...kernels.lists.work_lists import NoRoom
from ...model.attention.kv_storage import KVStorage
from ...model.attention.triton_attention import StepWork, TritonBackend, WorkSeen
from ...model.batch import ModelBatch
from ...model.draft_rows import DraftRows
from ...model.inspection.user_state import HeldMemory, not_in_graphs
from ...model.runner import ModelRunner
from ...notices import Notices
from ...sampling.device_logprobs import DeviceLogProbs
from ...wording import first_line
from .decode_rows import Advance, DecodeRows, Pick, Produced
from .graph_sizes import SMALLEST_PREPARED, WORTHWHILE_STEPS, draft_size_of, size_of, sizes_to_come
from .seats import Seats

_CAPTURE = "graphs: capture"
_WARM_ROWS = 16  # rows of the run in which kernels are compiled
# A capture cannot use the memory in PyTorch's cache. With so many bytes free beside it, the cache need not be emptied
# first, which would make the host wait.
_PLENTY_OF_BYTES = 2 << 30
_LARGER = 1.6  # a graph of up to so many times the rows serves them for longer than a few steps


class _Kind(NamedTuple):
    rows: int
    drafts: bool = False  # whether tokens that are guessed are among them


class _Refusal(NamedTuple):
    """Why there is no graph."""

    why: str
    no_memory: bool

    @staticmethod
    def of(error: Exception) -> _Refusal:
        return _Refusal(f"{type(error).__name__}: {first_line(error)}", isinstance(error, torch.OutOfMemoryError))


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
        self.level: Callable[[], None] = lambda: None  # is called where a capture has failed
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
        produced = self.run_rows(batch, kind, rows)
        self.replays = self._graphs[kind].captured
        self.is_steady = self.replays or self._given_up or kind in self._uncaptured
        if not self.replays:
            if not self.is_steady and steps_to_come >= WORTHWHILE_STEPS:
                self._capture_now(kind)
            if batch.burst.times > 1:
                produced = self.run_again(kind, rows, batch.burst.times - 1)
        return produced

    def run_rows(self, batch: ModelBatch, kind: _Kind, rows: int) -> Produced:
        """Run a burst's rows: all of it if they are captured, and once if not."""
        assert batch.burst is not None
        graph = self._graphs.get(kind) or self._make(kind)

        @cache
        def work() -> StepWork:
            return self._backend.work_of(batch.first_in_room or batch.attention)

        try:
            graph.load(batch, work)
        except NoRoom:  # rows made for this burst have room for it
            self._forget(graph)
            graph = self._make(kind)
            graph.load(batch, work)
        if batch.states is not None:
            self.storage.states.copy(batch.states.copies)
        self._warm[kind.drafts] |= not graph.captured and kind.rows % _WARM_ROWS == 0
        return self.run_again(kind, rows, batch.burst.times if graph.captured else 1)

    def run_again(self, kind: _Kind, rows: int, times: int) -> Produced:
        """Run the rows of the latest burst so many times more."""
        graph = self._graphs[kind]
        for _ in range(times):
            graph.run()
        self.steps += times if graph.captured else 0
        return graph.settle(rows, keep=not kind.drafts)

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
        captured = self._captured()
        if not self._model_may_have_changed or (self._given_up and not captured):
            return
        self._model_may_have_changed = False
        if self.holds():
            return
        why_not = self.hold_anew()
        if why_not is not None:
            self._give_up(why_not)

    def holds(self) -> bool:
        """Whether graphs hold the weights and the adapter that the model has by now."""
        self._runner.control.restore()  # what is looked at is the user's model
        return self._adapter_now == self._adapter and self._memory is not None and self._memory.is_in_use()

    def hold_anew(self) -> str | None:
        """Drop all graphs, for those of the model as it is by now. Gives why there can be none."""
        for graph in [graph for graph in self._graphs.values() if graph.captured]:
            self._forget(graph)
        self._memory, self._adapter = HeldMemory(self._runner.model), self._adapter_now
        return not_in_graphs(self._runner.model)

    @property
    def _adapter_now(self) -> str | None:
        """Which the model's weights do not show."""
        adapters = self._runner.control.adapters
        return None if adapters is None else adapters.name

    def user_had_control(self) -> None:
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
        return not missing or not self.prepares or self.is_tight()

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
        if not self.prepares or kind is None or self.is_tight():
            return  # where memory is short, capture only what a step needs
        together = kind.rows == len(left) and not may_stop and max(left) - min(left) < WORTHWHILE_STEPS
        together &= self._picked_on_device and not kind.drafts
        refusal, began = self.make_ready(kind, not together), time.perf_counter()
        refusal = refusal or self.capture(kind, True)
        seconds = time.perf_counter() - began
        self.seconds, self.seconds_beside = self.seconds + seconds, self.seconds_beside + seconds
        self.is_steady = False  # the host comes late to this step's tokens, or to those of the one before
        if refusal is not None:  # it may work when a step needs it, after a run of these very rows
            self.why_not_prepared = refusal.why
            self.drop(kind, True)

    def make_ready(self, kind: _Kind, idle: bool) -> _Refusal | None:
        """Make rows that can be captured. If an error is that of steps, they raise it themselves."""
        known = self._met or self._backend.work_seen
        try:
            if not self._warm[kind.drafts]:
                # A run of a few padding rows makes whatever is made on first use: a capture could not make it.
                self._new(_Kind(_WARM_ROWS, kind.drafts)).run_idle(known)
                self._warm[kind.drafts] = True
            self._make(kind).work.make_rooms(known, idle=idle)
        except Exception as error:
            return _Refusal.of(error)
        return None

    def _make(self, kind: _Kind) -> DecodeRows:
        self._graphs[kind] = self._new(kind)
        return self._graphs[kind]

    def _new(self, kind: _Kind) -> DecodeRows:
        return DecodeRows(
            kind.rows, self.most_times, self._runner, self._backend, self._seats, self._pick, self._advance, self._met,
            self._noting, kind.drafts,
        )  # fmt: skip

    def _capture_now(self, kind: _Kind) -> None:
        """A step needs it, and its rows have run."""
        began = time.perf_counter()
        refusal = self.capture(kind, False)
        if refusal is not None:
            self.drop(kind, False)
            if refusal.no_memory and kind.drafts:
                self._uncaptured.add(kind)
            elif refusal.no_memory:
                self._give_up("too little memory is left to capture them: set a smaller `kv_memory`")
            else:
                self._give_up(f"this model cannot be captured ({refusal.why})", _CAPTURE)
        self.seconds += time.perf_counter() - began

    def capture(self, kind: _Kind, beforehand: bool) -> _Refusal | None:
        """Capture a run of the rows of this kind, or give what comes in the way."""
        if not beforehand and self.is_tight():
            torch.cuda.empty_cache()
        try:
            self._capture(self._graphs[kind])
        except Exception as error:  # the model does something that a graph cannot hold
            return _Refusal.of(error)
        return None

    def _capture(self, graph: DecodeRows) -> None:
        device = self._seats.last.device
        index = torch.cuda.current_device() if device.index is None else device.index
        stream, generator = torch.cuda.current_stream(device), torch.cuda.default_generators[index]
        noise = generator.get_state()
        reserved = torch.cuda.memory_reserved(device)
        try:
            if not self._captured():
                self._pool = torch.cuda.graph_pool_handle()  # a pool goes with its last graph
            graph.capture(self._pool)
        except BaseException:  # an interrupt, too
            graph.drop_capture()
            # A capture that breaks off leaves its own stream and generator state in place: put both back.
            torch.cuda.set_stream(stream)
            fresh = torch.Generator(device)
            fresh.set_state(noise)
            generator.graphsafe_set_state(fresh)
            raise
        self.captured += 1
        self.bytes += max(0, torch.cuda.memory_reserved(device) - reserved)

    def drop(self, kind: _Kind, rows: bool) -> None:
        """What could not be captured; with ``rows``, all that was made for it."""
        graph = self._graphs.pop(kind, None) if rows else self._graphs[kind]
        if graph is not None:
            self.captured -= graph.captured
            graph.drop_capture()
        self.level()

    def is_tight(self) -> bool:
        """Whether memory is short."""
        device = self._seats.last.device
        return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < _PLENTY_OF_BYTES

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
