"""A continuation without the space before its first word: it goes on with the context's last word, and scores badly."""

from __future__ import annotations

from ...notices import Notices
from ...wording import shown

_KIND = "a continuation without its space"
_NEXT_IS_A_WORD = ".,:;!?"  # a space follows these in text; brackets, quotes, "=" and the like may stand right before
_FAR = 40  # characters back from the end in which the context's script is looked for
_END_SHOWN = 12  # characters


def warn_of_lost_space(index: int, context: str, continuation: str, notices: Notices) -> None:
    """Warn once, where both are words of a script that has upper and lower case: such scripts part words by spaces."""
    first, last = continuation[:1], context[-1:]
    if not last or not _is_cased(first) or not (last in _NEXT_IS_A_WORD or _is_cased(last)):
        return
    letter = next((each for each in reversed(context[-_FAR:]) if each.isalpha()), first)
    if not _is_cased(letter) or notices.was_given(_KIND):
        return
    word = continuation.split()[0][:_END_SHOWN]
    end = context[-_END_SHOWN:].split("\n")[-1]
    notices(
        _KIND,
        f"context {index} ends in {shown(last)} and its continuation begins without a space: the model reads "
        f"{shown(end + word)}. If a new word begins there, pass it with its space: {shown(' ' + word)}",
    )


def _is_cased(letter: str) -> bool:
    return letter.lower() != letter.upper()
