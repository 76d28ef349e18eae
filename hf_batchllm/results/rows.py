"""Rows of a result: how one is asked for, and what a repr says of all of them."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, overload

R = TypeVar("R")


class HasReport(Protocol):
    """A RunReport, as far as it says whether the call went to its end."""

    @property
    def sequences(self) -> int: ...
    @property
    def finished(self) -> int: ...


@overload
def picked(rows: list[R], key: int) -> R: ...
@overload
def picked(rows: list[R], key: slice) -> list[R]: ...
def picked(rows: list[R], key: Any) -> R | list[R]:
    """``rows[key]``, with errors that say what rows are asked for by."""
    try:
        found: R | list[R] = rows[key]
        return found
    except IndexError:
        last = f", 0 to {len(rows) - 1:,}" if rows else ""
        raise IndexError(f"there is no row {key}: the result has {counted(len(rows), 'row')}{last}") from None
    except TypeError:
        if not isinstance(key, str):
            raise TypeError(f"a row is asked for by its number or a slice, not by {key!r:.40}") from None
        how = f", as result[0].{key}" if rows and hasattr(rows[0], key) else ""
        raise TypeError(
            f"a row is asked for by its number, not by {key!r:.40}: first the row, then the field{how}"
        ) from None


def counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def headline(kind: str, count: int, thing: str, report: HasReport | None, is_slice: bool = False) -> str:
    """The first line of a repr. The rows of an interrupted call must not look like those of all prompts."""
    if report is None or report.finished >= report.sequences:
        return f"{kind} of {counted(count, thing)}"
    total = counted(report.sequences, thing)
    if is_slice:
        return f"{kind} of {counted(count, thing)}, a slice; interrupted, {report.finished:,} of {total} had finished"
    given = "contexts" if thing == "score" else "prompts"
    return f"{kind}, interrupted: {count:,} of {total}, not aligned with the {given} (see .index)"
