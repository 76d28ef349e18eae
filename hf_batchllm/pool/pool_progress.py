"""The bar over a call of a pool: how much of its cost is behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..engine.progress import call_bar
from .pool_call import PoolCall


@contextmanager
def pool_bar(
    results: int, noun: str, prompt_tokens: int, saving: float, workers: int, wanted: bool | None
) -> Iterator[Callable[[PoolCall, int], None]]:
    """The function that comes is told of the call now and then, and of the number of results that there are."""
    shown = 0.0
    with call_bar(results, f"{noun} on {workers} processes", saving, wanted) as bar:

        def update(call: PoolCall, finished: int) -> None:
            nonlocal shown
            now = time.perf_counter()
            if bar.disable or (now - shown < bar.mininterval and finished < results):
                return
            shown = now
            read, written = call.tokens
            read = min(read, prompt_tokens)
            passed, share = call.seconds, min(1.0, call.share_done)
            rate = (read + written) / max(passed, 1e-9)
            said = f"read {read:,} / {prompt_tokens:,} · written {written:,} · {rate:,.0f} tok/s"
            bar.draw(finished, share, passed, passed * (1 - share) / share if share else None, said)

        yield update
