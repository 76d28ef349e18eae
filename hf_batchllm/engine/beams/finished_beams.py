"""The best finished beams of searches so far: its answers, for those that stay to the end. Mostly they do not stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_NO_TOKEN = -1


class FinishedBeam(NamedTuple):
    """Empty while there are too few."""

    made: int = 0  # tokens of the beam that it was
    beam: int = 0  # its number among the beams of then
    token: int | None = None  # one more, with which it ended
    stopped: bool = False


class FinishedBeams:
    """Those of several searches, as arrays: in most steps each search has others, if only among equals.

    The tokens of those that stay are put together in the end.
    """

    def __init__(self, searches: int, width: int) -> None:
        # [searches, width, (made, beam, token, stopped)]  the best first
        self._found = np.zeros((searches, width, 4), dtype=np.int64)
        self._found[:, :, 2] = _NO_TOKEN

    def take(
        self,
        which: Sequence[int],
        made: Sequence[int],  # [searches]  new tokens of each beam
        answers: np.ndarray,  # [searches, width]  as in ``Choice``
        beams: np.ndarray,  # [searches, candidates]  the beam that each candidate goes on from
        tokens: np.ndarray | None = None,  # [searches, candidates]  None: the beams themselves are the candidates
        stopped: np.ndarray | None = None,  # [searches, candidates] bool  whether each ends with its token
    ) -> None:
        new = np.empty((*beams.shape, 4), dtype=np.int64)
        new[:, :, 0] = np.array(made)[:, None]
        new[:, :, 1] = beams
        new[:, :, 2] = _NO_TOKEN if tokens is None else tokens
        new[:, :, 3] = False if stopped is None else stopped
        every = np.concatenate([self._found[which], new], axis=1)
        self._found[which] = np.take_along_axis(every, answers[:, :, None], axis=1)

    def of(self, search: int) -> list[FinishedBeam]:  # [width]
        return [
            FinishedBeam(made, beam, None if token == _NO_TOKEN else token, bool(stopped))
            for made, beam, token, stopped in self._found[search].tolist()
        ]
