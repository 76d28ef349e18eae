"""Generation and BatchResult: what ``generate`` gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

from .missing_names import OF_A_GENERATION, OF_A_RESULT, no_such
from .rows import Rows, row_repr
from .run_report import RunReport, saved
from .views.html import DASH, block, both_ends, cells, grouped, hidden, id_list, percent, seconds, table, text
from .views.images import thumbnails

Decode = Callable[[list[int]], str | None]

_LINES = 3  # in a BatchResult's repr
_FIRST_ROWS, _LAST_ROWS = 15, 5  # of its table; all rows if there are no more than these together
_PROMPT_ENDS = (80, 100)  # characters shown of a long prompt
_PROMPT_TOKENS = 250  # decoded at each end of a long prompt
_ANSWER_CHARACTERS = 320
_RUN = 8  # equal tokens that follow each other: an image is one token many times over


@dataclass(frozen=True, repr=False)
class Generation:
    """One generated sequence.

    index: the prompt's place in the list that was passed in.
    sample: which of the prompt's ``num_return_sequences`` this is, from 0.
    text: the new tokens decoded without special tokens; None without a tokenizer.
    token_ids: the new tokens, the EOS that ended them included.
    prompt_token_ids: the prompt as the model saw it.
    finish_reason: "stop" (EOS, a stop string, a criterion), "length" (the limit of new tokens was reached), "time"
        (``max_time`` was over; there may be no new token at all), "error".
    logprobs: with ``generate(..., logprobs=k)``, a dict {token id: log-probability} for each of ``token_ids``. It holds
        the k most likely tokens, the best first, and the chosen token (the last of k + 1 if it is not among the
        k), so ``g.logprobs[t][g.token_ids[t]]`` is always there. With k = 0 it holds the chosen token alone. The values
        are the log-softmax, in float32, of the model's own logits, before processors, temperature and the like.
    prompt_logprobs: with ``prompt_logprobs=k``, the same for each of ``prompt_token_ids``, given the tokens before it.
        None for the first token, and for tokens that the model had not reached when ``max_time`` was over. Prompts that
        share a prefix share its dicts: copy a dict before you change it.
    error: why there is no result, if ``finish_reason`` is "error".
    score: of an answer of a beam search: the sum of its tokens' log-probabilities, divided by their number to the power
        of ``length_penalty``. The best answer comes first. It is the ``sequences_scores`` of ``generate``.
    prompt: the prompt as it was passed: a string, or a chat as a list of messages. None where token ids were passed. It
        is no copy of the string. Two results are compared by their token ids, and not by this.
    adapter: the PEFT adapter that answered; several that were active together are joined by "+". None for the model
        without any.

    Log-probabilities are None for errors, and if they were not asked for. They take some 300 bytes a token and 75 more
    for each of the k. Where k is more than 32, the host picks the tokens and waits for each step. With
    ``prompt_logprobs`` the LM head runs over prompts, too, steps are smaller where the vocabulary is large, and kept
    prefixes are not used.
    """

    index: int
    sample: int
    text: str | None
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    error: str | None = None
    score: float | None = None
    prompt: str | list[dict[str, Any]] | None = field(default=None, compare=False)
    adapter: str | None = None

    if not TYPE_CHECKING:  # a type checker knows all attributes that there are

        def __getattr__(self, name: str) -> Any:
            raise no_such(self, name, OF_A_GENERATION)

    def __repr__(self) -> str:
        """In a line, the text first."""
        first, sample = "text" if self.error is None else "error", "sample" if self.sample else ""
        others = "prompt? token_ids prompt_token_ids score? adapter? logprobs? prompt_logprobs?"
        return row_repr(self, f"{first} finish_reason index {sample} {others}")


class BatchResult(Rows[Generation]):
    """The generations of a call in the order of the prompts: row ``i * n + j`` is sample ``j`` of prompt ``i``.

    A slice is a BatchResult with the same report, which is that of the whole call. Two are equal if their generations
    are, whatever their reports; a list of the same generations is equal, too.

    After an interrupt there are only the generations that had finished: row ``k`` is then any prompt's, and
    ``result[k].index`` says which.
    """

    _thing, _given = "generation", "prompt"
    _fields = (
        "prompt text finish_reason index sample prompt_tokens new_tokens error score? adapter? logprobs? "
        "prompt_logprobs? token_ids prompt_token_ids"
    )
    _decode: Decode | None = None  # for the prompts that a notebook shows

    def __init__(
        self,
        generations: Sequence[Generation],
        report: RunReport | None,
        decode: Callable[[list[int]], str | None] | None = None,
    ) -> None:
        super().__init__(generations, report)
        self._decode = decode

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_such(self, name, OF_A_RESULT)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which stores the results without the tokenizer."""
        return {name: value for name, value in self.__dict__.items() if name != "_decode"}

    @property
    def texts(self) -> list[str | None]:
        return [generation.text for generation in self]

    @property
    def token_ids(self) -> list[list[int]]:
        return [generation.token_ids for generation in self]

    @property
    def by_prompt(self) -> list[list[Generation]]:
        """The samples of each prompt. After an interrupt, prompts without any are left out."""
        return [list(samples) for _, samples in groupby(self, key=attrgetter("index"))]

    def _part(self, rows: list[Generation]) -> Self:
        return type(self)(rows, self.report, self._decode)

    def _lines(self) -> list[str]:
        """Each says whose it is, if the row's number does not."""
        whose = "prompt {0.index}: " if any(row.index != place for place, row in enumerate(self)) else ""
        if any(row.sample for row in self):
            whose = "prompt {0.index}, sample {0.sample}: "
        return [_short(row, whose.format(row)) for row in self[:_LINES]]

    def _how_it_went(self, report: RunReport) -> str:
        return (
            f"{report.new_tokens:,} new tokens in {seconds(report.seconds)} ({report.tokens_per_second:,.0f} / s), "
            f"{percent(report.saving)} of prompt tokens {saved(report)}"
        )

    def _table(self) -> str:
        """Prompts, answers, and why each ended."""
        sampled = any(row.sample for row in self)

        def lines(some: BatchResult) -> list[str]:
            return [line for samples in some.by_prompt for line in self._samples(samples, sampled)]

        left_out = len(self) - _FIRST_ROWS - _LAST_ROWS
        rows = lines(self if left_out <= 0 else self[:_FIRST_ROWS])
        if left_out > 0:
            rows += [hidden(f"{left_out:,} more", 5 + sampled), *lines(self[-_LAST_ROWS:])]
        sample = cells(("hfb-num", "sample"), tag="th") if sampled else ""
        top = f'<th colspan="2">prompt</th>{sample}<th>answer</th><th>ended</th><th class="hfb-num">tokens</th>'
        return table("hfb-rows hfb-results hfb-folds", top, rows)

    def _samples(self, samples: list[Generation], sampled: bool) -> list[str]:
        """Rows of the table: the samples of a prompt beside it."""
        rows = []
        for row in samples:
            answer = id_list(row.token_ids) if row.text is None else block(row.text, _ANSWER_CHARACTERS)
            if row.error is not None:
                answer = block(row.error, _ANSWER_CHARACTERS, " hfb-bad")
            failed = row.error is not None or row.finish_reason == "error"
            ended = f'<span class="hfb-why{" hfb-error" if failed else ""}">{text(row.finish_reason)}</span>'
            sample = [("hfb-num hfb-dim hfb-sample", text(row.sample))] if sampled else []
            figures = [("hfb-ended", ended), ("hfb-num hfb-new", f"{len(row.token_ids):,}")]
            rows.append(cells(*sample, ("hfb-answer", answer), *figures))
        first = samples[0]
        return grouped([("hfb-num hfb-dim hfb-at", text(first.index)), ("hfb-prompt", self._prompt(first))], rows)

    def _prompt(self, row: Generation) -> str:
        """Its images, its beginning and its end."""
        ids, passed = list(row.prompt_token_ids), row.prompt
        images = thumbnails(passed) if isinstance(passed, list) else ""
        if images:
            runs = (list(run) for _, run in groupby(ids))
            ids = [token for run in runs for token in (run if len(run) < _RUN else run[:1])]
        is_whole = len(ids) <= 2 * _PROMPT_TOKENS
        start = end = self._decoded(ids if is_whole else ids[:_PROMPT_TOKENS]) if ids else None
        if start is None and isinstance(passed, str):  # it could not be run, or there is no tokenizer
            start, end, is_whole = passed, passed, True
        if start is None or end is None:
            return images + (id_list(ids) if ids else DASH)
        if not is_whole:  # a character may be cut off in the middle
            start, end = start.rstrip("\ufffd"), (self._decoded(ids[-_PROMPT_TOKENS:]) or "").lstrip("\ufffd")
        return images + both_ends(start, end, _PROMPT_ENDS, is_whole)

    def _decoded(self, ids: list[int]) -> str | None:
        """None without a tokenizer, or if it fails: the table then shows ids."""
        try:
            decoded = None if self._decode is None else self._decode(ids)
        except Exception:
            return None
        return decoded if isinstance(decoded, str) else None


def _short(generation: Generation, whose: str) -> str:
    """One line for a terminal."""
    what = generation.error or (repr(generation.text) if generation.text is not None else str(generation.token_ids))
    line = f"{generation.finish_reason}: {what}"
    most = max(70 - len(whose), 40)
    return whose + (line if len(line) <= most else line[: most - 3] + "...")
