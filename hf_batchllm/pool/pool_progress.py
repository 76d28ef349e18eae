"""The bar over a call of a pool: how much of its cost is behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from tqdm import tqdm

from ..engine.progress import WholeRun, run_of_calls
from ..inputs.preparing import bars_shown, open_bar

_LONG = 32  # results: from here on a bar is shown unasked
_FORMAT = "{percentage:3.0f}%|{bar}| {desc}"


class CallSoFar(Protocol):
    @property
    def seconds(self) -> float:
        """Since it began."""

    @property
    def tokens(self) -> tuple[int, int]:
        """Of prompts and of answers, that have been run."""

    @property
    def share_done(self) -> float: ...


@contextmanager
def pool_bar(
    results: int, noun: str, prompt_tokens: int, saving: float, workers: int, wanted: bool | None
) -> Iterator[Callable[[CallSoFar, int], None]]:
    """The function that comes is told of the call now and then, and of the number of results that there are."""
    whole = run_of_calls()
    if whole is not None:
        yield _Shown(whole.bar, results, prompt_tokens, saving, whole).update
        return
    shown = bars_shown(wanted, results >= _LONG)
    what = f"{results:,} {noun} on {workers} processes"
    with open_bar(shown, total=1.0, bar_format=_FORMAT, desc=what) as bar:
        yield _Shown(bar, results, prompt_tokens, saving).update
        bar.refresh()


class _Shown:
    def __init__(
        self, bar: tqdm, results: int, prompt_tokens: int, saving: float, whole: WholeRun | None = None
    ) -> None:
        self._bar = bar
        self._whole = whole
        self._results = results
        self._prompt_tokens = prompt_tokens
        self._saved = f" · {saving:.0%} saved" if saving >= 0.005 else ""
        self._shown = 0.0

    def update(self, call: CallSoFar, finished: int) -> None:
        now = time.perf_counter()
        if self._bar.disable or (now - self._shown < self._bar.mininterval and finished < self._results):
            return
        self._shown = now
        read, written = call.tokens
        read = min(read, self._prompt_tokens)
        passed, share = call.seconds, min(1.0, call.share_done)
        left = passed * (1 - share) / share if share else 0.0
        rate = (read + written) / max(passed, 1e-9)
        done = f"{finished:,} / {self._results:,} done"
        if (whole := self._whole) is not None:
            if share:
                share, left = whole.place(share, left)
            passed = whole.clock() - whole.began
            done = f"{whole.done:,} / {whole.records:,} done"
        clock = f"[{tqdm.format_interval(passed)}<{tqdm.format_interval(left) if share else '?'}]"
        said = f"read {read:,} / {self._prompt_tokens:,} · written {written:,} · {rate:,.0f} tok/s"
        self._bar.set_description_str(f"{clock} {said} · {done}{self._saved}", refresh=False)
        self._bar.n = max(self._bar.n, min(share, 1.0))
        self._bar.refresh()
