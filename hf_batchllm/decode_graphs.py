"""Decode steps as CUDA graphs: captured once for so many rows, replayed whatever the rows are and share.

A graph reads what to do from memory of its own: positions, slots, seats and work lists, which a step fills before its
replay. Fewer rows than the graph has leave the rest idle: they own no key, write nothing, and nobody looks at them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from .batch import ModelBatch
from .config import BatchConfig
from .kernel_attention import KernelAttention, KernelBackend, StepWork
from .kernels.work_lists import NoRoom, WorkLists, sent
from .notices import Notices
from .patches.plain import IDLE_HOOKS
from .runner import ModelRunner
from .storage import autocast_dtype

Pick = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # as ahead.Pick

_CAPTURE = "graphs: capture"
_WORTH = 8  # steps still to come: fewer do not pay for a capture
_SPARE = 1.3  # rows: a graph that is there and is no larger than so many times what is needed will do


def bucket_of(rows: int) -> int:
    """The rows of the graph for a step of so many."""
    for upto, size in ((8, 1), (64, 8), (256, 16), (1024, 64)):
        if rows <= upto:
            return -(-rows // size) * size
    return -(-rows // 256) * 256


class GraphWork:
    """The work of whatever step the graph is replayed for; as ``StepWork``, at addresses that stay."""

    has_chunks = False

    def __init__(self, rows: int, entries: int, multiprocessors: int, device: torch.device) -> None:
        self.rows = rows
        self.slots = torch.full((rows,), -1, dtype=torch.long, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._entries = entries
        self._multiprocessors = multiprocessors
        self._device = device
        self._rooms: dict[tuple[Any, ...], WorkLists] = {}
        self._step: StepWork | None = None

    def load(self, step: StepWork) -> None:
        """Take over a step's lists. NoRoom if they do not fit."""
        made = [(room, room.fitted(step.on_host(*key))) for key, room in self._rooms.items()]
        for room, work in made:
            room.packed.copy_(sent(work.packed, self._device))
        self._step = step

    def lists(self, window: int | None, heads: int, kv_heads: int, sinks: bool) -> WorkLists:
        key = window, heads, kv_heads, sinks
        if key not in self._rooms:  # in the run before the capture
            assert self._step is not None
            at_once = self._multiprocessors // kv_heads + 1
            blocks = self.rows * (heads // kv_heads) // 64 + 1
            with torch.inference_mode(False):  # filled for steps that may run outside
                room = WorkLists.room(
                    rows=self.rows,
                    items={16: 2 * self.rows + 6 * at_once, 64: 4 * blocks + self.rows // 2 + 4 * at_once},
                    entries=self._entries,
                    parts=8 * self.rows + 8 * at_once,
                    device=self._device,
                    direct=not sinks,
                )
            room.fill(self._step.on_host(*key))
            self._rooms[key] = room
        return self._rooms[key]


class DecodeGraph:
    def __init__(self, rows: int, runner: ModelRunner, backend: KernelBackend, last: torch.Tensor, pick: Pick) -> None:
        device = last.device
        entries = backend.storage.num_pages + 8 * rows + 64
        self.rows = rows
        self.work = GraphWork(rows, entries, backend.multiprocessors, device)
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self._numbers = torch.zeros(5, rows, dtype=torch.long, device=device)  # positions, slots, seats, lengths, made
        self._context = KernelAttention(self.work, backend)
        self._runner = runner
        self._last = last
        self._pick = pick
        self._graph: torch.cuda.CUDAGraph | None = None

    def load(self, batch: ModelBatch, step: StepWork) -> None:
        """What the next run is about. NoRoom if it does not fit."""
        rows = batch.attention.rows
        self.work.load(step)
        numbers = np.zeros((5, self.rows), dtype=np.int64)
        numbers[0, :rows] = batch.attention.positions
        numbers[1] = -1  # nothing is written
        numbers[1, :rows] = batch.attention.slots.numpy()
        numbers[2] = len(self._last) - 1  # nobody's
        numbers[2, :rows] = batch.tokens.row_seats.numpy()
        numbers[3, :rows] = batch.attention.positions + 1
        numbers[4, :rows] = batch.tokens.made.numpy()
        self._numbers.copy_(sent(torch.from_numpy(numbers), self._numbers.device))

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()

    def capture(self, pool: Any) -> None:
        """After a first run, in which whatever is made on first use is made."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._run()
        self._graph = graph

    @torch.no_grad()
    def _run(self) -> None:
        positions, slots, seats, lengths, made = self._numbers
        self.work.slots.copy_(slots)
        self.work.lengths.copy_(lengths)
        self._context.calls = 0
        logits = self._runner.forward(self._last[seats], positions, self._context)
        picked = self._pick(logits, seats, made)
        self._last[seats] = picked.clamp(min=0)
        self.tokens.copy_(picked)


class DecodeGraphs:
    """The graphs of a call, by their rows."""

    def __init__(self, runner: ModelRunner, backend: KernelBackend, last: torch.Tensor, pick: Pick, notices: Notices):
        self._runner = runner
        self._backend = backend
        self._last = last
        self._pick = pick
        self._notices = notices
        self._graphs: dict[int, DecodeGraph] = {}
        self._pool: Any = None
        self._given_up = notices.was_given(_CAPTURE)  # what could not be captured once cannot be the next time
        self._state: object = None  # of the model, as it was captured
        self.look_again = True  # somebody else has been at work since the last step
        self.seconds = 0.0  # that captures took
        self.captured = 0
        self.steps = 0  # run by graphs

    def run(self, batch: ModelBatch, steps_to_come: int) -> torch.Tensor | None:  # [rows]
        """The next token of each decode row. None if the step is none for a graph: then nothing has been done."""
        rows = batch.attention.rows
        if self._given_up or len(batch.attention.spans) > rows or not self._backend.does_all:
            return None
        if self.look_again:  # the owner may do anything to the model between two results
            state, self.look_again = owners_state(self._runner.model, self._last.device), False
            if state != self._state:
                self.forget()
                self._state = state
        if not self._graphs and (reason := not_in_graphs(self._runner.model)) is not None:
            self._give_up(reason)
            return None
        graph = self._fitting(rows)
        fresh = graph is None
        if graph is None:
            if steps_to_come < _WORTH:
                return None
            with torch.inference_mode(False):  # a later step may run outside
                graph = DecodeGraph(bucket_of(rows), self._runner, self._backend, self._last, self._pick)
        try:
            graph.load(batch, self._backend.work_of(batch.attention))
            graph.run()
        except NoRoom as error:  # an odd step. What of it has been run may be run again
            self._notices("room", f"some decode steps run without CUDA graphs, which is slower: {error}")
            return None
        if fresh:
            self._capture(graph)
        self.steps += 1
        return graph.tokens[:rows]

    def _fitting(self, rows: int) -> DecodeGraph | None:
        sizes = [size for size in self._graphs if rows <= size <= max(bucket_of(rows), _SPARE * rows)]
        return self._graphs[min(sizes)] if sizes else None

    def _capture(self, graph: DecodeGraph) -> None:
        began = time.perf_counter()
        device = self._last.device
        stream, generator = torch.cuda.current_stream(device), torch.cuda.default_generators[device.index or 0]
        noise = generator.get_state()
        try:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph.capture(self._pool)
        except Exception as error:  # whatever a model does that a graph cannot hold
            # A capture that breaks off leaves both as they are while it goes on.
            torch.cuda.set_stream(stream)
            fresh = torch.Generator(device)
            fresh.set_state(noise)
            generator.graphsafe_set_state(fresh)
            if isinstance(error, torch.OutOfMemoryError):
                self._give_up("too little memory is left to capture them: set a smaller `kv_memory`")
            else:
                said = str(error).strip().splitlines()
                reason = f"this model cannot be captured ({type(error).__name__}: {said[0] if said else ''})"
                self._give_up(reason, _CAPTURE)
        else:
            self._graphs[graph.rows] = graph
            self.captured += 1
        self.seconds += time.perf_counter() - began

    def _give_up(self, reason: str, kind: str = "graphs") -> None:
        self._given_up = True
        self._notices(kind, f"decode steps run without CUDA graphs, which is slower: {reason}")

    def forget(self) -> None:
        """Let the graphs go, once what was launched has ended."""
        if self._graphs and self._last.device.type == "cuda":
            torch.cuda.current_stream(self._last.device).synchronize()
        self._graphs.clear()

    def close(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None and self._graphs:
            stream.synchronize()
        self._graphs.clear()


def not_in_graphs(model: nn.Module) -> str | None:
    """What of ``model`` runs in Python for its effects, which a replay would skip."""
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "the hooks on all modules would not be called"
    for name, module in model.named_modules():
        where = f"`{name}`" if name else "the model"
        if has_hooks(module):
            return f"the hooks on {where} would not be called"
        if "forward" in module.__dict__:
            return f"{where} has a `forward` of its own, which would not be called"
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether anybody watches it. transformers leaves idle hooks behind, which do nothing."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", "") != IDLE_HOOKS for hook in hooks)


def owners_state(model: nn.Module, device: torch.device) -> object:
    """Changes with whatever an owner may do to a model that graphs have been captured of: see ``not_in_graphs``.

    It is asked for often, so it looks where modules keep things, past their ``__getattr__``.
    """
    state: list[object] = [autocast_dtype(device)]
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        held = module.__dict__
        state += [held["training"], id(held.get("forward")), len(held["_forward_hooks"])]
        state.append(len(held["_forward_pre_hooks"]))
        for tensors in (held["_parameters"], held["_buffers"]):
            state += [tensor.data_ptr() for tensor in tensors.values() if tensor is not None]
        # PEFT's layers; transformers' models have a method of that name.
        if isinstance(getattr(type(module), "disable_adapters", None), property) or "disable_adapters" in held:
            state += [str(getattr(module, name, None)) for name in ("active_adapters", "disable_adapters")]
        waiting.extend(held["_modules"].values())
    return state


def graphs_for(
    config: BatchConfig, runner: ModelRunner, last: torch.Tensor, pick: Pick, notices: Notices
) -> DecodeGraphs | None:
    """None where there are no graphs to be had."""
    backend = runner.backend
    if not config.cuda_graphs or last.device.type != "cuda" or not isinstance(backend, KernelBackend):
        return None
    return DecodeGraphs(runner, backend, last, pick, notices)
