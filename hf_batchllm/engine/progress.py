"""The progress bar. It moves with every step, not only when a sequence finishes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm.auto import tqdm
from transformers.utils import logging

from ..planning.requests_and_prefixes import Request
from ..planning.step import Step
from ..results.notebook import in_notebook

_LONG = 32  # sequences: from here on a bar is shown unasked
_FORMAT = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}{postfix}]"


class Progress:
    """Counts tokens: prompt tokens to compute, and new tokens. Shows sequences, speed and saving."""

    def __init__(self, bar: tqdm, sequences: int, kind: str, prompt_tokens: int, saving: float) -> None:
        self._bar = bar
        self._sequences = sequences
        self._kind = kind
        self._count = f"{sequences:,} {kind}"
        self._prompt_tokens = prompt_tokens  # still to be computed
        self._saved = f", {saving:.0%} saved" if saving >= 0.005 else ""
        self._finished = self._new_tokens = 0

    def step(self, step: Step, new_tokens: int) -> None:
        """A step was collected. ``new_tokens``: the tokens of answers that it brought."""
        # Tokens computed again after a preemption are no progress.
        prompt_tokens = min(step.tokens - len(step.rows), self._prompt_tokens)
        self._prompt_tokens -= prompt_tokens
        self._new_tokens += new_tokens
        self._show()
        self._bar.update(prompt_tokens + new_tokens)

    def finish(self, request: Request, results: int = 1) -> None:
        self._finished += results
        self._bar.total -= request.max_new_tokens - request.made  # it ended before its limit
        if self._finished == self._sequences:
            self._bar.total = self._bar.n  # when time is over, some prompts were never computed
        if (widget := getattr(self._bar, "container", None)) is not None:
            widget.children[1].max = self._bar.total  # the widget keeps its own total
        self._show()

    def _show(self) -> None:
        if self._bar.disable:
            return
        self._bar.set_description_str(f"{self._finished:,}/{self._count}", refresh=False)
        elapsed = self._bar.format_dict["elapsed"]
        done, unit = (self._finished, "scores") if self._kind == "scores" else (self._new_tokens, "tokens")
        rate = done / elapsed if elapsed else 0.0
        self._bar.set_postfix_str(f"{rate:,.0f} {unit}/s{self._saved}", refresh=False)


@contextmanager
def progress_bar(
    requests: Sequence[Request],
    prompt_tokens: int,
    saving: float,
    wanted: bool | None,
    scores: int | None = None,
) -> Iterator[Progress]:
    """A bar over a call.

    prompt_tokens: to be computed. wanted: None shows a bar for long lists, if transformers' bars are on.
    scores: how many scores are read from the requests, in a call of ``score``.
    """
    results = len(requests) if scores is None else scores
    show = results >= _LONG and logging.is_progress_bar_enabled() if wanted is None else wanted
    kind = "samples" if any(request.sample for request in requests) else "prompts" if scores is None else "scores"
    total = prompt_tokens + sum(request.max_new_tokens for request in requests)
    file = sys.stdout if in_notebook() else None  # a notebook shows stderr in red
    desc = f"0/{results:,} {kind}"
    # Steps differ widely in tokens, so the bar may be redrawn after each of them.
    with tqdm(total=total, disable=not show, bar_format=_FORMAT, miniters=1, desc=desc, file=file) as bar:
        yield Progress(bar, results, kind, prompt_tokens, saving)
        bar.refresh()
