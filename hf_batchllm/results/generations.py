"""Generation and BatchResult: what ``generate`` gives back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from .dataframes import Columns, dataset_of, prompt_column, table_of, write_json_lines
from .missing_names import OF_A_GENERATION, OF_A_RESULT, no_such
from .rows import headline, picked
from .run_report import RunReport
from .short_values import short_ids, short_text

if TYPE_CHECKING:
    import datasets
    import pandas


_GENERATIONS_SHOWN = 3  # in a BatchResult's repr


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
        the k likeliest tokens, the likeliest first, and the chosen token (the last of k + 1 if it is not among the k),
        so ``g.logprobs[t][g.token_ids[t]]`` is always there. With k = 0 it holds the chosen token alone. The values
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
        said = {"error": short_text(self.error)} if self.error is not None else {"text": short_text(self.text)}
        said["finish_reason"] = repr(self.finish_reason)
        said["index"] = str(self.index)
        if self.sample:
            said["sample"] = str(self.sample)
        if self.prompt is not None:
            said["prompt"] = short_text(self.prompt)
        said |= {"token_ids": short_ids(self.token_ids), "prompt_token_ids": short_ids(self.prompt_token_ids)}
        for name in ("score", "adapter"):
            if getattr(self, name) is not None:
                said[name] = repr(getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            if (values := getattr(self, name)) is not None:
                said[name] = f"<of {len(values):,} tokens>"
        return f"Generation({', '.join(f'{name}={value}' for name, value in said.items())})"


class BatchResult(Sequence[Generation]):
    """The generations of a call in the order of the prompts: row ``i * n + j`` is sample ``j`` of prompt ``i``.

    A slice is a BatchResult with the same report, which is that of the whole call. Two are equal if their generations
    are, whatever their reports; a list of the same generations is equal, too.

    After an interrupt there are only the generations that had finished: row ``k`` is then any prompt's, and
    ``result[k].index`` says which.
    """

    _decode: Callable[[list[int]], str | None] | None = None  # for the prompts that a notebook shows
    _is_slice = False  # then the report is about more rows than these
    _index: Any = None  # of the pandas Series of prompts

    def __init__(
        self,
        generations: Sequence[Generation],
        report: RunReport | None,
        decode: Callable[[list[int]], str | None] | None = None,
    ) -> None:
        self._generations = list(generations)
        self.report = report
        self._decode = decode

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_such(self, name, OF_A_RESULT)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which stores the results without the tokenizer."""
        return {name: value for name, value in self.__dict__.items() if name != "_decode"}

    @overload
    def __getitem__(self, index: int) -> Generation: ...
    @overload
    def __getitem__(self, index: slice) -> BatchResult: ...
    def __getitem__(self, index: int | slice) -> Generation | BatchResult:
        found = picked(self._generations, index)
        if isinstance(found, Generation):
            return found
        part = BatchResult(found, self.report, self._decode)
        part._index = self._index
        part._is_slice = self._is_slice or len(found) < len(self)
        return part

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BatchResult):
            return self._generations == other._generations
        return self._generations == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as that of a list

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._generations)

    @property
    def texts(self) -> list[str | None]:
        return [generation.text for generation in self._generations]

    @property
    def token_ids(self) -> list[list[int]]:
        return [generation.token_ids for generation in self._generations]

    @property
    def by_prompt(self) -> list[list[Generation]]:
        """The samples of each prompt. After an interrupt, prompts without any are left out."""
        rows: list[list[Generation]] = []
        for generation in self._generations:
            if not rows or rows[-1][0].index != generation.index:
                rows.append([])
            rows[-1].append(generation)
        return rows

    def to_pandas(self, *, ids: bool = True) -> pandas.DataFrame:
        """A DataFrame with one row for each generation: the fields of Generation, and the numbers of tokens.

        The prompt comes first and the token ids come last; ``ids=False`` leaves these out. Row ``k`` is ``self[k]``,
        and where the prompts were a pandas Series, its label is that of its prompt. There are columns for ``score``,
        ``adapter``, ``logprobs`` and ``prompt_logprobs`` if any generation has them.
        """
        return table_of(self._columns(ids), self._index)

    def to_jsonl(self, path: str | os.PathLike[str], *, ids: bool = True) -> None:
        """Write a JSON object for each generation, one a line, with the columns of ``to_pandas``.

        A file that is there already is replaced. To resume, and for files too large for memory, use ``run_file``.
        """
        write_json_lines(self._columns(ids), path)

    def to_dataset(self, *, ids: bool = True) -> datasets.Dataset:
        """A ``datasets.Dataset`` with the columns of ``to_pandas``.

        Chats are lists of messages; where strings stand among them, or content that is not text, they are JSON text.
        """
        return dataset_of(self._columns(ids))

    def _columns(self, ids: bool) -> Columns:
        rows = self._generations
        columns: dict[str, tuple[str, list[Any]]] = {
            "prompt": prompt_column([row.prompt for row in rows]),
            "text": ("string", [row.text for row in rows]),
            "finish_reason": ("string", [row.finish_reason for row in rows]),
            "index": ("int64", [row.index for row in rows]),
            "sample": ("int64", [row.sample for row in rows]),
            "prompt_tokens": ("int64", [len(row.prompt_token_ids) for row in rows]),
            "new_tokens": ("int64", [len(row.token_ids) for row in rows]),
            "error": ("string", [row.error for row in rows]),
        }
        kinds = {"score": "float64", "adapter": "string", "logprobs": "logprobs", "prompt_logprobs": "logprobs"}
        for name, kind in kinds.items():
            values = [getattr(row, name) for row in rows]
            if any(value is not None for value in values):
                columns[name] = (kind, values)
        if ids:
            columns["token_ids"] = ("ids", [row.token_ids for row in rows])
            columns["prompt_token_ids"] = ("ids", [row.prompt_token_ids for row in rows])
        return columns

    def __repr__(self) -> str:
        shown = [
            f"  [{place}] {whose}{_short(generation, len(whose))}"
            for place, (generation, whose) in enumerate(zip(self._generations, self._whose_rows(), strict=False))
        ]
        hidden = len(self) - len(shown)
        if hidden:
            shown.append(f"  ... and {hidden:,} more")
        return "\n".join([headline("BatchResult", len(self), "generation", self.report, self._is_slice), *shown])

    def _whose_rows(self) -> list[str]:
        """Of the rows shown: whose each is, if the row's number does not say that."""
        sampled = any(row.sample for row in self._generations)
        shown = self._generations[:_GENERATIONS_SHOWN]
        if not sampled and all(row.index == place for place, row in enumerate(self._generations)):
            return [""] * len(shown)
        return [f"prompt {row.index}{f', sample {row.sample}' if sampled else ''}: " for row in shown]

    def _repr_html_(self) -> str:
        from .views.result import result_html  # imported only when shown

        return result_html(self, self._decode, self._is_slice)


def _short(generation: Generation, before: int) -> str:
    """One line for a terminal, after ``before`` characters."""
    what = generation.error or (repr(generation.text) if generation.text is not None else str(generation.token_ids))
    line = f"{generation.finish_reason}: {what}"
    most = max(70 - before, 40)
    return line if len(line) <= most else line[: most - 3] + "..."
