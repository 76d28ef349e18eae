"""How the benches measure: a function's time in a CUDA graph, and what this GPU reaches at best."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def graph_ms(function: Callable[[], object], replays: int, stream: torch.cuda.Stream | None = None) -> float:
    """The median time of a replay of a graph of ``function``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    for _ in range(3):
        graph.replay()
    times = _events(replays, graph.replay)
    return float(np.median(times))


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


def copy_bandwidth() -> float:
    """Bytes read and written each second by a large copy."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    times = _events(15, lambda: target.copy_(source))  # not in a graph: there a copy goes another, slower way
    return 2 * source.nbytes / float(np.median(times)) * 1e3


def matmul_rate(seconds: float = 1.0) -> float:
    """Operations each second of large bf16 products, once they have run for as long: then power sets the clock."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    once = float(np.median(_events(10, lambda: torch.mm(a, b, out=out))))
    count = int(seconds * 1e3 / once)
    times = _events(2 * count, lambda: torch.mm(a, b, out=out))[count:]
    return 2 * 8192**3 / float(np.mean(times)) * 1e3


def _events(count: int, function: Callable[[], object]) -> list[float]:
    """Milliseconds of each of so many calls, one queued behind the other."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in pairs:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def need_gpu() -> None:
    """End at once where there is none, in words."""
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA GPU, and there is none here")
