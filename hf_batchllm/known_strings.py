"""Stop strings that are prepared: transformers goes through the whole vocabulary for them, which takes seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from transformers.generation.stopping_criteria import StopStringCriteria

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
