"""The seed of each prompt's sampling noise: the call's, or one of the prompt's own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import OptionValueError
from ..wording import is_array, shown
from .option_values import check_one_for_each


@dataclass(frozen=True)
class SeedOfWhole:
    """The seed of a whole list of which a call runs some prompts: their noise is that of a call with all of them."""

    seed: int
    numbers: Sequence[int]  # of each prompt of the call, its number in the whole list


Seeds = int | Sequence[int] | SeedOfWhole  # one for all prompts, or one for each

_WHOLE = "a whole number from 0 to 2**64 - 1"


def noise_key(seeds: Seeds, index: int) -> tuple[int, int]:
    """The seed of a prompt's noise, and the prompt's number among all prompts with this seed.

    A prompt with a seed of its own is always number 0: its place in the list makes no difference.
    """
    if isinstance(seeds, SeedOfWhole):
        return seeds.seed, seeds.numbers[index]
    return (seeds, index) if isinstance(seeds, int) else (seeds[index], 0)


def without_numbers(seeds: Seeds | None) -> int | Sequence[int] | None:
    """The seed as a report names it."""
    return seeds.seed if isinstance(seeds, SeedOfWhole) else seeds


def as_int64(seed: int) -> int:
    """The same 64 bits as a signed integer, which is what PyTorch takes."""
    return (seed + 2**63) % 2**64 - 2**63


def checked_seeds(given: Any, prompts: int) -> Seeds:
    """``given`` as integers: one, or as many as there are ``prompts``; OptionValueError for anything else."""
    if isinstance(given, SeedOfWhole):
        assert len(given.numbers) == prompts
        return given
    each = given.tolist() if is_array(given) else list(given) if isinstance(given, list | tuple | range) else given
    if not isinstance(each, list):
        return _checked(given)
    check_one_for_each("seed", each, prompts)
    return [_checked(seed, index) for index, seed in enumerate(each)]


def _checked(seed: Any, index: int | None = None) -> int:
    try:
        number = operator.index(seed)  # NumPy's integers, too
    except TypeError:
        number = -1
    if not isinstance(seed, bool) and 0 <= number < 2**64:
        return number
    if index is None:
        raise OptionValueError("seed", f"must be {_WHOLE}, not {shown(seed)}; or a list of them, one for each prompt")
    raise OptionValueError("seed", f"must be {_WHOLE} for each prompt, not {shown(seed)} as for prompt {index}")
