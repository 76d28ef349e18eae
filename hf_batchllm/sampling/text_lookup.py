"""Guesses at the next tokens of an answer: what followed its last few tokens earlier on, or in another answer.

All answers to a prompt are looked up together, those of earlier calls too, so that each may go on as another one did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

# Of a single token what followed it would rarely be right, and more than so many tell no more.
_USUAL, _MOST = (3, 2), 16
_PROMPT = -1


class TextLookup:
    """What has been said of one prompt.

    ``longest``: the most tokens that are looked for. ``earlier``: answers to the prompt, the latest one last.
    """

    def __init__(self, prompt: Sequence[int], longest: int, earlier: Iterable[Sequence[int]] = ()) -> None:
        longest = min(longest, _MOST)
        self.lengths = sorted({longest, *(min(longest, each) for each in _USUAL)}, reverse=True)
        self._prompt = list(prompt)
        self._before = self._prompt[-longest:]  # what an answer's first tokens stand behind
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}  # a run -> (text, place of what followed it last)
        self._texts: dict[int, list[int]] = {}  # of each sample, that and its answer; of earlier ones below ``_PROMPT``
        self._learned: dict[int, int] = {}  # of each sample's text, how many tokens
        self._index(_PROMPT, self._prompt, 1)
        for number, answer in enumerate(earlier, start=1):
            text = self._texts[_PROMPT - number] = [*self._before, *answer]
            self._index(_PROMPT - number, text, len(self._before))

    def guess(self, sample: int, generated: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow an answer; ``generated``: its tokens so far.

        What followed a run of tokens is known of texts that have been learned.
        """
        text = self._text(sample, generated)
        for length in self.lengths:
            found = self._places.get(tuple(text[-length:]))
            if found is not None:
                return self._from(*found, sample, most)
        return []

    def learn(self, sample: int, generated: Sequence[int]) -> None:
        """What follows what in an answer so far."""
        text, learned = self._text(sample, generated), self._learned.get(sample, len(self._before))
        if learned < len(text):
            self._index(sample, text, learned)
            self._learned[sample] = len(text)

    def _text(self, sample: int, generated: Sequence[int]) -> list[int]:
        """What its first tokens stand behind, and the answer."""
        text = self._texts.get(sample)
        if text is None:
            text = self._texts[sample] = self._before.copy()
        text += generated[len(text) - len(self._before) :]
        return text

    def _index(self, which: int, text: Sequence[int], begin: int) -> None:
        """The runs that are followed by the tokens from ``begin`` on."""
        for length in self.lengths:
            first = max(begin, length)
            part = text[first - length :]
            runs = zip(*(part[offset:] for offset in range(length)), strict=False)
            self._places.update(zip(runs, zip(repeat(which), range(first, len(text))), strict=False))

    def _from(self, which: int, place: int, sample: int, most: int) -> list[int]:
        """What stands there. Where an answer's own text comes to its end, it goes on as from that place."""
        if which == _PROMPT:
            there = self._prompt[place : place + most]
            there += self._texts[sample][len(self._before) :][: most - len(there)]
        else:
            there = self._texts[which][place : place + most]
            if which != sample:
                return there
        return there + [there[at % len(there)] for at in range(len(there), most)]
