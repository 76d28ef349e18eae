"""The user's prompts -> ``Prompt(ids, key)``: checked completely before any work, with errors in the user's words.

A prompt is a string, a list of token ids, a 1-D tensor or array, or a chat. What the tokenizer makes of texts and
chats is checked as lists of token ids are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PromptError, PromptsTypeError, TokenizerError
from ..notices import Notices
from ..wording import a_kind, first_line, is_array, is_number, kind
from .chats import (
    NO_TEMPLATE,
    chat_problem,
    in_groups,
    is_bare_chat,
    is_chat,
    warn_of_idle_options,
    warn_of_one_chat,
)
from .garbage_collection import garbage_collection_paused
from .images.image_parts import has_images
from .images.prompt_images import EncodedChat, PromptImages, PromptPlaces
from .not_prompts import A_PROMPT_IS, PADDED_TENSOR, why_not_a_list
from .preparing import images_bar, tokenizing_bar
from .prompt_options import PromptOptions, names_for_each, options_of_each, shortened, warn_of_cuts
from .token_ids import ID_LIMIT, BadPrompt, NoTokens, OutsideVocabulary, packed_ids

if TYPE_CHECKING:  # planning reads this module, and never imports torch
    from .images.image_reader import ImageReader

_Encode = Callable[[Any, list[Any]], Sequence[Any]]  # (tokenizer, prompts) -> the token ids of each
_NO_MASKS = {"return_attention_mask": False, "return_token_type_ids": False}
_TOKENIZER_BATCH = 1024  # texts in one call: a fast tokenizer holds ~100 bytes a token until its call returns


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt, ready to run. ``ids`` is not empty."""

    ids: np.ndarray  # int32 [tokens], read-only
    key: Hashable = None  # an adapter, say: prompts share a prefix only where their keys are equal
    images: PromptImages | None = None

    @property
    def keys(self) -> np.ndarray:  # int32 [tokens]
        """The ids, but for those of images: these depend on the image and the place in it, so equal keys are equal."""
        return self.ids if self.images is None else self.images.keys

    @property
    def places(self) -> PromptPlaces | None:
        return None if self.images is None else self.images.places

    @property
    def two_way(self) -> np.ndarray | None:
        return None if self.images is None else self.images.two_way

    def with_key(self, key: Hashable) -> Prompt:
        return Prompt(self.ids, key, self.images)

    def __len__(self) -> int:
        return len(self.ids)


def longest_uncut(prompts: Sequence[Prompt]) -> int:
    """The most tokens that have to be computed in one step: an image's, where they see each other both ways."""
    runs = [prompt.two_way for prompt in prompts if prompt.two_way is not None and len(prompt.two_way)]
    return max((int((each[:, 1] - each[:, 0]).max()) for each in runs), default=0)


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
    images: ImageReader | None = None,
) -> tuple[list[Prompt | None], dict[int, str]]:
    """Each prompt, or None where it cannot be run; and the reason for each of these, by index.

    ``tokenizer`` is a function without arguments that *returns* the tokenizer (or raises); it is called once, and only
    if there is a string or a chat. ``vocab_size`` bounds the ids, ``max_length`` the tokens of one prompt. ``options``
    are those of ``take_prompt_options``. ``images`` reads those of chats; without, only text is taken.
    A ``prompts`` that is not a list of prompts at all is a ``PromptsTypeError``.
    """
    given = as_list(prompts)
    each = options_of_each(options or {}, len(given))
    notices = notices or Notices()
    warn_of_one_chat(prompts, given, notices)
    id_limit = ID_LIMIT if vocab_size is None else min(vocab_size, ID_LIMIT)
    checked: list[Prompt | None] = [None] * len(given)
    problems: dict[int, str] = {}
    texts: list[int] = []
    chats: list[int] = []
    pictured: list[int] = []  # chats with images
    processed = None if images is None else images.processed()
    lengths: dict[int, int] = {}  # of prompts that are cut, before they are
    around: Sequence[int] = ()  # the special tokens that a text gets

    def take(indices: Iterable[int], rows: Iterable[Any]) -> None:
        """``rows``: the token ids of the prompts of these indices, or a ``BadPrompt``."""
        for index, packed in zip(indices, packed_ids(rows, id_limit), strict=True):
            if isinstance(packed, BadPrompt):
                problems[index] = _for_user(given[index], packed)
                continue
            most = each[index].max_prompt_tokens
            if most is not None and len(packed) > 4 * most:
                lengths[index] = len(packed) // 4
                whole = np.frombuffer(packed, np.int32)
                ends = isinstance(given[index], str)
                packed = shortened(whole, most, each[index].truncation_side, around, ends).tobytes()
            if max_length is not None and len(packed) > 4 * max_length:
                problems[index] = f"has {len(packed) // 4} tokens, more than the {max_length} that fit"
            else:
                # An array over immutable bytes is read-only, and the plan sorts those same bytes without a copy.
                checked[index] = Prompt(np.frombuffer(packed, np.int32), key)

    def attach(index: int, row: EncodedChat | BadPrompt) -> None:
        take([index], [row if isinstance(row, BadPrompt) else row.ids])
        checked[index], why = _with_images(checked[index], row)
        if why is not None:
            problems[index] = why

    with garbage_collection_paused():
        others: dict[int, Any] = {}
        made: dict[int, EncodedChat | BadPrompt] = {}  # by the user's processor
        for index, prompt in enumerate(given):
            if isinstance(prompt, str):
                texts.append(index)
            elif is_chat(prompt):
                why = chat_problem(prompt, each[index], images is not None)
                if why is None and images is not None and has_images(prompt):
                    pictured.append(index)
                elif why is None:
                    chats.append(index)
                else:
                    others[index] = BadPrompt(why)
            elif processed is not None and processed.takes(prompt):
                made[index] = processed.prompt(prompt)
            else:
                others[index] = prompt
        take(others, others.values())
        for index, row in made.items():
            attach(index, row)

    loaded = None
    if texts or chats or pictured:
        loaded, missing = _loaded(tokenizer)
        if loaded is not None and "max_prompt_tokens" in (options or {}):
            around = _around_a_text(loaded)
        encoders: list[tuple[list[int], _Encode]] = [(texts, _encode_texts), *in_groups(given, chats, each)]
        for indices, encode in encoders:
            if loaded is None:
                problems.update((index, f"is {_described(given[index])}, and {missing}") for index in indices)
                continue
            take(indices, _encoded([given[index] for index in indices], loaded, encode))
        if images is not None and pictured:
            why_not = missing if loaded is None else images.why_not(loaded)
            for index, row in _encoded_with_images(given, pictured, each, loaded, images, why_not):
                attach(index, row)
        empty = next((index for index in texts if given[index] == "" and checked[index] is not None), None)
        if empty is not None:
            named = f"{'' if notices.names is None else 'the prompt of '}{notices.places([empty])}"
            notices("empty", f"{named} is an empty string: the model sees only the tokenizer's special tokens")
    if options:
        all_chats = [index for index, prompt in enumerate(given) if is_chat(prompt)]
        # Lines of a file were written one by one. Lists in a call may well be made for all prompts by one rule.
        for_each = () if notices.names is None else names_for_each(options)
        warn_of_idle_options(each, all_chats, loaded, notices, for_each)
    warn_of_cuts(lengths, len(given), notices)
    return checked, problems


def _encoded_with_images(
    given: Sequence[Any],
    pictured: Sequence[int],
    options: Sequence[PromptOptions],
    processor: Any,
    images: ImageReader,
    why_not: str | None,
) -> Iterator[tuple[int, EncodedChat | BadPrompt]]:
    """Each chat of these places. ``why_not``: why none of them can be encoded."""
    if why_not is not None:
        yield from ((index, BadPrompt(f"shows an image, and {why_not}")) for index in pictured)
        return
    known = images.none_so_far()
    for indices, encoder in in_groups(given, pictured, options):
        rows = images.encoded(processor, [given[index] for index in indices], encoder, known)
        with images_bar(len(indices)) as told:
            for index, row in zip(indices, rows, strict=True):
                yield index, row
                told(1)


def _with_images(prompt: Prompt | None, encoded: EncodedChat | BadPrompt) -> tuple[Prompt | None, str | None]:
    """The prompt with its images, or why it cannot be run."""
    if prompt is None or isinstance(encoded, BadPrompt):
        return None, None
    if len(prompt) < len(encoded.ids):
        return None, "shows images, so it cannot be cut to `max_prompt_tokens`: raise it, or make the images smaller"
    return Prompt(prompt.ids, prompt.key, encoded.images), None


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
            raise PromptsTypeError(f"{name} is a {prompts.ndim}-D {kind(prompts)}; {PADDED_TENSOR}")
        return [prompts]
    why = why_not_a_list(prompts)
    if why is not None:
        raise PromptsTypeError(f"{name} is {why}")
    listed = prompts if isinstance(prompts, (list, tuple)) else read_all(prompts)
    return [listed] if _is_one_prompt(listed) else listed


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


def _for_user(prompt: Any, bad: BadPrompt) -> str:
    """The reason in terms of the user's own prompt, which may be a text or a chat."""
    if not isinstance(prompt, str) and not is_chat(prompt):
        return bad.why
    if isinstance(bad, NoTokens):
        return f"is {'an empty string' if prompt == '' else _described(prompt)}, of which the tokenizer makes no tokens"
    if isinstance(bad, OutsideVocabulary):
        return f"{bad.why}: is it another model's tokenizer, or has it more tokens than the model's embedding?"
    return bad.why


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


def _encoded(items: list[Any], tokenizer: Any, encode: _Encode) -> Iterator[Any]:
    """The token ids of each item, or a ``BadPrompt`` for one that the tokenizer refused."""
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


def _encoded_alone(item: Any, tokenizer: Any, encode: _Encode) -> Any:
    try:
        (ids,) = encode(tokenizer, [item])
    except Exception as error:
        return BadPrompt(refused_by_tokenizer(item, tokenizer, error))
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
