"""Stop strings, prepared once for each tokenizer, and looked for in new tokens.

Transformers goes through the whole vocabulary to prepare a string, which takes seconds: what was prepared is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.generation.stopping_criteria import StopStringCriteria

from ..planning.units import Request

_MOST = 64  # sets of strings


class KnownStrings:
    """Kept from call to call, for as long as a tokenizer has as many tokens, and decodes them in the same way."""

    def __init__(self) -> None:
        # With the tokenizer: as long as it is here, no other one has its id.
        self._known: OrderedDict[Hashable, tuple[Any, StopStringCriteria]] = OrderedDict()

    def get(self, tokenizer: Any, strings: tuple[str, ...]) -> StopStringCriteria | None:
        key = _key(tokenizer, strings)
        if key not in self._known:
            return None
        self._known.move_to_end(key)
        return self._known[key][1]

    def put(self, tokenizer: Any, strings: tuple[str, ...], found: StopStringCriteria) -> None:
        self._known[_key(tokenizer, strings)] = tokenizer, found
        if len(self._known) > _MOST:
            self._known.popitem(last=False)


def _key(tokenizer: Any, strings: tuple[str, ...]) -> Hashable:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    decoded = repr(getattr(decoder, "__getstate__", lambda: None)())
    tokens = len(tokenizer) if hasattr(tokenizer, "__len__") else None
    return id(tokenizer), tokens, decoded, strings


_WINDOWS = 1024  # looked at for strings at a time: memory


class _Strings:
    """transformers' StopStringCriteria for many rows at once. It looks at few tokens before each, prompts included."""

    def __init__(self, strings: StopStringCriteria, prompt: Callable[[Request], np.ndarray]) -> None:
        self._strings = strings
        self._prompt = prompt
        self._width = strings.maximum_token_len
        table = strings.embedding_vec
        self._beyond = len(table)  # is clamped to the table's last row, which matches nothing
        # Only a token that begins with the end of a string can complete one: the others need no look.
        ends = table[:, strings.max_valid_positions * strings.num_stop_strings : -1]
        self._may_complete = (ends > 0).any(dim=1).cpu().numpy()  # [vocabulary + 1]

    def first(
        self, requests: Sequence[Request], rows: Sequence[int], real: dict[int, int], tokens: np.ndarray
    ) -> dict[int, int]:
        """How many tokens each of those ``rows`` has with which the first one that completes a string ends."""
        mine = tokens[rows]
        may = self._may_complete[np.minimum(mine, self._beyond - 1)]
        may &= np.arange(tokens.shape[1]) < np.array([real[row] for row in rows], dtype=np.int64)[:, None]
        places = [(rows[at], column) for at, column in zip(*(axis.tolist() for axis in may.nonzero()), strict=True)]
        found: dict[int, int] = {}
        for begin in range(0, len(places), _WINDOWS):
            some = [(row, column) for row, column in places[begin : begin + _WINDOWS] if row not in found]
            windows = np.full((len(some), self._width), self._beyond, dtype=np.int64)
            for window, (row, column) in zip(windows, some, strict=True):
                last = self._last(requests[row], tokens[row, : column + 1])
                window[self._width - len(last) :] = last
            with torch.no_grad():
                complete = self._strings(torch.from_numpy(windows), None).tolist()  # type: ignore[arg-type]
            for (row, column), is_complete in zip(some, complete, strict=True):
                if is_complete:
                    found.setdefault(row, column + 1)
        return found

    def complete(self, ids: np.ndarray) -> np.ndarray:  # [rows] bool
        """Which rows of ``ids`` [rows, tokens] end with a string that their last token completes."""
        windows = np.full((len(ids), self._width), self._beyond, dtype=np.int64)
        last = ids[:, -self._width :]
        windows[:, self._width - last.shape[1] :] = last
        with torch.no_grad():
            return self._strings(torch.from_numpy(windows), None).numpy()  # type: ignore[arg-type]

    def _last(self, request: Request, new: np.ndarray) -> np.ndarray:
        """As many tokens as are looked at: of the prompt, what has been generated, and ``new``."""
        prompt = self._prompt(request)[-self._width :]
        seen = np.array(request.generated[-self._width :], dtype=np.int64)
        return np.concatenate([prompt, seen, new])[-self._width :]
