"""Decode rows whose state the device keeps: they run several times in a row, and the host sends nothing in between.

Everything lies at fixed addresses, so that a CUDA graph of one run serves all of them: what the rows are, share and
read is filled in before a burst. Fewer rows than there is room for leave the rest idle: those own no key, write
nothing, and nobody looks at them. So does a row that has ended.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...kernels.sample_torch import PADDING, RUNNING, STOPPED, Rows
from ...kernels.work_lists import NoRoom, WorkLists, sent
from ...model.batch import ModelBatch
from ...model.runner import ModelRunner
from ...model.triton_attention import KernelAttention, Met, StepWork, TritonBackend

Pick = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # as ahead.Pick
Advance = Callable[[Rows, torch.Tensor, torch.Tensor, int, torch.Tensor | None], None]  # as sample_triton.advance

_PAD = -2  # pads sets of tokens: -1 stands where none was picked
_SPARE = 1.3  # lists have room for so many times what they were first made for


@dataclass(frozen=True)
class Seats:
    """What the device keeps of each request; nobody's seat is the last."""

    last: torch.Tensor  # [seats] int64  its last token
    ended: torch.Tensor  # [seats] bool  whether that was one that ends the answer
    eos: torch.Tensor  # [any] int64  those that do; where requests differ several sets of them, padded: [sets, any]
    which: torch.Tensor | None = None  # [seats] int32  which set is each request's, where they differ

    @classmethod
    def of(cls, stop_tokens: Sequence[frozenset[int]], device: torch.device) -> Seats:
        """``stop_tokens``: of each request those that end it."""
        sets = {tokens: number for number, tokens in enumerate(dict.fromkeys(stop_tokens))} or {frozenset(): 0}
        most = max(map(len, sets))
        eos = [[*sorted(tokens), *[_PAD] * (most - len(tokens))] for tokens in sets]
        which = [*(sets[tokens] for tokens in stop_tokens), 0]
        with torch.inference_mode(False):  # written in steps that may run outside
            return cls(
                torch.zeros(len(which), dtype=torch.long, device=device),
                torch.zeros(len(which), dtype=torch.bool, device=device),
                torch.tensor(eos if len(sets) > 1 else eos[0], dtype=torch.long).to(device),
                torch.tensor(which, dtype=torch.int32).to(device) if len(sets) > 1 else None,
            )

    @property
    def any_end(self) -> bool:
        return self.eos.numel() > 0

    def take(self, seats: torch.Tensor, picked: torch.Tensor) -> None:
        """The tokens that a step has picked."""
        self.last[seats] = picked.clamp(min=0)  # -1 is no token, and the next step may be on its way
        if self.any_end:
            eos = self.eos if self.which is None else self.eos[self.which[seats]]
            self.ended[seats] = (picked[:, None] == eos).any(dim=1)


class RowsWork:
    """The work of whatever the rows are; as ``StepWork``, at addresses that stay. The kernels can do all layers.

    ``met``: what work has come up so far in the call, by a layer's key. A kernel without work still takes 2 to 4 us,
    so none is launched for work that has not come up. When it does come up there is no room for it (NoRoom), and the
    rows are made anew: with room, and with the kernel.
    """

    has_chunks = False

    def __init__(
        self, state: Rows, entries: int, multiprocessors: int, device: torch.device, met: dict[tuple[Any, ...], Met]
    ) -> None:
        self._met = met
        self.rows = len(state.token)
        self.slots = state.slot
        self.lengths = state.length
        self._entries = entries
        self._multiprocessors = multiprocessors
        self._device = device
        self._rooms: dict[tuple[Any, ...], WorkLists] = {}
        self._step: StepWork | None = None

    @property
    def rooms(self) -> list[WorkLists]:
        return list(self._rooms.values())

    def load(self, step: StepWork) -> None:
        """Take over a step's lists. NoRoom if they do not fit."""
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

    def _note(self, key: tuple[Any, ...], work: WorkLists) -> Met:
        return self._met.setdefault(key, Met()).note(work.items, self._merges(work))

    def _merges(self, work: WorkLists) -> bool:
        return work.merges or work.rows < self.rows  # what idle rows give is written by the merge: zeros

    def lists(self, *key: Any) -> WorkLists:  # window, heads, kv_heads, sinks
        if key not in self._rooms:  # in the run before the capture
            assert self._step is not None
            work = self._step.on_host(*key)
            room = self._rooms[key] = self._room(key, self._note(key, work), work)
            room.packed.copy_(sent(room.fitted(work).packed, self._device))
        return self._rooms[key]

    def make_rooms(self, known: Mapping[tuple[Any, ...], Met], idle: bool) -> None:
        """Room for the ``known`` kinds of work, none of which has come yet. ``idle``: some rows will be."""
        for key, met in known.items():
            self._rooms[key] = self._room(key, Met(set(met.tiles), met.merges or idle))

    def _room(self, key: tuple[Any, ...], met: Met, work: WorkLists | None = None) -> WorkLists:
        _, heads, kv_heads, sinks = key
        at_once = self._multiprocessors // kv_heads + 1
        blocks = self.rows * (heads // kv_heads) // 64 + 1
        items = {16: 2 * self.rows + 6 * at_once, 64: 4 * blocks + self.rows // 2 + 4 * at_once}
        wanted = {tile: 0 if work is None else _more(len(work.items.get(tile, ()))) for tile in sorted(met.tiles)}
        with torch.inference_mode(False):  # filled for bursts that may run outside
            room = WorkLists.room(
                rows=self.rows,
                items={tile: max(items[tile], size) for tile, size in wanted.items()},
                entries=max(self._entries, 0 if work is None else _more(len(work.entries))),
                parts=max(8 * self.rows + 8 * at_once, 0 if work is None else _more(work.parts)),
                device=self._device,
                direct=not sinks,
            )
        room.merges = met.merges
        return room


class DecodeRows:
    """``most_times``: how often the rows may run in a row."""

    def __init__(
        self, rows: int, most_times: int, runner: ModelRunner, backend: TritonBackend, seats: Seats, pick: Pick,
        advance: Advance, met: dict[tuple[Any, ...], Met],
    ) -> None:  # fmt: skip
        self.rows = rows
        self._seats = seats
        self._runner = runner
        self._pick = pick
        self._advance = advance
        self._page_size = backend.storage.page_size
        self._graph: torch.cuda.CUDAGraph | None = None
        device = seats.last.device
        few = (most_times - 1) // self._page_size + 2

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        with torch.inference_mode(False):  # a later burst may run outside
            self._state = Rows(
                token=zeros(rows, dtype=torch.long),
                position=zeros(rows, dtype=torch.long),
                length=zeros(rows),
                slot=zeros(rows, dtype=torch.long),
                made=zeros(rows),
                remaining=zeros(rows),
                status=zeros(rows),
                start=zeros(rows),
                pages=zeros(rows, few),
                produced=zeros(rows, most_times, dtype=torch.long),
            )
            self._seat = zeros(rows, dtype=torch.long)
            self._which = None if seats.which is None else zeros(rows)  # set of tokens that end a row
        entries = backend.storage.num_pages + 8 * rows + 64
        self.work = RowsWork(self._state, entries, backend.multiprocessors, device, met)
        self._context = KernelAttention(self.work, backend)

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def load(self, batch: ModelBatch, step: StepWork) -> None:
        """What the next burst is about. NoRoom if it does not fit."""
        burst, state = batch.burst, self._state
        assert burst is not None
        self.work.load(step)
        rows, tokens, positions = batch.attention.rows, batch.tokens, batch.attention.positions
        nobody = len(self._seats.last) - 1
        given = [  # where it goes, what it is, and what it is of rows that there are not
            (self._seat, tokens.row_seats.numpy(), nobody),
            (state.position, positions, 0),
            (state.slot, batch.attention.slots.numpy(), -1),
            (state.length, positions + 1, 0),
            (state.made, tokens.made.numpy(), 0),
            (state.remaining, burst.left, 0),
            (state.status, RUNNING, PADDING),
            (state.start, burst.start, 0),
            *((column, pages, -1) for column, pages in zip(state.pages.T, burst.pages.T, strict=True)),
        ]
        numbers = np.empty((len(given), self.rows), dtype=np.int64)  # they travel in one copy
        for line, (_, values, none) in zip(numbers, given, strict=True):
            line[:rows], line[rows:] = values, none
        for values, (place, *_) in zip(sent(torch.from_numpy(numbers), state.token.device), given, strict=True):
            place.copy_(values)
        state.token.copy_(self._seats.last[self._seat])
        if self._which is not None:
            self._which.copy_(self._seats.which[self._seat])
        if self._seats.any_end:
            ended = self._seats.ended[self._seat]
            state.status.masked_fill_(ended, STOPPED)
            state.slot.masked_fill_(ended, -1)
            state.length.masked_fill_(ended, 0)
        state.produced.fill_(-1)

    def run(self) -> None:
        """Each row's next token."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()

    def settle(self) -> torch.Tensor:  # [rows, most_times]
        """The burst is over: what the rows have produced, a row's token i at i modulo ``most_times``; -1 for none."""
        state, seats = self._state, self._seats
        seats.last[self._seat] = state.token
        if seats.any_end:
            seats.ended[self._seat] = state.status == STOPPED
        return state.produced

    def run_idle(self, known: Mapping[tuple[Any, ...], Met]) -> None:
        """Once, for the sake of what is made on first use."""
        self.work.make_rooms(known, idle=True)
        self._seat.fill_(len(self._seats.last) - 1)
        self._state.status.fill_(PADDING)
        self._state.slot.fill_(-1)
        self._run()

    def capture(self, pool: Any) -> None:
        """After a run, of these rows or others, in which whatever is made on first use is made."""
        for rooms in self.work.rooms:
            self._context.backend.reserve(rooms.parts)
        graph = torch.cuda.CUDAGraph()
        with _capturing(graph, pool, self._state.token.device), own_copies():
            self._run()
        self._graph = graph

    def _run(self) -> None:
        state = self._state
        self._context.calls = 0
        logits = self._runner.rows(state.token, state.position, self._context)
        picked = self._pick(logits, self._seat, state.made)
        self._advance(state, picked, self._seats.eos, self._page_size, self._which)


@contextmanager
def own_copies() -> Iterator[None]:
    """What runs under autocast makes its own copies of weights.

    Usually they are made on first use and kept until the block ends, or one of any other thread does. A graph would go
    on reading them, and whoever comes after a capture would find copies that nobody has filled.
    """
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """As `torch.cuda.graph`, but the host does not wait for the device, which goes on with what it was given.

    No garbage is collected meanwhile: events and graphs among it must not be taken apart during a capture.
    """
    collects = gc.isenabled()
    try:
        gc.disable()
        with torch.cuda.stream(_capture_stream(device)):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(Exception):  # it has to end all the same, and what went wrong was something else
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps memory for each stream that it has worked on."""
    return torch.cuda.Stream(device)


def _more(count: int) -> int:
    return int(_SPARE * count)
