"""Texts of images, left out of a chat while it is made into tokens, as most are a thousand tokens that are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ImageTexts:
    """Makes texts with images into tokens, for one tokenizer.

    A tokenizer first looks for added tokens, and what is before and behind one does not know of each other. So a text
    that begins and ends with such tokens may be made into tokens by itself, with one of them in its place meanwhile.
    No other added token may reach over such a border: Gemma has breaks of lines as added tokens, and a run of them is
    one token, also where the text of an image begins in its middle.
    """

    def __init__(self, tokenizer: Any, placeholder: int) -> None:
        self._added = dict(getattr(tokenizer, "added_tokens_decoder", None) or {})
        # Those that are looked for first. The others are found between them, in each piece of text by itself.
        self._first = [str(added.content) for added in self._added.values() if not added.normalized]
        self._borders: dict[int, bool] = {}  # whether a token is one, as far as that is known
        # A token that is a word by itself depends on the letter beside it.
        looks_beside = any(added.single_word for added in self._added.values() if not added.normalized)
        self._placeholder = placeholder
        self._stands_alone = (
            getattr(tokenizer, "is_fast", False) and not looks_beside and self._is_a_border(placeholder)
        )

    @property
    def stand_in(self) -> str:
        """What is in the place of a text."""
        return str(self._added[self._placeholder].content)

    def may_be_left_out(self, text: str, ids: Sequence[int]) -> bool:
        """ids: those of the text alone."""
        if not self._stands_alone or not ids:
            return False
        first, last = ids[0], ids[-1]
        return (
            self._is_a_border(first)
            and self._is_a_border(last)
            and text.startswith(self._added[first].content)
            and text.endswith(self._added[last].content)
        )

    def put_back(self, ids: Sequence[int], left_out: Sequence[Sequence[int]]) -> list[int] | None:
        """The ids, with those of each text that was left out. None if it cannot be told where they belong."""
        at = [place for place, token in enumerate(ids) if token == self._placeholder]
        if len(at) != len(left_out):
            return None
        whole: list[int] = []
        begin = 0
        for place, text in zip(at, left_out, strict=True):
            whole += ids[begin:place]
            whole += text
            begin = place + 1
        return [*whole, *ids[begin:]]

    def _is_a_border(self, token: int) -> bool:
        if token not in self._borders:
            added = self._added.get(token)
            self._borders[token] = (
                added is not None
                and not (added.lstrip or added.rstrip or added.single_word or added.normalized)
                and self._stands_apart(str(added.content))
            )
        return self._borders[token]

    def _stands_apart(self, border: str) -> bool:
        """Whether no added token can be found that begins or ends outside of it, and holds a part of it."""
        if border != border.strip():  # tokens beside it may take blanks with them
            return False
        begins = tuple(border[:count] for count in range(1, len(border) + 1))
        return not any(
            other[1:].endswith(begins) or border in other[1:] or border in other[:-1] for other in self._first
        )
