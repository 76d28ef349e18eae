"""Stop strings: prepared once for each tokenizer, and looked for in new tokens.

To prepare strings, the whole vocabulary is gone through: the result is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.generation.stopping_criteria import StopStringCriteria

from ..inputs.preparing import loading, vocabulary_bar
from ..planning.requests_and_prefixes import Request
from .stop_string_tables import DecodedVocabulary, QuickStopStrings

_MOST_SETS_KEPT = 64  # of strings
_WINDOWS_AT_ONCE = 1024  # in which strings are looked for: bounds the memory


class PreparedStopStrings:
    """Prepared strings, kept from call to call while a tokenizer's size and its way of decoding stay the same."""

    def __init__(self) -> None:
        # The tokenizer is kept, too: as long as it lives, no other one has its id.
        self._prepared: OrderedDict[Hashable, tuple[Any, StopStringCriteria]] = OrderedDict()
        self._vocabulary: tuple[Hashable, Any, DecodedVocabulary] | None = None  # of the latest tokenizer

    def get(self, tokenizer: Any, strings: tuple[str, ...]) -> StopStringCriteria:
        """Criteria for these strings; what transformers raises where they cannot be looked for."""
        of_tokenizer = _key(tokenizer)
        key = of_tokenizer, strings
        if key not in self._prepared:
            with loading():
                if self._vocabulary is None or self._vocabulary[0] != of_tokenizer:
                    self._vocabulary = None  # before the other one is made: they are large
                    with vocabulary_bar(of_tokenizer[1] or 0):
                        self._vocabulary = of_tokenizer, tokenizer, DecodedVocabulary(tokenizer)
                self._prepared[key] = tokenizer, QuickStopStrings(tokenizer, strings, self._vocabulary[2])
            if len(self._prepared) > _MOST_SETS_KEPT:
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(key)
        return self._prepared[key][1]


def _key(tokenizer: Any) -> tuple[int, int | None, str]:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    decoded = repr(getattr(decoder, "__getstate__", lambda: None)())
    tokens = len(tokenizer) if hasattr(tokenizer, "__len__") else None
    return id(tokenizer), tokens, decoded


class StopStringSearch:
    """transformers' StopStringCriteria for many rows and tokens at once, each in a window of the tokens before it.

    ``prompt``: gives the tokens of a request's prompt, in which a string may begin.
    """

    def __init__(self, strings: StopStringCriteria, prompt: Callable[[Request], np.ndarray]) -> None:
        self._strings = strings
        self._prompt = prompt
        self._width = strings.maximum_token_len
        table = strings.embedding_vec
        self._padding = len(table)  # beyond the table: the criteria take its last row for it, which matches nothing
        # Only a token that begins with the end of a string can complete one: the others are passed over.
        ends = table[:, strings.max_valid_positions * strings.num_stop_strings : -1]
        self._may_complete = (ends > 0).any(dim=1).cpu().numpy()  # [vocabulary + 1]

    def first(
        self, requests: Sequence[Request], rows: Sequence[int], real: dict[int, int], tokens: np.ndarray
    ) -> dict[int, int]:
        """By row, how many of its new tokens there are when one first completes a string.

        ``rows``: those of ``tokens`` [rows, times] in which to look. ``real``: how many tokens each of them has.
        """
        mine = tokens[rows]
        may = self._may_complete[np.minimum(mine, self._padding - 1)]
        may &= np.arange(tokens.shape[1]) < np.array([real[row] for row in rows], dtype=np.int64)[:, None]
        places = [(rows[at], column) for at, column in zip(*(axis.tolist() for axis in may.nonzero()), strict=True)]
        found: dict[int, int] = {}
        for begin in range(0, len(places), _WINDOWS_AT_ONCE):
            some = [(row, column) for row, column in places[begin : begin + _WINDOWS_AT_ONCE] if row not in found]
            windows = np.full((len(some), self._width), self._padding, dtype=np.int64)
            for window, (row, column) in zip(windows, some, strict=True):
                last = self._last(requests[row], tokens[row, : column + 1])
                window[self._width - len(last) :] = last
            for (row, column), is_complete in zip(some, self._complete(windows).tolist(), strict=True):
                if is_complete:
                    found.setdefault(row, column + 1)
        return found

    def complete(self, ids: np.ndarray) -> np.ndarray:  # [rows] bool
        """In which rows of ``ids`` [rows, tokens] the last token completes a string."""
        windows = np.full((len(ids), self._width), self._padding, dtype=np.int64)
        last = ids[:, -self._width :]
        windows[:, self._width - last.shape[1] :] = last
        return self._complete(windows)

    @torch.no_grad()
    def _complete(self, windows: np.ndarray) -> np.ndarray:  # [rows, width] -> [rows] bool
        complete: torch.Tensor = self._strings(torch.from_numpy(windows), None)
        return complete.numpy()

    def _last(self, request: Request, new: np.ndarray) -> np.ndarray:
        """The last tokens, as many as a window holds: of the prompt, of those generated so far, and of ``new``."""
        prompt = self._prompt(request)[-self._width :]
        seen = np.array(request.generated[-self._width :], dtype=np.int64)
        return np.concatenate([prompt, seen, new])[-self._width :]
