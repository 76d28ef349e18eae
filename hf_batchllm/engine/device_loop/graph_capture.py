"""How a CUDA graph is captured here: the host does not wait, and the graph owns the copies of weights that it reads."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def own_copies(within: Sequence[torch.autocast]) -> Iterator[None]:
    """Under autocast, make copies of weights anew instead of sharing the cached ones.

    ``within``: autocasts that the model's forward enters by itself.

    Autocast usually makes a copy on first use and keeps it until its block ends, or the block of any other thread. A
    graph would go on reading such copies afterwards. And copies first made in a capture stay empty until a replay, so
    code that runs after the capture would find them empty.
    """
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    kept_within = [each._cache_enabled for each in within]
    for each in within:
        each._cache_enabled = False
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)
        for each, cached in zip(within, kept_within, strict=True):
            each._cache_enabled = cached


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Captures like `torch.cuda.graph`, but the host does not wait for the device, which goes on with earlier work.

    No garbage is collected meanwhile: a capture fails when events or graphs are destroyed during it.
    """
    collects = gc.isenabled()
    try:
        gc.disable()
        with torch.cuda.stream(_capture_stream(device)):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(Exception):  # the capture must end all the same; the first error is the one to report
                    graph.capture_end()
                    graph.reset()  # the error keeps it
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps memory for each stream that it has worked on."""
    return torch.cuda.Stream(device)
