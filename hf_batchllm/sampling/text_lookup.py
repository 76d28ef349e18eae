"""Guesses at the next tokens of an answer: what followed its last few tokens earlier on, or in another answer.

All answers to a prompt are looked up together, those of earlier calls too, so that each may go on as another one did.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np

from ..planning.requests_and_prefixes import Request

# Of a single token what followed it would rarely be right, and more than so many tell no more.
_USUAL, _MOST = (3, 2), 16
_PROMPT = -1
_MOST_TOKENS = 8_000_000  # of all earlier answers: 32 MB
_MOST_ANSWERS = 16  # of a prompt


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


class EarlierAnswers:
    """The latest answers that a generator has given to each prompt, for guesses in later calls.

    Those to prompts that were not asked for longest go first.
    """

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._answers: OrderedDict[tuple[object, bytes], deque[np.ndarray]] = OrderedDict()  # int32 [tokens] each
        self.tokens = 0

    def of(self, request: Request) -> list[np.ndarray]:
        """The answers to its prompt, the latest one last."""
        key = _key(request)
        if key not in self._answers:
            return []
        self._answers.move_to_end(key)
        return list(self._answers[key])

    def take(self, request: Request) -> None:
        """Keep its answer."""
        if not request.generated:
            return
        answers = self._answers.setdefault(key := _key(request), deque())
        self._answers.move_to_end(key)
        answers.append(np.array(request.generated, dtype=np.int32))
        self.tokens += len(answers[-1])
        if len(answers) > _MOST_ANSWERS:
            self.tokens -= len(answers.popleft())
        while self.tokens > self._most_tokens:
            _, oldest = self._answers.popitem(last=False)
            self.tokens -= sum(map(len, oldest))

    def forget(self) -> None:
        self._answers.clear()
        self.tokens = 0


def _key(request: Request) -> tuple[object, bytes]:
    """What tells the prompt apart, and the adapter that reads it."""
    return request.key, hashlib.blake2b(np.ascontiguousarray(request.prompt_ids).data, digest_size=16).digest()
