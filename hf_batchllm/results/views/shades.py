"""Which shade stands for how many prompts: numbers that a picture has are told apart, as far as there are shades."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .theme import SHADES


class Shades:
    """``members``: how many prompts share each block of the picture. More prompts have a higher shade, from 1 on."""

    def __init__(self, members: Iterable[float]) -> None:
        numbers = np.array(sorted(set(members)), float)
        self._groups = [group.tolist() for group in np.split(numbers, _cuts(np.log(numbers))) if len(group)]
        # Few shades lie apart: two are the second and the fourth, and not two neighbours.
        count = len(self._groups)
        self._shades = [1 + round((at + 0.5) * SHADES / count - 0.5) for at in range(count)]

    def of(self, members: float) -> int:
        at = sum(members > group[-1] for group in self._groups)
        return self._shades[min(at, len(self._shades) - 1)] if self._shades else 1

    def names(self) -> list[tuple[int, str]]:
        """For the legend: each shade, and the numbers that it stands for."""
        return [
            (shade, f"{group[0]:,.0f}" if len(group) == 1 else f"{group[0]:,.0f} – {group[-1]:,.0f}")
            for shade, group in zip(self._shades, self._groups, strict=True)
        ]


def _cuts(values: np.ndarray) -> list[int]:
    """Where to part sorted values into at most as many groups as there are shades, each as narrow as can be.

    The sum of squared distances to the groups' means is the least possible (Jenks' natural breaks).
    """
    count = len(values)
    if count <= SHADES:
        return list(range(1, count))
    sums, squares = (np.append(0.0, np.cumsum(each)) for each in (values, values**2))
    ends = np.arange(count + 1)

    def spread(end: int) -> np.ndarray:
        """Of the values from each beginning up to ``end``."""
        begins = ends[:end]
        spread: np.ndarray = squares[end] - squares[:end] - (sums[end] - sums[:end]) ** 2 / (end - begins)
        return spread

    least = np.append(0.0, np.array([spread(end)[0] for end in ends[1:]]))  # of the first values, in one group
    begin_of_last = []
    for _ in range(SHADES - 1):
        costs = [least[:end] + spread(end) for end in ends[1:]]
        begin_of_last.append([0, *(int(cost.argmin()) for cost in costs)])
        least = np.append(0.0, np.array([cost.min() for cost in costs]))
    cuts, end = [], count
    for begins in reversed(begin_of_last):
        end = begins[end]
        cuts.append(end)
    return sorted({cut for cut in cuts if cut > 0})
