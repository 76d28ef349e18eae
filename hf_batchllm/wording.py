"""Words for messages: what a value is, a size, a list of choices. Recognizes tensors without importing torch."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import numpy as np

_MOST_CHARACTERS = 80  # of a value shown in a message


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # where torch is not loaded, nothing is a tensor
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or is_tensor(value)


def is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_)) or (is_tensor(value) and str(value.dtype) == "torch.bool")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number, np.bool_)) or (is_array(value) and value.ndim == 0)


def is_whole(value: Any) -> bool:
    """Whether it is an integer of any kind, NumPy's included, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def kind(value: Any) -> str:
    """The noun for a value: "tensor", "string", "dict"."""
    if is_tensor(value):
        return "tensor"
    if isinstance(value, np.ndarray):
        return "NumPy array"
    return "string" if isinstance(value, str) else type(value).__name__


def a_kind(value: Any) -> str:
    """The same with its article: "a tensor", "an int", "None"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = kind(value)
    if name == "bytes":
        return name
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def shown(value: Any) -> str:
    """The value as its owner would write it, cut off where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def either(names: Iterable[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str = "", *, cutoff: float = 0.6, form: str = "`{}`"
) -> str:
    """What follows "there is no such name": the nearest of those that are known, or else ``otherwise``."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {form.format(near[0])}?" if near else otherwise


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Names the digests that differ: ``other weights and another config``. What one of them lacks is not compared."""
    names = [name for name in one if name in other and one[name] != other[name]]
    words = [f"other {name}" if name.endswith("s") else f"another {name}" for name in names]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def in_ranges(numbers: Iterable[int], most: int) -> str:
    """``0-2, 7 and 5 more``: numbers in their order, in at most so many ranges."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    named = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges[:most])
    more = sum(last - first + 1 for first, last in ranges[most:])
    return f"{named}{f' and {more:,} more' if more else ''}"


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def shown_size(count: int, at_least: bool = False) -> str:
    """A number of bytes with its unit: "1.5 GiB". ``at_least``: rounded up, so that so much is enough."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            value = math.ceil(value * 10) / 10 if at_least else value
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError


def counted(count: int, what: str) -> str:
    """``1 token``, ``2,000 tokens``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
