"""Score and ScoreResult: what ``score`` gives back."""

from __future__ import annotations

import difflib
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from ..errors import OptionValueError
from ..wording import either, shown
from .dataframes import Columns, dataset_of, prompt_column, table_of, write_json_lines
from .rows import headline, picked
from .run_report import RunReport
from .short_values import short_ids, short_text

if TYPE_CHECKING:
    import datasets
    import pandas


_SCORES_SHOWN = 5  # in a ScoreResult's repr


@dataclass(frozen=True, repr=False)
class Score:
    """How likely a continuation is after its context.

    index: the place of the context (or of the whole text) in the list that was passed in.
    choice: which of the context's continuations this is, from 0.
    text: the continuation, as it was passed in or decoded; None without a tokenizer.
    token_ids: the tokens that were scored. A token that spans context and continuation is the first of them.
    logprobs: the log-probability of each token, given everything before it: the log-softmax, in float32, of the
        model's own logits.
    is_greedy: whether each token is the likeliest one in its place (among equals, the one with the lowest id).
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
        said = {"text": short_text(self.text)}
        if self.error is not None:
            said["error"] = short_text(self.error)
        else:
            said |= {"logprob": f"{self.logprob:.4f}", "is_greedy": repr(self.is_greedy)}
        said |= {"index": str(self.index), "choice": str(self.choice)}
        if self.context is not None:
            said["context"] = short_text(self.context)
        said["token_ids"] = short_ids(self.token_ids)
        if self.adapter is not None:
            said["adapter"] = repr(self.adapter)
        return f"Score({', '.join(f'{name}={value}' for name, value in said.items())})"

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


class ScoreResult(Sequence[Score]):
    """The scores of a call: those of the first context's continuations, then those of the second's, and so on.

    A slice is a ScoreResult with the same report, which is that of the whole call. Two are equal if their scores are; a
    list of the same scores is equal, too.

    After an interrupt there are only the scores that had finished (``complete`` is False). A context has no best
    continuation and no probabilities while some of its scores are missing, in a slice, too.
    """

    _is_slice = False  # then the report is about more scores than these
    _index: Any = None  # of the pandas Series of contexts, or of the continuations of none

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
        self._scores = sorted(scores, key=lambda score: (score.index, score.choice))
        self.complete = complete
        self.report = report
        if cut_short is None:
            cut_short = () if complete else [score.index for score in scores]
        self._cut_short = frozenset(cut_short)

    @overload
    def __getitem__(self, index: int) -> Score: ...
    @overload
    def __getitem__(self, index: slice) -> ScoreResult: ...
    def __getitem__(self, index: int | slice) -> Score | ScoreResult:
        found = picked(self._scores, index)
        if isinstance(found, Score):
            return found
        here, kept = (Counter(score.index for score in scores) for scores in (self._scores, found))
        cut = {context for context, count in kept.items() if count < here[context]}
        part = ScoreResult((), self.report, self.complete, self._cut_short | cut)
        part._scores = found  # in the order of the slice
        part._index = self._index
        part._is_slice = self._is_slice or len(found) < len(self)
        return part

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ScoreResult):
            return self._scores == other._scores
        return self._scores == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as that of a list

    def __len__(self) -> int:
        return len(self._scores)

    def __iter__(self) -> Iterator[Score]:
        return iter(self._scores)

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each whole continuation."""
        return [score.logprob for score in self._scores]

    @cached_property
    def by_context(self) -> list[list[Score]]:
        """The scores of each context. After an interrupt, contexts without any are left out."""
        rows: list[list[Score]] = []
        for score in self._scores:
            if not rows or rows[-1][0].index != score.index:
                rows.append([])
            rows[-1].append(score)
        return rows

    def best(self, per: str = "total") -> list[int | None]:
        """Which continuation of each context is the likeliest; the first one among equals.

        per: "total" compares the log-probabilities of whole continuations, which favours short ones; "token",
            "character" and "byte" (of its text in UTF-8) divide each by its length.

        There is a number for each of ``by_context``, 0 where there is one continuation alone (as of whole texts). It is
        None if one of the context's continuations could not be scored, has a log-probability of NaN, or is missing
        (after an interrupt, in a slice): it may be the likeliest.
        """
        if not isinstance(per, str) or per not in _PER:
            near = difflib.get_close_matches(str(per), _PER, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionValueError("per", f"must be {either(map(repr, _PER))}, not {shown(per)}{hint}")
        if per in ("character", "byte") and any(score.text is None and not score.error for score in self._scores):
            raise OptionValueError("per", f"is {per!r}, and there is no text to measure: pass a tokenizer")
        value = _PER[per]

        def likeliest(scores: list[Score]) -> int | None:
            if scores[0].index in self._cut_short:
                return None
            values = [value(score) for score in scores]  # NaN for an error
            if any(map(math.isnan, values)):
                return None
            return scores[values.index(max(values))].choice

        return [likeliest(scores) for scores in self.by_context]

    @property
    def probabilities(self) -> list[list[float]]:
        """Of each context: how likely each continuation is if it must be one of them.

        These add up to 1. They are NaN where ``best`` gives None.
        """
        return [
            [math.nan] * len(scores) if scores[0].index in self._cut_short else _among(scores)
            for scores in self.by_context
        ]

    def to_pandas(self, *, ids: bool = True) -> pandas.DataFrame:
        """A DataFrame with one row for each score. Row ``k`` is ``self[k]``.

        Where the contexts were a pandas Series, a row's label is that of its context. The context comes first and the
        token ids come last; ``ids=False`` leaves these out.
        """
        return table_of(self._columns(ids), self._index)

    def to_jsonl(self, path: str | os.PathLike[str], *, ids: bool = True) -> None:
        """Write a JSON object for each score, one a line, with the columns of ``to_pandas``. Replaces a file."""
        write_json_lines(self._columns(ids), path)

    def to_dataset(self, *, ids: bool = True) -> datasets.Dataset:
        """A ``datasets.Dataset`` with the columns of ``to_pandas``; chats as in ``BatchResult.to_dataset``."""
        return dataset_of(self._columns(ids))

    def _columns(self, ids: bool) -> Columns:
        rows = self._scores
        columns: dict[str, tuple[str, list[Any]]] = {
            "context": prompt_column([row.context for row in rows]),
            "text": ("string", [row.text for row in rows]),
            "logprob": ("float64", [row.logprob for row in rows]),
            "mean_logprob": ("float64", [row.mean_logprob for row in rows]),
            "is_greedy": ("bool", [row.is_greedy for row in rows]),
            "index": ("int64", [row.index for row in rows]),
            "choice": ("int64", [row.choice for row in rows]),
            "tokens": ("int64", [len(row.token_ids) for row in rows]),
            "error": ("string", [row.error for row in rows]),
        }
        if any(row.adapter is not None for row in rows):
            columns["adapter"] = ("string", [row.adapter for row in rows])
        columns["logprobs"] = ("logprobs", [row.logprobs for row in rows])
        if ids:
            columns["token_ids"] = ("ids", [row.token_ids for row in rows])
        return columns

    def __repr__(self) -> str:
        lines = [f"  [{place}] {_short(score)}" for place, score in enumerate(self._scores[:_SCORES_SHOWN])]
        hidden = len(self) - len(lines)
        if hidden:
            lines.append(f"  ... and {hidden:,} more")
        report = None if self.complete else self.report
        return "\n".join([headline("ScoreResult", len(self), "score", report, self._is_slice), *lines])

    def _repr_html_(self) -> str:
        from .views.scores import scores_html  # imported only when shown

        return scores_html(self, self._is_slice)


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
        count = len(score.token_ids)
        tokens = f"{count:,} token{'' if count == 1 else 's'}"
        line = f"{score.index}.{score.choice} {score.logprob:9.3f} ({tokens}) {what!r}"
    return line if len(line) <= 90 else line[:87] + "..."
