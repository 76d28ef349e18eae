"""Score and ScoreResult: what ``score`` gives back."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, Self

from ..errors import OptionValueError
from ..wording import counted, did_you_mean, either, shown
from .rows import Rows, row_repr
from .run_report import RunReport, saved
from .views.html import DASH, both_ends, cells, grouped, hidden, one_line, percent, seconds, table, text

_LINES = 5  # in a ScoreResult's repr
_FIRST_ROWS, _LAST_ROWS = 30, 10  # of its table; all rows if there are no more than these together
_MOST_ROWS = _FIRST_ROWS + _LAST_ROWS
_CHARACTERS = 160  # of a continuation
_CONTEXT_ENDS = (60, 140)  # characters shown of a long context
_FIGURES = ("among these", "log-probability", "a token", "tokens")
_IDS = 24  # token ids, where there is no text


@dataclass(frozen=True, repr=False)
class Score:
    """How likely a continuation is after its context.

    index: the place of the context (or of the whole text) in the list that was passed in.
    choice: which of the context's continuations this is, from 0.
    text: the continuation, as it was passed in or decoded; None without a tokenizer.
    token_ids: the tokens that were scored. A token that spans context and continuation is the first of them.
    logprobs: the log-probability of each token, given everything before it: the log-softmax, in float32, of the
        model's own logits.
    is_greedy: whether each token is the most likely one in its place (among equals, the one with the lowest id).
    error: why there is no score; ``token_ids`` is then empty, and ``logprob`` is NaN.
    context: the context as it was passed: a string, or a chat as a list of messages. None where token ids were passed,
        and for whole texts. Two scores are compared without it.
    adapter: the PEFT adapter that it was computed with, as in Generation.
    """

    index: int
    choice: int
    text: str | None
    token_ids: list[int]
    logprobs: list[float]
    is_greedy: bool
    error: str | None = None
    context: str | list[dict[str, Any]] | None = field(default=None, compare=False)
    adapter: str | None = None

    def __repr__(self) -> str:
        """In a line, the text first."""
        figures = "logprob is_greedy" if self.error is None else "error"
        return row_repr(self, f"text {figures} index choice context? token_ids adapter?")

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation: the sum of ``logprobs``."""
        return math.fsum(self.logprobs) if self.error is None else math.nan

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of a token."""
        return self.logprob / max(len(self.token_ids), 1)

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(-self.mean_logprob)
        except OverflowError:
            return math.inf


_PER: dict[str, Callable[[Score], float]] = {
    "total": lambda score: score.logprob,
    "token": lambda score: score.mean_logprob,
    "character": lambda score: score.logprob / max(len(score.text or ""), 1),
    "byte": lambda score: score.logprob / max(len((score.text or "").encode(errors="replace")), 1),
}


class ScoreResult(Rows[Score]):
    """The scores of a call: those of the first context's continuations, then those of the second's, and so on.

    A slice is a ScoreResult with the same report, which is that of the whole call. Two are equal if their scores are; a
    list of the same scores is equal, too.

    After an interrupt there are only the scores that had finished (``complete`` is False). A context has no best
    continuation and no probabilities while some of its scores are missing, in a slice, too.
    """

    _thing, _given = "score", "context"
    _fields = "context text logprob mean_logprob is_greedy index choice tokens error adapter? logprobs token_ids"

    def __init__(
        self,
        scores: Sequence[Score],
        report: RunReport | None,
        complete: bool = True,
        cut_short: Collection[int] | None = None,
    ) -> None:
        """``scores``: in any order. ``complete``: False after an interrupt, when some are missing.

        ``cut_short``: the indices of contexts with missing scores. None, where that is not known: all after an
        interrupt, else none.
        """
        super().__init__(sorted(scores, key=attrgetter("index", "choice")), report)
        self.complete = complete
        if cut_short is None:
            cut_short = () if complete else [score.index for score in scores]
        self._cut_short = frozenset(cut_short)

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each whole continuation."""
        return [score.logprob for score in self]

    @cached_property
    def by_context(self) -> list[list[Score]]:
        """The scores of each context. After an interrupt, contexts without any are left out."""
        return [list(scores) for _, scores in groupby(self, key=attrgetter("index"))]

    def best(self, per: str = "total") -> list[int | None]:
        """Which continuation of each context is the most likely; the first one among equals.

        per: "total" compares the log-probabilities of whole continuations, which favours short ones; "token",
            "character" and "byte" (of its text in UTF-8) divide each by its length.

        There is a number for each of ``by_context``, 0 where there is one continuation alone (as of whole texts). It is
        None if one of the context's continuations could not be scored, has a log-probability of NaN, or is missing
        (after an interrupt, in a slice): it may be the most likely.
        """
        if not isinstance(per, str) or per not in _PER:
            hint = did_you_mean(str(per), _PER, form="'{}'")
            raise OptionValueError("per", f"must be {either(map(repr, _PER))}, not {shown(per)}{hint}")
        if per in ("character", "byte") and any(score.text is None and not score.error for score in self):
            raise OptionValueError("per", f"is {per!r}, and there is no text to measure: pass a tokenizer")
        value = _PER[per]

        def most_likely(scores: list[Score]) -> int | None:
            if scores[0].index in self._cut_short:
                return None
            values = [value(score) for score in scores]  # NaN for an error
            if any(map(math.isnan, values)):
                return None
            return scores[values.index(max(values))].choice

        return [most_likely(scores) for scores in self.by_context]

    @property
    def probabilities(self) -> list[list[float]]:
        """How likely each continuation of each context is, if it must be one of them.

        These add up to 1. They are NaN where ``best`` gives None.
        """
        return [
            [math.nan] * len(scores) if scores[0].index in self._cut_short else _among(scores)
            for scores in self.by_context
        ]

    def _part(self, rows: list[Score]) -> Self:
        here, kept = (Counter(score.index for score in scores) for scores in (self, rows))
        cut = {context for context, count in kept.items() if count < here[context]}
        part = type(self)((), self.report, self.complete, self._cut_short | cut)
        part._rows = rows  # in the order of the slice
        return part

    def _lines(self) -> list[str]:
        return [_short(score) for score in self[:_LINES]]

    def _interrupted(self) -> RunReport | None:
        return None if self.complete else super()._interrupted()

    def _how_it_went(self, report: RunReport) -> str:
        return f"in {seconds(report.seconds)}, {percent(report.saving)} of tokens {saved(report)}"

    def _table(self) -> str:
        """Contexts, and beside each its continuations with their probabilities among them."""
        contexts, best, among = self.by_context, self.best(), self.probabilities
        compared = any(len(scores) > 1 for scores in contexts)
        named = any(score.context is not None for score in self)
        columns = 5 + named + compared
        first, last = _shown(contexts)
        lines: list[str] = []
        for at in (*range(first), *range(last, len(contexts))):
            scores = contexts[at]
            most_likely = best[at] if len(scores) > 1 else None
            rows = [
                _cells(score, share if compared else None, score.choice == most_likely)
                for score, share in zip(scores[:_MOST_ROWS], among[at], strict=False)
            ]
            beside = [("hfb-num hfb-dim hfb-at", text(scores[0].index))]
            lines += grouped([*beside, ("hfb-prompt", _context(scores[0].context))] if named else beside, rows)
            if len(scores) > _MOST_ROWS:
                lines.append(hidden(f"{len(scores) - _MOST_ROWS:,} more of this context", columns))
            if at == first - 1 < last - 1:
                left_out = counted(sum(map(len, contexts[first:last])), "score")
                lines.append(hidden(f"{counted(last - first, 'more context')}, {left_out}", columns))
        top = '<th class="hfb-at" colspan="2">context</th>' if named else '<th class="hfb-num">index</th>'
        top += '<th class="hfb-answer">continuation</th>' + _figures(_FIGURES[not compared :], "th")
        return table(f"hfb-rows hfb-scores{' hfb-folds' if named else ''}", top, lines)


def _among(scores: Sequence[Score]) -> list[float]:
    logprobs = [score.logprob for score in scores]  # NaN for an error
    highest = max(logprobs)
    if any(map(math.isnan, logprobs)):
        return [math.nan] * len(logprobs)
    if highest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]


def _short(score: Score) -> str:
    """One line for a terminal."""
    if score.error is not None:
        line = f"{score.index}.{score.choice} error: {score.error}"
    else:
        what: Any = score.token_ids if score.text is None else score.text
        tokens = counted(len(score.token_ids), "token")
        line = f"{score.index}.{score.choice} {score.logprob:9.3f} ({tokens}) {what!r}"
    return line if len(line) <= 90 else line[:87] + "..."


# -- the table ---------------------------------------------------------------------------------------------------------


def _shown(contexts: Sequence[Sequence[Score]]) -> tuple[int, int]:
    """How many contexts are shown from the first one on, and from which one on to the last: whole ones, if several."""
    ends = list(accumulate((min(len(scores), _MOST_ROWS) for scores in contexts), initial=0))
    if ends[-1] <= _MOST_ROWS:
        return len(contexts), len(contexts)
    first = max(1, bisect_right(ends, _FIRST_ROWS) - 1)
    return first, max(first, bisect_left(ends, ends[-1] - _LAST_ROWS))


def _cells(score: Score, share: float | None, is_best: bool) -> str:
    """``share``: among the context's continuations; None where nothing is compared."""
    compared = [] if share is None else [_bar(share, is_best)]
    if score.error is not None:
        error = f'<span class="hfb-bad">{one_line(score.error, _CHARACTERS)}</span>'
        return cells(("hfb-answer", error)) + _figures([""] * (3 + len(compared)))
    said = " ".join(map(str, score.token_ids[:_IDS])) if score.text is None else score.text
    line = one_line(said, _CHARACTERS)
    if said[:1] == " ":  # it changes the score, and could not be seen
        line = f'<span class="hfb-nl">␣</span>{line}'
    figures = [f"{score.logprob:,.3f}", f"{score.mean_logprob:,.3f}", f"{len(score.token_ids):,}"]
    return cells(("hfb-answer", f"<b>{line}</b>" if is_best else line)) + _figures([*compared, *figures])


def _figures(figures: Sequence[str], tag: str = "td") -> str:
    """A narrow view has room for the first of them."""
    first, *others = figures
    return cells(("hfb-num hfb-new", first), *(("hfb-num hfb-wide", each) for each in others), tag=tag)


def _bar(share: float, is_best: bool) -> str:
    if math.isnan(share):
        return DASH
    figure = f"<b>{text(percent(share))}</b>" if is_best else text(percent(share))
    fill = f'<i class="hfb-c{0 if is_best else 8}" style="width:{100 * share:.1f}%"></i>'
    return f'<span class="hfb-among">{fill}</span><span class="hfb-share">{figure}</span>'


def _context(context: Any) -> str:
    """The context in short. A chat shows its last message."""
    if context is None:
        return DASH
    whole = str(context[-1].get("content", "")) if isinstance(context, list) and context else str(context)
    return both_ends(whole.strip(), whole.strip(), _CONTEXT_ENDS, True)
