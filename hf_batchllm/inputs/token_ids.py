"""Token ids -> bytes, int32: each is an integer in range, or the prompt is bad, for a reason in the user's words.

Each list is packed alone, and many are looked through at once: a call of NumPy's takes as long as hundreds of ids in
it. A Python loop walks over the few ids that may be bad, and over a whole list only once it is known to be bad.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..wording import a_kind, first_line, is_array, is_bool, kind, shown
from .garbage_collection import garbage_collection_paused
from .not_prompts import A_PROMPT_IS, PADDED_TENSOR, describe_mapping

ID_LIMIT = 2**31  # ids are kept as int32
_BATCH_BYTES = 1 << 19  # of ids that are looked through at once: what a core's cache does not hold takes longer


@dataclass(frozen=True, slots=True)
class BadPrompt:
    """Stands where the ids of a prompt would be."""

    why: str  # in words that follow "prompt 3"


class NoTokens(BadPrompt):
    __slots__ = ()


class OutsideVocabulary(BadPrompt):
    __slots__ = ()


def bytes_of(ids: np.ndarray) -> bytes:  # int32 [tokens]
    """The bytes of a prompt's ids, without a copy where its array was made over them."""
    base: object = ids.base
    if isinstance(base, bytes) and len(base) == ids.nbytes:
        return base
    return np.ascontiguousarray(ids, np.int32).tobytes()


def packed_ids(prompts: Iterable[Any], id_limit: int) -> Iterator[bytes | BadPrompt]:
    """The ids of each prompt as int32 in native byte order, or why it cannot be run.

    ``prompts``: token ids, or what was passed in place of them. A ``BadPrompt`` among them comes out as it is. They are
    read some way ahead of what comes out.
    """
    read: list[bytes | BadPrompt] = []
    lists: dict[int, Sequence[Any]] = {}  # those with ids that may be bad, by their place in `read`
    size = 0
    for prompt in prompts:
        if isinstance(prompt, (list, tuple)):
            packed = _packed_list(prompt, id_limit)
            if isinstance(packed, bytes):
                lists[len(read)] = prompt
        else:
            packed = prompt if isinstance(prompt, BadPrompt) else _packed_array(prompt, id_limit)
        read.append(packed)
        size += len(packed) if isinstance(packed, bytes) else 0
        if size >= _BATCH_BYTES:
            _look_through(lists, read, id_limit)
            yield from read
            read, lists, size = [], {}, 0
    _look_through(lists, read, id_limit)
    yield from read


def with_arrays(prompts: Sequence[Any]) -> list[Any]:
    """The prompts, with an int32 array of its own in the place of each that is token ids: it is sent much sooner.

    Whatever holds no good ids stays as it is, for whoever says what is wrong with it.
    """
    with garbage_collection_paused():
        return [
            np.frombuffer(ids, np.int32) if isinstance(ids, bytes) else prompt
            for prompt, ids in zip(prompts, packed_ids(prompts, ID_LIMIT), strict=True)
        ]


def _packed_list(ids: Sequence[Any], id_limit: int) -> bytes | BadPrompt:
    """Ids that are too large, and bools, are among them still."""
    if not ids:
        return NoTokens("is empty: it has no token ids")
    try:
        # "I" is twice as fast as "i" and refuses floats and negative numbers.
        return array("I", ids).tobytes()
    except (TypeError, ValueError, OverflowError):
        return _first_bad_element(ids, id_limit)


def _look_through(lists: Mapping[int, Sequence[Any]], packed: list[Any], id_limit: int) -> None:
    """Put a ``BadPrompt`` in the place of each of the ``packed`` lists that holds a bool or an id that is too large."""
    if not lists:
        return
    parts = [packed[place] for place in lists]
    values = np.frombuffer(b"".join(parts), np.uint32)
    # A bool is packed as 0 or 1. Less 2, these two wrap around, so that they are beyond the limit as well.
    odd = np.flatnonzero(values - np.uint32(2) >= max(id_limit - 2, 0))
    if not len(odd):
        return
    lengths = np.array([len(part) // 4 for part in parts])
    ends = np.cumsum(lengths)
    which = np.searchsorted(ends, odd, "right")
    places = np.array([*lists])[which]
    positions = odd - (ends - lengths)[which]
    large = values[odd] >= id_limit
    bad = set(places[large].tolist())
    for place, position in zip(places[~large].tolist(), positions[~large].tolist(), strict=True):
        item = lists[place][position]
        if type(item) is not int and is_bool(item):
            bad.add(place)
    for place in bad:
        packed[place] = _first_bad_element(lists[place], id_limit)


def _packed_array(prompt: Any, id_limit: int) -> bytes | BadPrompt:
    """The ids of an array or a tensor; whatever else it is, is no prompt."""
    if isinstance(prompt, Mapping):
        return BadPrompt(f"is {describe_mapping(prompt)}")
    if isinstance(prompt, (float, np.floating)) and np.isnan(prompt):
        return BadPrompt(f"is NaN, as missing values are; {A_PROMPT_IS}")
    if not is_array(prompt):
        return BadPrompt(f"is {a_kind(prompt)}; {A_PROMPT_IS}")
    if prompt.ndim != 1:
        return BadPrompt(f"is a {prompt.ndim}-D {kind(prompt)}; {PADDED_TENSOR}")
    try:
        values = prompt if isinstance(prompt, np.ndarray) else _to_numpy(prompt)
    except (TypeError, RuntimeError, NotImplementedError) as error:  # sparse, say, or on the meta device
        return BadPrompt(f"is a tensor that cannot be read: {first_line(error)}")
    if values.size == 0:
        return NoTokens("is empty: it has no token ids")
    if values.dtype.kind not in "iu":
        return BadPrompt(f"is a {kind(prompt)} of {prompt.dtype}; token ids are integers")
    if int(values.min()) < 0 or int(values.max()) >= id_limit:
        position = int(np.argmax((values < 0) | (values >= id_limit)))
        return _out_of_range(int(values[position]), position, id_limit)
    return values.astype(np.int32).tobytes()


def _first_bad_element(ids: Sequence[Any], id_limit: int) -> BadPrompt:
    """What is wrong with a list that is known to be bad; slow is fine here."""
    for position, item in enumerate(ids):
        if item is None:
            return BadPrompt(f"holds None at position {position}, where a token id should be")
        if isinstance(item, str):
            return BadPrompt(f"holds a string at position {position}; give each string as a prompt of its own")
        if isinstance(item, (list, tuple, Mapping)) or (is_array(item) and item.ndim > 0):
            return BadPrompt(f"holds {a_kind(item)} at position {position}; the token ids of a prompt are a flat list")
        try:
            value = None if is_bool(item) else item.__index__()
        except (AttributeError, TypeError, ValueError):
            value = None
        if value is None:
            return BadPrompt(f"holds {shown(item)} at position {position}, {a_kind(item)}; token ids are integers")
        if not 0 <= value < id_limit:
            return _out_of_range(value, position, id_limit)
    return BadPrompt(f"holds something that is not a token id; {A_PROMPT_IS}")


def _out_of_range(value: int, position: int, id_limit: int) -> BadPrompt:
    if value < 0:
        return BadPrompt(f"has token id {value} at position {position}; token ids are not negative")
    if id_limit == ID_LIMIT:
        return BadPrompt(f"has token id {value} at position {position}, which does not fit in 32 bits")
    return OutsideVocabulary(
        f"has token id {value} at position {position}, outside the model's vocabulary of {id_limit}"
    )


def _to_numpy(tensor: Any) -> np.ndarray:
    if tensor.is_floating_point() or tensor.is_complex():
        return np.zeros(len(tensor))  # refused later for its dtype; bfloat16 cannot be converted to NumPy
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array
