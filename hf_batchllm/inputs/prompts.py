"""The user's prompts -> ``Prompt(ids, key)``: checked completely before any work, with errors in the user's words.

A prompt is a string, a list of token ids, a 1-D tensor or array, or a chat. Large inputs are mostly
lists of token ids, so no Python loop walks over the tokens of a prompt before the prompt is known to be bad.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import PromptError, PromptsTypeError, TokenizerError
from ..notices import Notices
from ..wording import a_kind, first_line, is_array, is_bool, is_number, kind, shown
from .chats import (
    NO_TEMPLATE,
    chat_problem,
    in_groups,
    is_bare_chat,
    is_chat,
    is_message,
    warn_of_idle_options,
    warn_of_one_chat,
)
from .garbage_collection import garbage_collection_paused
from .long_prompts import shortened, warn_of_cuts
from .preparing import tokenizing_bar
from .prompt_options import names_for_each, options_of_each

A_PROMPT_IS = "a prompt is a string, a list of token ids, a 1-D tensor or a chat"
_PADDED_TENSOR = "a padded tensor goes to generate() by itself; here pass a list with the token ids of each prompt"
_ID_LIMIT = 2**31  # ids are kept as int32
_COLUMNS = ("messages", "prompt_token_ids", "prompt", "text", "question", "instruction")  # usual names in data sets
_Encode = Callable[[Any, list[Any]], Sequence[Any]]  # (tokenizer, prompts) -> the token ids of each
_NO_MASKS = {"return_attention_mask": False, "return_token_type_ids": False}
_TOKENIZER_BATCH = 1024  # texts in one call: a fast tokenizer holds ~100 bytes a token until its call returns


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt, ready to run. ``ids`` is not empty."""

    ids: np.ndarray  # int32 [tokens], read-only
    key: Hashable = None  # an adapter, say: prompts share a prefix only where their keys are equal

    def __len__(self) -> int:
        return len(self.ids)


class _BadPrompt(Exception):
    """One prompt cannot be run; the message is the reason."""


class _NoTokens(_BadPrompt):
    pass


class _OutsideVocabulary(_BadPrompt):
    pass


def prepare_prompts(prompts: Any, **options: Any) -> list[Prompt]:
    """Every prompt, or a ``PromptError`` that names every bad one. ``options`` as in ``check_prompts``."""
    checked, problems = check_prompts(prompts, **options)
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
    notices: Notices | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[list[Prompt | None], dict[int, str]]:
    """Each prompt, or None where it cannot be run; and the reason for each of these, by index.

    ``tokenizer`` is a function without arguments that *returns* the tokenizer (or raises); it is called once, and only
    if there is a string or a chat. ``vocab_size`` bounds the ids, ``max_length`` the tokens of one prompt. ``options``
    are those of ``take_prompt_options``.
    A ``prompts`` that is not a list of prompts at all is a ``PromptsTypeError``.
    """
    given = as_list(prompts)
    each = options_of_each(options or {}, len(given))
    notices = notices or Notices()
    warn_of_one_chat(prompts, given, notices)
    id_limit = _ID_LIMIT if vocab_size is None else min(vocab_size, _ID_LIMIT)
    checked: list[Prompt | None] = [None] * len(given)
    problems: dict[int, str] = {}
    texts: list[int] = []
    chats: list[int] = []
    lengths: dict[int, int] = {}  # of prompts that are cut, before they are
    around: Sequence[int] = ()  # the special tokens that a text gets

    def pack(index: int, ids: Any) -> None:
        most = each[index].max_prompt_tokens
        try:
            packed = _packed_ids(ids, id_limit)
            if most is not None and len(packed) > 4 * most:
                lengths[index] = len(packed) // 4
                whole = np.frombuffer(packed, np.int32)
                ends = isinstance(given[index], str)
                packed = shortened(whole, most, each[index].truncation_side, around, ends).tobytes()
            if max_length is not None and len(packed) > 4 * max_length:
                raise _BadPrompt(f"has {len(packed) // 4} tokens, more than the {max_length} that fit")
        except _BadPrompt as bad:
            problems[index] = _for_user(given[index], bad)
        else:
            # An array over immutable bytes is read-only, and the plan sorts those same bytes without a copy.
            checked[index] = Prompt(np.frombuffer(packed, np.int32), key)

    with garbage_collection_paused():
        for index, prompt in enumerate(given):
            if isinstance(prompt, str):
                texts.append(index)
            elif is_chat(prompt):
                why = chat_problem(prompt, each[index])
                if why is None:
                    chats.append(index)
                else:
                    problems[index] = why
            else:
                pack(index, prompt)

    loaded = None
    if texts or chats:
        loaded, missing = _loaded(tokenizer)
        if loaded is not None and "max_prompt_tokens" in (options or {}):
            around = _around_a_text(loaded)
        encoders: list[tuple[list[int], _Encode]] = [(texts, _encode_texts), *in_groups(given, chats, each)]
        for indices, encode in encoders:
            if loaded is None:
                problems.update((index, f"is {_described(given[index])}, and {missing}") for index in indices)
                continue
            for index, ids in zip(indices, _encoded([given[i] for i in indices], loaded, encode), strict=True):
                if isinstance(ids, Exception):
                    problems[index] = refused_by_tokenizer(given[index], loaded, ids)
                else:
                    pack(index, ids)
        empty = next((index for index in texts if given[index] == "" and checked[index] is not None), None)
        if empty is not None:
            named = f"{'the prompt of ' if notices.has_names else ''}{notices.places([empty])}"
            notices("empty", f"{named} is an empty string: the model sees only the tokenizer's special tokens")
    if options:
        all_chats = [index for index, prompt in enumerate(given) if is_chat(prompt)]
        # Lines of a file were written one by one. Lists in a call may well be made for all prompts by one rule.
        for_each = names_for_each(options) if notices.has_names else ()
        warn_of_idle_options(each, all_chats, loaded, notices, for_each)
    warn_of_cuts(lengths, len(given), notices)
    return checked, problems


def as_list(prompts: Any, name: str = "prompts") -> Sequence[Any]:
    """The prompts as a list; a single prompt becomes a list of one. ``name``: the argument's name in errors."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype.kind in "UTO":
        prompts = prompts.tolist()  # a column of strings or of lists, not of token ids
    if is_array(prompts):
        if prompts.ndim == 0:
            raise PromptsTypeError(f"{name} is a 0-D {kind(prompts)}; {A_PROMPT_IS}")
        if prompts.ndim != 1:
            raise PromptsTypeError(f"{name} is a {prompts.ndim}-D {kind(prompts)}; {_PADDED_TENSOR}")
        return [prompts]
    why = why_not_a_list(prompts)
    if why is not None:
        raise PromptsTypeError(f"{name} is {why}")
    listed = prompts if isinstance(prompts, (list, tuple)) else read_all(prompts)
    return [listed] if _is_one_prompt(listed) else listed


def why_not_a_list(prompts: Any, a_prompt_is: str = A_PROMPT_IS) -> str | None:
    """What ``prompts`` is instead, with advice, if it cannot be read prompt by prompt."""
    if isinstance(prompts, Mapping):
        return describe_mapping(prompts, a_prompt_is)
    columns = getattr(prompts, "columns", None)
    if columns is None:
        columns = getattr(prompts, "column_names", None)
    if columns is not None and not isinstance(prompts, (list, tuple)):
        # Iterating over a table gives the names of its columns, or its rows as dicts.
        names = [name for name in columns if isinstance(name, str)] if isinstance(columns, Iterable) else []
        column = next((name for name in (*_COLUMNS, *names) if name in names), "text")
        return f"{a_kind(prompts)}; pass one of its columns, such as prompts[{column!r}]"
    if isinstance(prompts, (itertools.count, itertools.cycle)):
        return f"{a_kind(prompts)}, which never ends; pass a list of prompts (itertools.islice cuts one off)"
    bad = (set, frozenset, bytes, bytearray, memoryview, type)
    if isinstance(prompts, bad) or not isinstance(prompts, Iterable):
        hint = " (decode them first)" if isinstance(prompts, (bytes, bytearray)) else ""
        hint = " (a set has no order)" if isinstance(prompts, (set, frozenset)) else hint
        return f"{a_kind(prompts)}{hint}; pass a list of prompts, where {a_prompt_is}"
    return None


def describe_mapping(given: Mapping[Any, Any], a_prompt_is: str = A_PROMPT_IS) -> str:
    """What a mapping in place of a prompt seems to be, and what to pass instead."""
    if "input_ids" in given:
        return f"{a_kind(given)}; pass the texts themselves, or the token ids in its 'input_ids'"
    if is_message(given):
        return f"{a_kind(given)}; a chat is a list of such messages: [{{'role': ..., 'content': ...}}]"
    column = next((name for name in _COLUMNS if name in given), None)
    if column is not None:
        return f"{a_kind(given)}; pass its value for {column!r}"
    return f"{a_kind(given)}; {a_prompt_is}, and several are a list"


def read_all(prompts: Iterable[Any]) -> list[Any]:
    """All prompts of an iterator; an error that it raises gets a note with the place."""
    listed: list[Any] = []
    try:
        listed.extend(prompts)
    except Exception as error:
        error.add_note(f"raised by the iterator of prompts when it was asked for prompt {len(listed)}")
        raise
    return listed


def _is_one_prompt(listed: Sequence[Any]) -> bool:
    """Whether the list is one prompt (token ids, or a chat) rather than a list of prompts."""
    if is_bare_chat(listed):
        return True
    # A string or a list among the numbers makes it a list of prompts, of which some are bad.
    return bool(listed) and is_number(listed[0]) and all(is_number(item) or item is None for item in listed)


def _loaded(tokenizer: Callable[[], Any] | None) -> tuple[Any, str]:
    """The tokenizer, or why there is none."""
    try:
        loaded = None if tokenizer is None else tokenizer()
    except TokenizerError as error:
        return None, str(error)
    if loaded is not None and not callable(loaded):
        return None, f"`tokenizer` is {a_kind(loaded)}: pass what AutoTokenizer.from_pretrained gives"
    return loaded, "there is no tokenizer: pass `tokenizer=`"


def _described(prompt: Any) -> str:
    return "a string" if isinstance(prompt, str) else "a chat"


def _for_user(prompt: Any, bad: _BadPrompt) -> str:
    """The reason in terms of the user's own prompt, which may be a text or a chat."""
    if not isinstance(prompt, str) and not is_chat(prompt):
        return str(bad)
    if isinstance(bad, _NoTokens):
        return f"is {'an empty string' if prompt == '' else _described(prompt)}, of which the tokenizer makes no tokens"
    if isinstance(bad, _OutsideVocabulary):
        return f"{bad}: is it another model's tokenizer, or has it more tokens than the model's embedding?"
    return str(bad)


def refused_by_tokenizer(prompt: Any, tokenizer: Any, error: Exception) -> str:
    """Why the tokenizer could not encode a prompt, in words that follow "prompt 3"."""
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as half:
            return f"is a string with half a character (a lone surrogate) at position {half.start}"
    # Some tokenizers need no template, so a missing one is reported only after they have failed.
    elif not hasattr(tokenizer, "apply_chat_template") or (
        getattr(tokenizer, "chat_template", None) is None
        and "chat_template" in str(error)
        and not isinstance(error, TypeError)  # a method of its own, without an option that was passed
    ):
        return f"is a chat, and {NO_TEMPLATE}"
    return f"is {_described(prompt)} that the tokenizer refused: {first_line(error)}"


def _encoded(items: list[Any], tokenizer: Any, encode: _Encode) -> Iterator[Any | Exception]:
    """The token ids of each item, or what the tokenizer raised for that item."""
    with tokenizing_bar(len(items)) as told:
        for begin in range(0, len(items), _TOKENIZER_BATCH):
            batch = items[begin : begin + _TOKENIZER_BATCH]
            try:
                rows = list(encode(tokenizer, batch))
            except Exception:
                rows = [_encoded_alone(item, tokenizer, encode) for item in batch]
            if len(rows) != len(batch):
                raise TokenizerError(
                    f"the tokenizer gave {len(rows)} rows for {len(batch)} prompts: pass another tokenizer"
                )
            yield from rows
            told(len(batch))


def _encoded_alone(item: Any, tokenizer: Any, encode: _Encode) -> Any | Exception:
    try:
        (ids,) = encode(tokenizer, [item])
    except Exception as error:
        return error
    return ids


def _encode_texts(tokenizer: Any, texts: list[str]) -> Sequence[Any]:
    # A processor for several media takes images first; it holds the tokenizer.
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    call = getattr(type(tokenizer).__call__, "__module__", "") if callable(tokenizer) else ""
    # Transformers' own makes these lists unasked, in half of its time, and nobody reads them.
    beside = _NO_MASKS if call == "transformers.tokenization_utils_base" else {}
    encoded: Sequence[Any] = tokenizer(texts, **beside)["input_ids"]
    return encoded


def _around_a_text(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts around every text."""
    try:
        return list(_encode_texts(tokenizer, [""])[0])
    except Exception:  # it takes no empty text
        return []


def _packed_ids(prompt: Any, id_limit: int) -> bytes:
    """The token ids as int32 in native byte order; raises ``_BadPrompt`` unless each is an integer in range."""
    if isinstance(prompt, (list, tuple)):
        return _packed_list(prompt, id_limit)
    if isinstance(prompt, Mapping):
        raise _BadPrompt(f"is {describe_mapping(prompt)}")
    if isinstance(prompt, (float, np.floating)) and np.isnan(prompt):
        raise _BadPrompt(f"is NaN, as missing values are; {A_PROMPT_IS}")
    if not is_array(prompt):
        raise _BadPrompt(f"is {a_kind(prompt)}; {A_PROMPT_IS}")
    if prompt.ndim != 1:
        raise _BadPrompt(f"is a {prompt.ndim}-D {kind(prompt)}; {_PADDED_TENSOR}")
    try:
        values = prompt if isinstance(prompt, np.ndarray) else _to_numpy(prompt)
    except (TypeError, RuntimeError, NotImplementedError) as error:  # sparse, say, or on the meta device
        raise _BadPrompt(f"is a tensor that cannot be read: {first_line(error)}") from None
    if values.size == 0:
        raise _NoTokens("is empty: it has no token ids")
    if values.dtype.kind not in "iu":
        raise _BadPrompt(f"is a {kind(prompt)} of {prompt.dtype}; token ids are integers")
    if int(values.min()) < 0 or int(values.max()) >= id_limit:
        position = int(np.argmax((values < 0) | (values >= id_limit)))
        raise _out_of_range(int(values[position]), position, id_limit)
    return values.astype(np.int32).tobytes()


def _packed_list(ids: Sequence[Any], id_limit: int) -> bytes:
    if not ids:
        raise _NoTokens("is empty: it has no token ids")
    try:
        # "I" is twice as fast as "i" and refuses floats and negative numbers; too large ids are found below.
        packed = array("I", ids)
    except (TypeError, ValueError, OverflowError):
        raise _first_bad_element(ids, id_limit) from None
    values = np.frombuffer(packed, np.uint32)
    # A bool is packed as 0 or 1, so only ids of 0 and 1 are checked.
    if values.max() >= id_limit or (
        values.min() <= 1 and any(is_bool(ids[position]) for position in np.flatnonzero(values <= 1).tolist())
    ):
        raise _first_bad_element(ids, id_limit)
    return packed.tobytes()


def _first_bad_element(ids: Sequence[Any], id_limit: int) -> _BadPrompt:
    """What is wrong with a list that is known to be bad; slow is fine here."""
    for position, item in enumerate(ids):
        if item is None:
            return _BadPrompt(f"holds None at position {position}, where a token id should be")
        if isinstance(item, str):
            return _BadPrompt(f"holds a string at position {position}; give each string as a prompt of its own")
        if isinstance(item, (list, tuple, Mapping)) or (is_array(item) and item.ndim > 0):
            return _BadPrompt(f"holds {a_kind(item)} at position {position}; the token ids of a prompt are a flat list")
        try:
            value = None if is_bool(item) else item.__index__()
        except (AttributeError, TypeError, ValueError):
            value = None
        if value is None:
            return _BadPrompt(f"holds {shown(item)} at position {position}, {a_kind(item)}; token ids are integers")
        if not 0 <= value < id_limit:
            return _out_of_range(value, position, id_limit)
    return _BadPrompt(f"holds something that is not a token id; {A_PROMPT_IS}")


def _out_of_range(value: int, position: int, id_limit: int) -> _BadPrompt:
    if value < 0:
        return _BadPrompt(f"has token id {value} at position {position}; token ids are not negative")
    if id_limit == _ID_LIMIT:
        return _BadPrompt(f"has token id {value} at position {position}, which does not fit in 32 bits")
    return _OutsideVocabulary(
        f"has token id {value} at position {position}, outside the model's vocabulary of {id_limit}"
    )


def _to_numpy(tensor: Any) -> np.ndarray:
    if tensor.is_floating_point() or tensor.is_complex():
        return np.zeros(len(tensor))  # refused later for its dtype; bfloat16 cannot be converted to NumPy
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array
