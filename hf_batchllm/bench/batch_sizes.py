"""The batch size that serves a rival best."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def fastest_batch_size(
    name: str,
    sizes: Iterable[int],
    most: int,
    speed_of: Callable[[int], float],
    *,
    slower: float | None,
) -> tuple[int, dict[int, float]]:
    """The size with the highest speed, and the speed of each size tried, from small to large.

    name: of the rival, for messages.
    most: larger sizes count as this one.
    slower: larger sizes are not tried once one is slower than the best by this factor; None tries all of them.

    A size that fails ends the search: mostly it runs out of memory, and larger sizes need more. If the first one fails
    its error is raised.
    """
    speeds: dict[int, float] = {}
    for size in sorted({min(size, most) for size in sizes}):
        try:
            speeds[size] = speed_of(size)
        except Exception as error:
            if not speeds:
                raise
            print(f"{name}, batches of {size}: {type(error).__name__}")
            break
        print(f"{name}, batches of {size}: {speeds[size]:.2f}/s", flush=True)  # a long run may be cut off
        if slower is not None and speeds[size] * slower < max(speeds.values()):
            break
    return max(speeds, key=speeds.__getitem__), speeds


def speeds_line(name: str, unit: str, speeds: dict[int, float]) -> str:
    """One line for a table's foot: the speed of each batch size tried."""
    return f"{name}, {unit} by batch size: {', '.join(f'{size}: {speed:.2f}' for size, speed in speeds.items())}"
