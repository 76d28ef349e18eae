"""The progress bar: it moves with every step, not only when something has finished."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm.auto import tqdm
from transformers.utils import logging

from ..planning.step import Step
from ..planning.units import Request
from ..results.notebook import in_notebook

_LONG = 32  # sequences from which on a bar is shown unasked
_FORMAT = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}{postfix}]"


class Progress:
    """Counts in tokens: those of prompts that are to be computed, and new ones. Shows sequences, speed and saving."""

    def __init__(self, bar: tqdm, sequences: int, kind: str, prompt_tokens: int, saving: float) -> None:
        self._bar = bar
        self._sequences = sequences
        self._kind = kind
        self._count = f"{sequences:,} {kind}"
        self._prompt_tokens = prompt_tokens  # still to be computed
        self._saved = f", {saving:.0%} saved" if saving >= 0.005 else ""
        self._finished = self._new_tokens = 0

    def step(self, step: Step, new_tokens: int) -> None:
        """A step has been run, which brought so many tokens of answers."""
        # What is computed again after a preemption is no progress.
        prompt_tokens = min(step.tokens - len(step.rows), self._prompt_tokens)
        self._prompt_tokens -= prompt_tokens
        self._new_tokens += new_tokens
        self._show()
        self._bar.update(prompt_tokens + new_tokens)

    def finish(self, request: Request, results: int = 1) -> None:
        self._finished += results
        self._bar.total -= request.max_new_tokens - request.made  # it ended sooner than it might have
        if self._finished == self._sequences:
            self._bar.total = self._bar.n  # out of time, not all prompts have been computed
        if (widget := getattr(self._bar, "container", None)) is not None:
            widget.children[1].max = self._bar.total  # its own idea of it
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
    """``prompt_tokens`` are to be computed; ``wanted`` None: for long lists, where transformers shows bars, too.

    ``scores``: how many are read from the requests, where those are no answers.
    """
    results = len(requests) if scores is None else scores
    show = results >= _LONG and logging.is_progress_bar_enabled() if wanted is None else wanted
    kind = "samples" if any(request.sample for request in requests) else "prompts" if scores is None else "scores"
    total = prompt_tokens + sum(request.max_new_tokens for request in requests)
    file = sys.stdout if in_notebook() else None  # a notebook shows stderr in red
    desc = f"0/{results:,} {kind}"
    # Steps differ so much in their tokens that each of them is a chance to draw the bar anew.
    with tqdm(total=total, disable=not show, bar_format=_FORMAT, miniters=1, desc=desc, file=file) as bar:
        yield Progress(bar, results, kind, prompt_tokens, saving)
        bar.refresh()
