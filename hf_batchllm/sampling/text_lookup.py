"""Guesses at the next tokens of an answer: what followed its last few tokens earlier on, or in another answer.

All answers to a prompt are looked up together, so that each may go on as another one did.
"""

from __future__ import annotations

from collections.abc import Sequence


class TextLookup:
    """What has been said of one prompt. ``fewest``, ``most``: the tokens that are looked for; the longest run first."""

    def __init__(self, prompt: Sequence[int], fewest: int, most: int) -> None:
        self._lengths = range(most, fewest - 1, -1)
        self._texts: list[list[int]] = []
        self._indexed: list[int] = []  # how many tokens of each text have been followed by one that is known
        self._prompt = list(prompt)
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}  # a run -> (text, place of what followed it last)
        self._of: dict[int, int] = {}  # sample -> text

    def guess(self, sample: int, generated: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow an answer; ``generated``: its tokens so far."""
        which = self._of.get(sample)
        if which is None:
            which = self._of[sample] = len(self._texts)
            self._texts.append(self._prompt.copy())
            self._indexed.append(0)
        text = self._texts[which]
        text += generated[len(text) - len(self._prompt) :]
        self._index(which)
        for length in self._lengths:
            found = self._places.get(tuple(text[-length:])) if len(text) >= length else None
            if found is not None:
                return self._from(*found, most)
        return []

    def _index(self, which: int) -> None:
        text = self._texts[which]
        for place in range(self._indexed[which] + 1, len(text)):
            for length in self._lengths:
                if place >= length:
                    self._places[tuple(text[place - length : place])] = which, place
        self._indexed[which] = len(text) - 1

    def _from(self, which: int, place: int, most: int) -> list[int]:
        """What stands there. A text that comes to its end goes on as it did from that place: it repeats itself."""
        text = self._texts[which]
        there = text[place : place + most]
        period = len(text) - place
        return there + [there[at % period] for at in range(len(there), most)]
