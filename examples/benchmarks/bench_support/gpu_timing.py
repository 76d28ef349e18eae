"""Timing on a GPU: a function's time in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

Inputs = TypeVar("Inputs")


def graph_ms(function: Callable[[], object], replays: int, stream: torch.cuda.Stream | None = None) -> float:
    """The median milliseconds of a replay of a CUDA graph of ``function``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    for _ in range(3):
        graph.replay()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in pairs:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([begin.elapsed_time(end) for begin, end in pairs]))


def graph_ms_of_each(sets: Sequence[Inputs], function: Callable[[Inputs], object], replays: int) -> float:
    """Milliseconds for one set of inputs, from a graph that goes over several sets, so that none stays in a cache."""

    def over_all() -> None:
        for inputs in sets:
            function(inputs)

    over_all()  # kernels are compiled
    torch.cuda.synchronize()
    return graph_ms(over_all, replays) / len(sets)


def warm_branches() -> None:
    """Replay a tiny graph of two branches.

    The first such graph of a process may run its branches one after the other, in every replay until another graph
    has been launched (seen with CUDA 13.0, where much memory had been allocated before).
    """
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    one, other = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=main):
        side.wait_stream(main)
        one.add_(1)
        with torch.cuda.stream(side):
            other.add_(1)
        main.wait_stream(side)
    graph.replay()
    torch.cuda.synchronize()


def need_gpu() -> None:
    """Ends the script with a message if there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA GPU, and there is none here")
