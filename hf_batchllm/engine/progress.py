"""The progress bar: how much of a call's time has passed, which is not how many of its tokens are done.

It moves with every step, not only when a sequence finishes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

from ..inputs.preparing import bars_shown, open_bar
from ..planning.requests_and_prefixes import Branch, Request
from ..planning.step import Step
from .cost import StepCosts

LONG = 32  # sequences: from here on a bar is shown unasked
_FORMAT = "{percentage:3.0f}%|{bar}| {desc}"
_RECENT = 1.0  # seconds that tell whether prompts are being read, or answers written
_RATES_OVER = 5.0  # seconds
_LEAST_STEP = 1e-9  # seconds


class WholeRun:
    """A run of several calls over one list of records, a file's: its bar, and what it has learnt of their steps.

    before: records with a result of an earlier run. done: with a result now; whoever writes results counts them here.
    """

    def __init__(self, bar: tqdm, records: int, before: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.bar = bar
        self.records = records
        self.before = self.done = before
        self.costs: StepCosts | None = None
        self.clock = clock
        self.began = clock()
        self._of_call = 0
        self._done_before_call = before

    def call_begins(self, records: int) -> None:
        """A call runs so many of them."""
        self._of_call, self._done_before_call = records, self.done

    def place(self, share: float, left: float) -> tuple[float, float]:
        """From the share of a call that is done and the seconds that it has left to those of the whole run."""
        until = self._done_before_call + self._of_call
        run, passed = until - self.before, self.clock() - self.began
        left += (self.records - until) * (passed + left) / max(run, 1)
        return (self._done_before_call + share * self._of_call) / max(self.records, 1), left


_whole_run: ContextVar[WholeRun | None] = ContextVar("_whole_run", default=None)


@contextmanager
def whole_run(records: int, before: int, shown: bool) -> Iterator[WholeRun]:
    """One bar for all calls in the block, instead of a bar for each. They are of one run, which knows of more."""
    begin = f"{before:,} of {records:,} done before" if before else f"{records:,} lines"
    with open_bar(shown, total=1.0, initial=before / max(records, 1), bar_format=_FORMAT, desc=begin) as bar:
        whole = WholeRun(bar, records, before)
        token = _whole_run.set(whole)
        try:
            yield whole
            if whole.done >= records:
                bar.n = bar.total
                was = f" ({before:,} before)" if before else ""
                passed = tqdm.format_interval(whole.clock() - whole.began)
                bar.set_description_str(f"[{passed}<00:00] {whole.done:,} / {records:,} done{was}")
        finally:
            _whole_run.reset(token)


class CallBar:
    """The bar over a call: one of its own, or that of the run which the call is a part of."""

    def __init__(self, bar: tqdm, results: int, saving: float, whole: WholeRun | None = None) -> None:
        self._bar = bar
        self._results = results
        self._saved = f" · {saving:.0%} saved" if saving >= 0.005 else ""
        self.whole = whole
        self.disable = bar.disable
        self.mininterval: float = getattr(bar, "mininterval", 0.0)  # a bar that is not shown has none

    def draw(self, finished: int, share: float, passed: float, left: float | None, said: str) -> None:
        """share: of the call that is done. passed, left: seconds of the call; None where nothing is known yet."""
        whole, done = self.whole, f"{finished:,} / {self._results:,} done"
        if whole is not None:
            if left is not None:
                share, left = whole.place(share, left)
            passed = whole.clock() - whole.began
            done = f"{whole.done:,} / {whole.records:,} done{f' ({whole.before:,} before)' if whole.before else ''}"
        clock = f"[{tqdm.format_interval(passed)}<{'?' if left is None else tqdm.format_interval(left)}]"
        self._bar.set_description_str(f"{clock} {said} · {done}{self._saved}", refresh=False)
        self._bar.n = max(self._bar.n, min(share, 1.0))  # it does not go back where an estimate rises
        self._bar.refresh()


@contextmanager
def call_bar(results: int, things: str, saving: float, wanted: bool | None) -> Iterator[CallBar]:
    """``wanted``: None shows a bar for long lists, if transformers' bars are on. ``things``: what results are of."""
    whole = _whole_run.get()
    if whole is not None:
        yield CallBar(whole.bar, results, saving, whole)
        return
    # Steps differ widely in time, so the bar may be redrawn after each of them.
    shown = bars_shown(wanted, results >= LONG)
    with open_bar(shown, total=1.0, bar_format=_FORMAT, desc=f"{results:,} {things}") as bar:
        yield CallBar(bar, results, saving)
        bar.refresh()


class Progress:
    """Expects how long the rest of a call takes, and says what it is at: reading prompts, or writing answers.

    prompt_tokens: to be computed. rows: sequences that memory has room for at the same time.
    """

    def __init__(
        self,
        bar: CallBar,
        requests: Sequence[Request],
        prompt_tokens: int,
        costs: StepCosts,
        *,
        rows: float = 1.0,
        scores: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._bar = bar
        self._costs = costs
        self._scores = scores
        if bar.disable:  # nothing is counted
            requests = ()
        self._clock = clock
        self._began = self._latest = self._shown_at = clock()
        # Prompts are read, and answers written, as far as these.
        self._all_prompt_tokens = prompt_tokens
        self._read = self._written = 0
        self._unwritten = sum(request.max_new_tokens for request in requests)  # at most, of answers that go on
        self._limit = max((request.max_new_tokens for request in requests), default=1)
        self._can_stop = any(request.can_stop for request in requests)
        self._finished = self._stopped = 0  # results; answers that ended before their limit
        self._waiting = len(requests)  # sequences that have no token yet
        self._unfinished = len(requests)
        self._running: dict[Request, None] = {}
        # The answers of each prompt of a beam search that has not begun.
        self._beams_of = Counter(request.index for request in requests)
        # What steps are like.
        self._rows = max(rows, 1.0)
        self._steps_with_prompts = self._run_of_prompts = 0
        # Of the latest time, older steps counting less.
        self._reading = 1.0  # the share of it that prompts took
        self._is_reading = True
        self._spent = self._tokens = 0.0  # seconds of the present phase, and its tokens

    # -- what happens --------------------------------------------------------------------------------------------

    def step(self, step: Step, new_tokens: int) -> None:
        """A step was collected. ``new_tokens``: the tokens of answers that it brought."""
        if self._bar.disable:
            return
        now = self._clock()
        seconds, self._latest = max(now - self._latest, _LEAST_STEP), now
        run = 0 if step.is_drafted else step.tokens - len(step.rows)
        begun = [] if step.is_drafted else step.sampling()[len(step.rows) :]
        for request in begun:
            if isinstance(request, Branch):
                self._waiting -= self._beams_of.pop(request.index, 0)
            elif request not in self._running:
                self._waiting -= 1
                if not request.done:
                    self._running[request] = None
        # The first token of an answer comes with its prompt.
        rows = max(new_tokens - len(begun), 0)
        of_prompts = self._costs.learn(step.times, run, rows, seconds)
        if run:
            self._steps_with_prompts += 1
            self._run_of_prompts += run
        elif self._waiting > 0:  # memory has room for no more than these
            self._rows += 0.2 * (len(step.rows) - self._rows)
        # Tokens computed again after a preemption are no progress.
        read = min(run, self._all_prompt_tokens - self._read)
        self._read += read
        self._written += new_tokens
        self._unwritten -= new_tokens
        self._note_phase(seconds, of_prompts if rows else 1.0, read, new_tokens)
        if now - self._shown_at >= self._bar.mininterval:
            self._show(now)

    def finish(self, request: Request, results: int = 1) -> None:
        if self._bar.disable:
            return
        self._finished += results
        self._unfinished -= 1
        self._waiting = min(self._waiting, self._unfinished)  # when time is over, some were never begun
        self._running.pop(request, None)
        self._unwritten -= request.max_new_tokens - request.made  # it ended before its limit
        self._stopped += request.made < request.max_new_tokens
        if self._unfinished == 0:
            self._show(self._clock())

    def _note_phase(self, seconds: float, of_prompts: float, read: int, written: int) -> None:
        """Whether the latest time went into prompts or answers, and how fast that went. of_prompts: of the seconds."""
        self._reading += (of_prompts - self._reading) * min(1.0, seconds / _RECENT)
        reading = self._reading >= 0.5 and self._read < self._all_prompt_tokens
        if reading != self._is_reading:
            self._is_reading, self._spent, self._tokens = reading, 0.0, 0.0
        keep = max(0.0, 1 - seconds / _RATES_OVER)
        self._spent = keep * self._spent + seconds
        self._tokens = keep * self._tokens + (read if reading else written)

    # -- what is expected ----------------------------------------------------------------------------------------

    def seconds_left(self) -> float:
        """What the rest of the call is expected to take."""
        unread = self._all_prompt_tokens - self._read
        # Where answers may end early, as often as they have so far; one that goes to the limit is supposed to have.
        chance = (self._stopped + 1) / (self._written + self._limit) if self._can_stop else 0.0
        unfinished = max(self._unfinished, 1)
        limit = max(self._unwritten / unfinished, 0.0)
        of_running = (request.max_new_tokens - request.made for request in self._running)
        longest = max(limit, self._limit if self._waiting > 0 else max(of_running, default=0))
        answers = unfinished * expected_tokens(limit, chance)
        longest = max(longest_of(unfinished, longest, chance), expected_tokens(limit, chance))
        if self._waiting > 0:  # first tokens come with the prompts
            answers, longest = max(answers - self._waiting, 0.0), longest - 1
        # Prompts first and then the longest answer, or wave after wave where memory is short.
        a_step = self._run_of_prompts / max(self._steps_with_prompts, 1) or float(unread)
        in_waves = answers / max(min(self._rows, unfinished), 1.0)
        return self._costs(max(unread / max(a_step, 1.0) + longest, in_waves), unread, answers)

    # -- what is shown -------------------------------------------------------------------------------------------

    def _show(self, now: float) -> None:
        self._shown_at = now
        left = self.seconds_left() if self._unfinished else 0.0
        passed = now - self._began
        share = 1.0 if not self._unfinished else passed / max(passed + left, _LEAST_STEP)
        self._bar.draw(self._finished, share, passed, left, self._phase())

    def _phase(self) -> str:
        if self._scores:
            passed = self._latest - self._began
            rate = self._finished / passed if passed else 0.0
            return f"reading {self._read:,} / {self._all_prompt_tokens:,} · {rate:,.0f} scores/s"
        rate = self._tokens / self._spent if self._spent else 0.0
        if self._is_reading:
            return f"reading prompts {self._read:,} / {self._all_prompt_tokens:,} · {rate:,.0f} tok/s"
        return f"writing {self._written:,} / {self._written + max(self._unwritten, 0):,} · {rate:,.0f} tok/s"


@contextmanager
def progress_bar(
    requests: Sequence[Request],
    prompt_tokens: int,
    saving: float,
    wanted: bool | None,
    costs: Callable[[], StepCosts],
    *,
    rows: float = 1.0,
    scores: int | None = None,
) -> Iterator[Progress]:
    """A bar over a call.

    prompt_tokens: to be computed. wanted: None shows a bar for long lists, if transformers' bars are on.
    costs: makes what learns the costs of steps. rows: sequences that memory has room for. scores: how many are read
    from the requests, in a call of ``score``.
    """
    results = len(requests) if scores is None else scores
    things = "samples" if any(request.sample for request in requests) else "prompts" if scores is None else "scores"
    with call_bar(results, things, saving, wanted) as bar:
        learnt = bar.whole.costs if bar.whole is not None else None
        learnt = learnt or (StepCosts() if bar.disable else costs())
        if bar.whole is not None:
            bar.whole.costs = learnt  # for the next call
        yield Progress(bar, requests, prompt_tokens, learnt, rows=rows, scores=scores is not None)


def expected_tokens(limit: float, chance: float) -> float:
    """New tokens of an answer that may have ``limit`` more and ends with each of them by ``chance``."""
    if chance <= 0:
        return limit
    return -math.expm1(limit * math.log1p(-min(chance, 0.999))) / chance


def longest_of(answers: int, limit: float, chance: float) -> float:
    """New tokens of the longest of so many such answers."""
    if chance <= 0:
        return limit
    return min(limit, (math.log(max(answers, 1)) + 0.58) / chance)
