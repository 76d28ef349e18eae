"""What people pass in -> ``Prompt(ids, key)``: checked completely, before any work, in the user's words.

A prompt is a string, a list of token ids, a 1-D tensor or array, or a chat. Lists of token ids are the bulk of
large inputs, so no Python loop walks over their tokens unless a prompt is already known to be bad.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import PromptError

A_PROMPT_IS = "a prompt is a string, a list of token ids, a 1-D tensor or a chat"
_PADDED_TENSOR = "a padded tensor goes to generate() by itself; here pass a list with the token ids of each prompt"
_ID_LIMIT = 2**31  # ids are kept as int32
_TOKENIZER_BATCH = 1024  # a fast tokenizer holds ~100 bytes a token until its call returns: bound that


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt, ready to run. ``ids`` is not empty."""

    ids: np.ndarray  # int32 [tokens], read-only
    key: Hashable = None  # adapter, media, salt: what makes equal ids unequal

    def __len__(self) -> int:
        return len(self.ids)


class _Refused(Exception):
    """Why one prompt cannot be run."""


def prepare_prompts(
    prompts: Any,
    *,
    tokenizer: Callable[[], Any] | None = None,
    vocab_size: int | None = None,
    max_length: int | None = None,
    key: Hashable = None,
) -> list[Prompt]:
    """All of ``prompts``, or a ``PromptError`` that names every bad one. Arguments as in ``check_prompts``."""
    checked, problems = check_prompts(
        prompts, tokenizer=tokenizer, vocab_size=vocab_size, max_length=max_length, key=key
    )
    if problems:
        raise PromptError(problems)
    return [prompt for prompt in checked if prompt is not None]


def check_prompts(
    prompts: Any,
    *,
    tokenizer: Callable[[], Any] | None = None,
    vocab_size: int | None = None,
    max_length: int | None = None,
    key: Hashable = None,
) -> tuple[list[Prompt | None], dict[int, str]]:
    """Each prompt, or None where it cannot be run; and, for those, the reason by index.

    ``tokenizer`` is a function without arguments that *returns* the tokenizer (or raises); it is called once, and only
    when a string or a chat is met. ``vocab_size`` bounds the ids, ``max_length`` the tokens of one prompt.
    A ``prompts`` that is not a list of prompts at all is a ``TypeError``.
    """
    given = _as_list(prompts)
    id_limit = _ID_LIMIT if vocab_size is None else min(vocab_size, _ID_LIMIT)
    checked: list[Prompt | None] = [None] * len(given)
    problems: dict[int, str] = {}
    texts: list[int] = []
    chats: list[int] = []

    def settle(index: int, ids: Any) -> None:
        try:
            packed = _packed_ids(ids, id_limit)
            if max_length is not None and len(packed) > 4 * max_length:
                raise _Refused(f"has {len(packed) // 4} tokens, more than the {max_length} that fit")
        except _Refused as refusal:
            problems[index] = str(refusal)
        else:
            # An array over immutable bytes is read-only, and the plan sorts those same bytes without a copy.
            checked[index] = Prompt(np.frombuffer(packed, np.int32), key)

    with garbage_collection_paused():
        for index, prompt in enumerate(given):
            if isinstance(prompt, str):
                texts.append(index)
            elif _is_chat(prompt):
                chats.append(index)
            else:
                settle(index, prompt)

    if texts or chats:
        loaded = tokenizer() if tokenizer is not None else None
        for indices, kind, encode in ((texts, "string", _encode_texts), (chats, "chat", _encode_chats)):
            if loaded is None:
                problems.update(dict.fromkeys(indices, f"is a {kind}, and there is no tokenizer; pass `tokenizer=`"))
                continue
            for index, ids in zip(indices, _encoded([given[i] for i in indices], loaded, encode), strict=True):
                if isinstance(ids, Exception):
                    problems[index] = f"is a {kind} that the tokenizer refused: {_first_line(ids)}"
                else:
                    settle(index, ids)
    return checked, problems


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """For work that makes many objects and no cycles.

    Its objects set off full collections, and each of them walks over every token of a large list: seconds for nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _as_list(prompts: Any) -> Sequence[Any]:
    """The prompts one by one; a bare prompt is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype.kind in "UO":
        prompts = prompts.tolist()  # a column of strings or of lists, not of token ids
    if _is_array(prompts):
        if prompts.ndim != 1:
            raise TypeError(f"prompts is a {prompts.ndim}-D {_kind(prompts)}; {_PADDED_TENSOR}")
        return [prompts]
    if isinstance(prompts, Mapping):
        if "input_ids" in prompts:
            raise TypeError(
                f"prompts is a {_kind(prompts)}; pass the texts themselves, or a list of token ids for each prompt"
            )
        hint = "; a chat is a list of such messages" if "role" in prompts else ""
        raise TypeError(f"prompts is a {_kind(prompts)}{hint}; {A_PROMPT_IS}")
    if isinstance(prompts, (Set, bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts is {_a(prompts)}; pass a list of prompts, where {A_PROMPT_IS}")
    listed = prompts if isinstance(prompts, (list, tuple)) else list(prompts)
    return [listed] if _is_bare(listed) else listed


def _is_bare(listed: Sequence[Any]) -> bool:
    """Whether the list is one prompt (token ids, or a chat) rather than a list of prompts."""
    if _is_chat(listed):
        return True
    # With a string or a list among the numbers it is a list of prompts with some bad ones.
    return bool(listed) and _is_number(listed[0]) and all(_is_number(item) or item is None for item in listed)


def _is_chat(prompt: Any) -> bool:
    if not isinstance(prompt, (list, tuple)) or not prompt or not isinstance(prompt[0], Mapping):
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in prompt)


def _encoded(
    items: list[Any], tokenizer: Any, encode: Callable[[Any, list[Any]], Sequence[Any]]
) -> Iterator[Any | Exception]:
    """The token ids of each item, or what the tokenizer raised for that item."""
    for begin in range(0, len(items), _TOKENIZER_BATCH):
        batch = items[begin : begin + _TOKENIZER_BATCH]
        try:
            rows = list(encode(tokenizer, batch))
        except Exception:
            rows = [_encoded_alone(item, tokenizer, encode) for item in batch]
        if len(rows) != len(batch):
            raise TypeError(f"the tokenizer gave {len(rows)} rows for {len(batch)} prompts; pass another `tokenizer=`")
        yield from rows


def _encoded_alone(item: Any, tokenizer: Any, encode: Callable[[Any, list[Any]], Sequence[Any]]) -> Any | Exception:
    try:
        (ids,) = encode(tokenizer, [item])
    except Exception as error:
        return error
    return ids


def _encode_texts(tokenizer: Any, texts: list[str]) -> Sequence[Any]:
    return tokenizer(texts)["input_ids"]


def _encode_chats(tokenizer: Any, chats: list[Any]) -> Sequence[Any]:
    encoded = tokenizer.apply_chat_template(
        [list(chat) for chat in chats], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    # Multimodal processors, and tokenizers with a method of their own, return a dict whatever was asked.
    return encoded["input_ids"] if isinstance(encoded, Mapping) else encoded


def _packed_ids(prompt: Any, id_limit: int) -> bytes:
    """The token ids as int32 in native byte order; raises ``_Refused`` unless each is an integer in range."""
    if isinstance(prompt, (list, tuple)):
        return _packed_list(prompt, id_limit)
    if not _is_array(prompt):
        raise _Refused(f"is {_a(prompt)}; {A_PROMPT_IS}")
    if prompt.ndim != 1:
        raise _Refused(f"is a {prompt.ndim}-D {_kind(prompt)}; {_PADDED_TENSOR}")
    values = prompt if isinstance(prompt, np.ndarray) else _to_numpy(prompt)
    if values.size == 0:
        raise _Refused("is empty: it has no token ids")
    if values.dtype.kind not in "iu":
        raise _Refused(f"is a {_kind(prompt)} of {prompt.dtype}; token ids are integers")
    if int(values.min()) < 0 or int(values.max()) >= id_limit:
        position = int(np.argmax((values < 0) | (values >= id_limit)))
        raise _Refused(_out_of_range(int(values[position]), position, id_limit))
    return values.astype(np.int32).tobytes()


def _packed_list(ids: Sequence[Any], id_limit: int) -> bytes:
    if not ids:
        raise _Refused("is empty: it has no token ids")
    try:
        # "I" is twice as fast as "i" and refuses floats and negative numbers; what is too large is seen below.
        packed = array("I", ids)
    except (TypeError, ValueError, OverflowError):
        raise _Refused(_first_bad_element(ids, id_limit)) from None
    values = np.frombuffer(packed, np.uint32)
    # A bool passes for 0 or 1, so only those places are looked at.
    if values.max() >= id_limit or (
        values.min() <= 1 and any(_is_bool(ids[position]) for position in np.flatnonzero(values <= 1).tolist())
    ):
        raise _Refused(_first_bad_element(ids, id_limit))
    return packed.tobytes()


def _first_bad_element(ids: Sequence[Any], id_limit: int) -> str:
    """Says what is wrong with a list already known to be bad, so it may take its time."""
    for position, item in enumerate(ids):
        if item is None:
            return f"holds None at position {position}, where a token id should be"
        if isinstance(item, Mapping):
            return f"holds {_a(item)} at position {position}; a chat is a list of messages, each with a 'role'"
        if isinstance(item, str):
            return f"holds a string at position {position}; give each string as a prompt of its own"
        if isinstance(item, (list, tuple)) or (_is_array(item) and item.ndim > 0):
            return f"holds {_a(item)} at position {position}; the token ids of a prompt are a flat list"
        try:
            value = None if _is_bool(item) else item.__index__()
        except (AttributeError, TypeError, ValueError):
            value = None
        if value is None:
            return f"holds {item!r} at position {position}, {_a(item)}; token ids are integers"
        if not 0 <= value < id_limit:
            return _out_of_range(value, position, id_limit)
    return f"holds something that is not a token id; {A_PROMPT_IS}"


def _out_of_range(value: int, position: int, id_limit: int) -> str:
    if value < 0:
        return f"token id {value} at position {position} is negative"
    if id_limit == _ID_LIMIT:
        return f"token id {value} at position {position} does not fit in 32 bits"
    return f"token id {value} at position {position} is outside the model's vocabulary of {id_limit}"


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # no tensor without torch, and no need to import it to find out
    return torch is not None and isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _to_numpy(tensor: Any) -> np.ndarray:
    if tensor.is_floating_point() or tensor.is_complex():
        return np.zeros(len(tensor))  # refused for its dtype; NumPy has no bfloat16 to convert it to
    return tensor.detach().cpu().numpy()


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_)) or (_is_tensor(value) and str(value.dtype) == "torch.bool")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number, np.bool_)) or (_is_array(value) and value.ndim == 0)


def _kind(value: Any) -> str:
    if _is_tensor(value):
        return "tensor"
    return "NumPy array" if isinstance(value, np.ndarray) else type(value).__name__


def _a(value: Any) -> str:
    if value is None:
        return "None"
    kind = _kind(value)
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
