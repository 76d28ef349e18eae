"""Answers that a generator has given, by their prompt: in a later call an answer may go on as one of them did."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque

import numpy as np

from ..planning.requests_and_prefixes import Request

_MOST_TOKENS = 8_000_000  # of all answers: 32 MB
_MOST_ANSWERS = 16  # of a prompt


class EarlierAnswers:
    """The latest answers to each prompt. Those to prompts that were not asked for longest go first."""

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
    """Of the prompt, and the adapter that reads it."""
    return request.key, hashlib.blake2b(np.ascontiguousarray(request.prompt_ids).data, digest_size=16).digest()
