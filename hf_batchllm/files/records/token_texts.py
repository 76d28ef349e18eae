"""Single tokens as text and as bytes, for log-probabilities in files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
_SPACE = "\u2581"  # SentencePiece writes spaces like this


class TokenTexts:
    """Without a tokenizer, tokens are named by their ids."""

    def __init__(self, tokenizer: Any) -> None:
        inner = getattr(tokenizer, "tokenizer", None)  # a processor holds one
        self._tokenizer = tokenizer if inner is None or not hasattr(inner, "convert_ids_to_tokens") else inner
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def text(self, token: int) -> str:
        return self._text_and_bytes(token)[0]

    def byte_values(self, token: int) -> list[int] | None:
        """None if the tokenizer does not tell."""
        known = self._text_and_bytes(token)[1]
        return None if known is None else list(known)

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that are not part of a text."""
        return frozenset(getattr(self._tokenizer, "all_special_ids", None) or ())

    def _text_and_bytes(self, token: int) -> tuple[str, bytes | None]:
        if token not in self._known:
            self._known[token] = self._decode(token)
        return self._known[token]

    def _decode(self, token: int) -> tuple[str, bytes | None]:
        if self._tokenizer is None:
            return f"token_id:{token}", None
        text = self._tokenizer.decode([token])
        piece = self._piece(token)
        if piece.startswith(_SPACE) and not text.startswith(" "):
            text = f" {text}"  # a decoder drops the space at the beginning of a text
        if "\ufffd" not in text:
            return text, text.encode("utf-8", "surrogatepass")
        byte = _BYTE.fullmatch(piece)  # a part of a character
        if byte:
            return text, bytes([int(byte.group(1), 16)])
        if piece and all(letter in _BYTES_OF_LETTERS for letter in piece):
            return text, bytes(_BYTES_OF_LETTERS[letter] for letter in piece)
        return text, None

    def _piece(self, token: int) -> str:
        """The token as the vocabulary writes it."""
        if not hasattr(self._tokenizer, "convert_ids_to_tokens"):
            return ""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        return piece if isinstance(piece, str) else ""


def likeliest(logprobs: Mapping[int, float], wanted: int) -> list[tuple[int, float]]:
    """At one position, as many as this record asked for: another record of the same call may have asked for more."""
    return sorted(logprobs.items(), key=lambda pair: -pair[1])[:wanted]


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE writes each byte as a letter: a visible one as itself, the others from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTES_OF_LETTERS = _byte_letters()
