"""Decode rows whose state the device keeps: they run several times in a row, and the host sends nothing in between.

Everything lies at fixed addresses, so that a CUDA graph of one run serves all runs: a burst only fills in its requests
and what they read and share. Where a burst has fewer rows than there is room for, the rest are idle padding rows: they
read no key, write nothing, and their output is dropped. A row that has ended is idle as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels.lists.spans import Spans
from ...kernels.lists.work_lists import NoRoom, WorkLists, sent
from ...kernels.reference.sample_torch import PADDING, RUNNING, STOPPED, Rows
from ...model.attention.triton_attention import StepWork, TritonBackend, WorkSeen, WorkSource
from ...model.batch import ModelBatch
from ...model.runner import ModelRunner
from ...patches.autocast_around import autocasts_within
from ...planning.draft_room import DraftRoom
from ...planning.requests_and_prefixes import NO_SLOT
from ...sampling.device_logprobs import DeviceLogProbs, NotedRows
from .graph_capture import capturing, own_copies
from .packed_rows import PackedRows
from .seats import Seats

# (logits [rows, vocabulary], seats [rows], new tokens so far [rows]) -> tokens [rows], -1 for none
Pick = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (rows, picked tokens, eos tokens, page size, each row's set of eos tokens), as `sample_triton.advance`
Advance = Callable[[Rows, torch.Tensor, torch.Tensor, int, torch.Tensor | None], None]

# The fields of a row, but for what it gives.
_LONGS = "seat", "token", "position", "slot"
_INTS = "length", "made", "remaining", "status", "start", "pages"
_ROOM_TO_GROW = 1.3  # lists have room for so many times the work that they are first made for


class RowsWork(WorkSource):
    """The work lists of the rows' layers: as ``StepWork``, at fixed addresses, for layers that the kernels can do.

    ``met``: the kinds of work that have come up so far in the call, by a layer's key. A kernel without work still takes
    2 to 4 us, so no kernel is launched for a kind that has not come up. When that kind does come up there is no room
    for it (NoRoom), and the rows are made anew, with room and with the kernel.

    ``may_idle``: some rows may be idle at any time, so there is always room for it.
    ``drafts``: some rows see what is written of rows before them, in the same step. A request may have several rows,
    so that there is room for the next larger tile, too. ``tiles``: all that there are.
    """

    def __init__(
        self,
        state: Rows,
        entries: int,
        multiprocessors: int,
        device: torch.device,
        met: dict[tuple[Any, ...], WorkSeen],
        may_idle: bool,
        tiles: Sequence[int],
        drafts: bool = False,
    ) -> None:
        self._tiles = tiles
        self._met = met
        self._drafts = drafts
        self._may_idle = may_idle
        self.rows = len(state.token)
        self.slots = state.slot
        self._lengths = state.length
        self._entries = entries
        self._multiprocessors = multiprocessors
        self._device = device
        self._rooms: dict[tuple[Any, ...], WorkLists] = {}
        self._step: StepWork | None = None

    @property
    def lengths(self) -> torch.Tensor:  # [rows] int32
        return self._lengths

    @property
    def rooms(self) -> list[WorkLists]:
        return list(self._rooms.values())

    def load(self, step: StepWork) -> None:
        """Copy a step's lists into these. NoRoom if they do not fit."""
        made = []
        for key, room in self._rooms.items():
            work = step.on_host(*key)
            self._note(key, work)
            if self._merges(work) > room.merges:
                raise NoRoom("rows of several parts do not fit into lists without a merge")
            made.append((room, room.fitted(work)))
        for room, work in made:
            room.packed.copy_(sent(work.packed, self._device))
        self._step = step

    def _note(self, key: tuple[Any, ...], work: WorkLists) -> WorkSeen:
        return self._met.setdefault(key, WorkSeen()).note(work.items, self._merges(work))

    def _merges(self, work: WorkLists) -> bool:
        return work.merges or self._may_idle or work.rows < self.rows  # the merge writes the zeros of idle rows

    def lists(self, *key: Any) -> WorkLists:  # window, heads, kv_heads, sinks
        if key not in self._rooms:  # first asked for, in the run before the capture
            assert self._step is not None
            work = self._step.on_host(*key)
            room = self._rooms[key] = self._new_room(key, self._note(key, work), work)
            room.packed.copy_(sent(room.fitted(work).packed, self._device))
        return self._rooms[key]

    def make_rooms(self, known: Mapping[tuple[Any, ...], WorkSeen], idle: bool) -> None:
        """Make room for the ``known`` kinds of work before any work comes. ``idle``: whether some rows will be."""
        for key, met in known.items():
            self._rooms[key] = self._new_room(key, WorkSeen(set(met.tiles), met.merges or idle or self._may_idle))

    def _new_room(self, key: tuple[Any, ...], met: WorkSeen, work: WorkLists | None = None) -> WorkLists:
        _, heads, kv_heads, sinks = key
        at_once = self._multiprocessors // kv_heads + 1
        blocks = self.rows * (heads // kv_heads) // 64 + 1
        large = 4 * blocks + self.rows // 2 + 4 * at_once
        items = {16: 2 * self.rows + 6 * at_once, 64: large, 128: large}
        tiles = sorted(self._larger(met.tiles) if self._drafts else met.tiles)
        sizes = {tile: 0 if work is None else _with_slack(len(work.items.get(tile, ()))) for tile in tiles}
        with torch.inference_mode(False):  # filled for bursts that may run outside of it
            room = WorkLists.room(
                rows=self.rows,
                items={tile: max(items[tile], size) for tile, size in sizes.items()},
                entries=max(self._entries, 0 if work is None else _with_slack(len(work.entries))),
                parts=max(8 * self.rows + 8 * at_once, 0 if work is None else _with_slack(work.parts)),
                device=self._device,
                causal=self._drafts,
                direct=not sinks,
            )
        room.merges = met.merges or self._drafts
        return room

    def _larger(self, met: set[int]) -> set[int]:
        """Those met, and the next larger of each."""
        places = {0} | {self._tiles.index(tile) + more for tile in met for more in (0, 1)}
        return {tile for place, tile in enumerate(self._tiles) if place in places}


@dataclass(frozen=True)
class Produced:
    """What a burst gave. A request's new token i stands at place i modulo the number of places; its note does, too."""

    tokens: torch.Tensor  # [rows, places] int64  -1: none
    noted: NotedRows | None
    logits: torch.Tensor | None  # [rows, vocabulary]  where the host picks; valid until the next burst


class DecodeRows:
    """Room for so many rows, and one run of the model over them. ``most_times``: how often they may run in a row.

    ``pick``, ``advance``: None where tokens are picked outside, from the logits of one run at a time.
    ``drafts``: whether tokens that are guessed are among the rows.
    """

    def __init__(
        self, rows: int, most_times: int, runner: ModelRunner, backend: TritonBackend, seats: Seats, pick: Pick | None,
        advance: Advance | None, met: dict[tuple[Any, ...], WorkSeen], noting: DeviceLogProbs | None = None,
        drafts: bool = False,
    ) -> None:  # fmt: skip
        self.rows = rows
        self.drafts = drafts
        self._seats = seats
        self._runner = runner
        self._pick = pick
        self._advance = advance
        self._page_size = backend.storage.page_size
        self._graph: torch.cuda.CUDAGraph | None = None
        device = seats.last.device
        pages = (most_times - 1) // self._page_size + 2  # that a row may write to in a burst

        with torch.inference_mode(False):  # a later burst may run outside of it
            longs, ints = dict.fromkeys(_LONGS, 1), dict.fromkeys(_INTS, 1) | {"pages": pages}
            self._packed = PackedRows(rows, longs, ints, device)
            given = {name: self._packed.field(name) for name in (*longs, *ints)}
            self._seat = given.pop("seat")
            produced = torch.zeros(rows, most_times, dtype=torch.long, device=device)
            self._state = Rows(**given, produced=produced)
            self._which: torch.Tensor | None = None  # each row's set of eos tokens
            if seats.which is not None:
                self._which = torch.zeros(rows, dtype=torch.int32, device=device)
        self._room: DraftRoom | None = None  # that the lists were made for
        self._logits: torch.Tensor | None = None  # of the latest run, where the host picks
        self._captured_logits: torch.Tensor | None = None  # where each replay puts its own
        self._noting = noting
        self._noted = None if noting is None else noting.room(rows, most_times)
        entries = backend.storage.num_pages + 8 * rows + 64
        self.work = RowsWork(
            self._state, entries, backend.multiprocessors, device, met, pick is None, backend.tiles, drafts
        )
        self._context = backend.over(self.work)
        self._states = runner.over_states(self._idle_spans()) if runner.architecture.states else None

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def load(self, batch: ModelBatch, work: Callable[[], StepWork]) -> None:
        """Fill in the next burst. NoRoom if its work lists do not fit."""
        burst, state, drafts = batch.burst, self._state, batch.draft_rows
        assert burst is not None
        self._load_lists(batch, work)
        tokens, lengths = batch.tokens, batch.attention.positions + 1
        places = slice(batch.attention.rows) if drafts is None else drafts.places
        from_seats = self._seats.keep_tokens and drafts is None
        no_request = len(self._seats.last) - 1
        packed, fields = self._packed.on_host()
        for name, values, filler in (  # the filler is for padding rows
            ("seat", tokens.row_seats.numpy(), no_request),
            ("token", 0 if from_seats else tokens.input_ids.numpy(), 0),
            ("position", tokens.position_ids.numpy(), 0),
            ("slot", batch.attention.slots.numpy(), -1),
            ("length", lengths, 0),
            ("made", tokens.made.numpy(), 0),
            ("remaining", burst.left, 0),
            ("status", RUNNING, PADDING),
            ("start", burst.start, 0),
            ("pages", burst.pages, -1),
        ):
            fields[name].fill(filler)
            fields[name][places] = values
        if drafts is not None:
            idle, last = drafts.idle()
            fields["length"][idle] = lengths[last]  # how far a block reads is what its last row sees, idle or not
        self._packed.send(packed)
        if from_seats:
            state.token.copy_(self._seats.last[self._seat])
        if self._which is not None and self._seats.which is not None:
            self._which.copy_(self._seats.which[self._seat])
        if self._states is not None and batch.states is not None:
            spans = self._states.spans
            for slots, column in ((batch.states.source, spans.source), (batch.states.target, spans.target)):
                # A row that has ended moves a state that is its own.
                padded = np.full(self.rows, NO_SLOT, dtype=np.int32)
                padded[places] = slots
                column.copy_(sent(torch.from_numpy(padded), state.token.device))
        if self._seats.any_eos:
            ended = self._seats.ended[self._seat]
            state.status.masked_fill_(ended, STOPPED)
            state.slot.masked_fill_(ended, -1)
            state.length.masked_fill_(ended, 0)
        state.produced.fill_(-1)

    def _load_lists(self, batch: ModelBatch, work: Callable[[], StepWork]) -> None:
        """Those of a room for drafts stay for all steps in it."""
        room = None if batch.draft_rows is None else batch.draft_rows.room
        if self.has_lists_of(room):
            return
        self._room, step = None, work()
        rows = batch.attention.rows if room is None else room.total
        assert step.rows == rows, "rows that are not in the lists see nothing"
        self.work.load(step)
        self._room = room

    def has_lists_of(self, room: DraftRoom | None) -> bool:
        return room is not None and self._room is not None and room.number == self._room.number

    def run(self) -> None:
        """Run the rows once: each gets its next token."""
        if self._graph is not None:
            self._graph.replay()
            self._logits = self._logits if self._captured_logits is None else self._captured_logits
        else:
            self._run()

    def settle(self, rows: int, keep: bool = True) -> Produced:
        """End the burst. Returns what came of its first rows. ``keep``: whether their seats get the last tokens."""
        state, seats = self._state, self._seats
        if self._pick is None:
            logits, self._logits = self._logits, None
            assert logits is not None
            return Produced(state.produced[:rows], None, logits[:rows])
        if keep:
            seats.last[self._seat] = state.token
            if seats.any_eos:
                seats.ended[self._seat] = state.status == STOPPED
        return Produced(state.produced[:rows], None if self._noted is None else self._noted.first(rows), None)

    def run_idle(self, known: Mapping[tuple[Any, ...], WorkSeen]) -> None:
        """Run padding rows once, so that whatever the model makes on first use is made."""
        self.work.make_rooms(known, idle=True)
        self._seat.fill_(len(self._seats.last) - 1)
        self._state.status.fill_(PADDING)
        self._state.slot.fill_(-1)
        self._run()

    def capture(self, pool: Any) -> None:
        """Capture a run as a graph. Rows must have run before: a capture cannot make what is made on first use."""
        for rooms in self.work.rooms:
            self._context.backend.reserve(rooms.parts)
        graph, of_this_run = torch.cuda.CUDAGraph(), self._logits
        within = autocasts_within(self._runner.model)
        with capturing(graph, pool, self._state.token.device), own_copies(within):
            self._run()
        self._captured_logits, self._logits = self._logits, of_this_run
        self._graph = graph

    def drop_capture(self) -> None:
        """Destroy the graph now: an error may keep this object, and a group of devices cannot end before its graphs."""
        graph, self._graph, self._captured_logits = self._graph, None, None
        if graph is not None:
            graph.reset()

    def _idle_spans(self) -> Spans:
        """Each row is a span of its own, as long as the rows are there."""
        nothing = [NO_SLOT] * self.rows
        with torch.inference_mode(False):  # filled for bursts that may run outside of it
            return Spans.of([1] * self.rows, nothing, nothing, self._state.token.device)

    def _run(self) -> None:
        state = self._state
        self._context.calls = 0
        if self._states is not None:
            self._states.calls = 0
        logits = self._runner.rows(state.token, state.position, self._context, self._states)
        if self._pick is None:
            self._logits = logits
            return
        picked = self._pick(logits, self._seat, state.made)
        if self._noting is not None and self._noted is not None:
            self._noting.note(self._noted, logits, picked, state.made)
        assert self._advance is not None
        self._advance(state, picked, self._seats.eos, self._page_size, self._which)


def _with_slack(count: int) -> int:
    return int(_ROOM_TO_GROW * count)
