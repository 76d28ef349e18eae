"""Chats: what counts as one, checks of its messages, as templates silently leave out what they miss, and its tokens."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..notices import Notices
from ..wording import a_kind, did_you_mean, shown
from .images.image_parts import is_image_part
from .prompt_options import PromptOptions

NO_TEMPLATE = "the tokenizer has no chat template: pass strings, or set `tokenizer.chat_template`"
_A_MESSAGE_IS = "a message is a dict such as {'role': 'user', 'content': '...'}"
_MEDIA = ("image", "audio", "video")


def is_chat(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def is_bare_chat(prompts: Sequence[Any]) -> bool:
    """Whether the list is one chat, and not a list of prompts, some of which are dicts by mistake."""
    return is_chat(prompts) and all(isinstance(item, Mapping) and is_message(item) for item in prompts)


def warn_of_one_chat(given: Any, prompts: Sequence[Any], notices: Notices) -> None:
    """Warn of messages that may be meant as a chat each. ``prompts``: what ``given``, of a user, was read as."""
    if len(prompts) != 1 or prompts[0] is not given or not is_bare_chat(given):
        return
    by_user = [message.get("role") == "user" for message in given]
    if any(first and second for first, second in pairwise(by_user)):
        notices(
            "one chat",
            f"the list of {len(given)} messages is read as one chat, and two messages of the user follow each other in "
            "it: for a chat of each, pass a list of chats, [[message], [message]]",
        )


def is_message(given: Mapping[Any, Any]) -> bool:
    return any(key in given for key in ("role", "content", "from"))


def chat_problem(chat: Sequence[Any], options: PromptOptions | None = None, images: bool = False) -> str | None:
    """Why the chat cannot be run, with ``options`` if there are any. ``images``: whether it may show some.

    A template would render missing parts as nothing, and unknown ones as their repr.
    """
    for place, message in enumerate(chat):
        why = _message_problem(message, images)
        if why is not None:
            return f"is a chat whose message {place} {why}"
    return None if options is None or not is_continued(chat, options) else _why_not_continued(chat)


def _message_problem(message: Any, images: bool) -> str | None:
    if not isinstance(message, Mapping):
        return f"is {a_kind(message)}; {_A_MESSAGE_IS}"
    role, content = message.get("role"), message.get("content")
    if role is None and "from" in message and "value" in message:
        return "has 'from' and 'value': rename them to 'role' and 'content'"
    if not isinstance(role, str):
        return f"has no 'role'; {_A_MESSAGE_IS}" if role is None else f"has the role {shown(role)}; a role is a string"
    if content is None:
        # An assistant's message may hold tool calls, or reasoning, and no content.
        has_other_parts = role not in ("user", "system", "developer") and not set(message) <= {
            "role",
            "content",
            "name",
        }
        return None if has_other_parts else f"has no 'content'; {_A_MESSAGE_IS}"
    if not isinstance(content, (str, list, tuple, Mapping)):
        return f"has {a_kind(content)} as its 'content'; a content is a string"
    for part in content if isinstance(content, (list, tuple)) else ():
        if images and is_image_part(part):
            continue
        medium = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(medium, str) and any(name in medium for name in _MEDIA):
            supported = "text and images are supported" if images else "text is supported here"
            return f"holds a part of type {medium!r}; only {supported}"
    return None


# -- from a chat to tokens ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatEncoder:
    """Makes tokens of chats that have the same options, and that are all continued or all answered."""

    options: PromptOptions
    continued: bool

    def __call__(self, tokenizer: Any, chats: list[Any]) -> Sequence[Any]:
        given = self._given()
        if "processor_kwargs" in inspect.signature(tokenizer.apply_chat_template).parameters:
            # Some processors pad the chats of a list to one length, unless they are told not to.
            given, of_call = self._given_to(tokenizer)
            given["processor_kwargs"] = of_call | {"padding": False}
        encoded: Any = tokenizer.apply_chat_template(
            [list(chat) for chat in chats], tokenize=True, return_dict=False, **given
        )
        # Multimodal processors, and tokenizers with a method of their own, return a dict all the same.
        rows: Sequence[Any] = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
        return rows

    def text(self, processor: Any, chat: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        """The chat as one text, and what the call is given that makes tokens of it."""
        given, of_call = self._given_to(processor)
        return processor.apply_chat_template(list(chat), tokenize=False, **given), of_call

    def _given_to(self, processor: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the template of a processor is given, and what its call."""
        given = self._given()
        of_call = dict(given.pop("processor_kwargs", None) or {})
        # As transformers does: what neither the template nor its method names is for the processor.
        templates = f"{getattr(processor, 'chat_template', None)} {given.get('chat_template')}"
        known = {*re.findall(r"\w+", templates), *inspect.signature(processor.apply_chat_template).parameters}
        of_call |= {name: given.pop(name) for name in [*given] if name not in known}
        return given, of_call

    def _given(self) -> dict[str, Any]:
        given: dict[str, Any] = dict(self.options.chat_template_kwargs or {})
        if self.options.tools:
            given["tools"] = list(self.options.tools)
        if self.continued:
            given["continue_final_message"] = True
        return given | {"add_generation_prompt": not self.continued}


def is_continued(chat: Sequence[Any], options: PromptOptions) -> bool:
    """Whether the chat's last message is continued; else the model begins a new one.

    By default an assistant's message with a content is, as by transformers' pipelines.
    """
    if options.continue_final_message is not None:
        return options.continue_final_message
    return bool(chat[-1].get("role") == "assistant" and chat[-1].get("content") is not None)


def _why_not_continued(chat: Sequence[Any]) -> str | None:
    """Why the last message cannot be continued, in words that follow "prompt 3"."""
    beside = "or pass `continue_final_message=False` for a new message"
    if chat[-1].get("tool_calls"):  # they come after the content, and would be left out
        return f"is a chat that ends with a call of a tool, which cannot be continued: add the tool's answer, {beside}"
    if chat[-1].get("content") is None:
        return f"is a chat whose last message has no 'content' to continue: give it one, {beside}"
    return None


def in_groups(given: Sequence[Any], chats: Sequence[int], options: Sequence[PromptOptions]) -> Iterator[_Group]:
    """The chats that are encoded together: their places in ``given``, and what encodes them.

    ``options``: of each prompt.
    """
    groups: dict[tuple[int, bool], list[int]] = {}
    for index in chats:
        groups.setdefault((id(options[index]), is_continued(given[index], options[index])), []).append(index)
    for (_, continued), indices in groups.items():
        yield indices, ChatEncoder(options[indices[0]], continued)


_Group = tuple[list[int], ChatEncoder]


def warn_of_idle_options(
    options: Sequence[PromptOptions],
    chats: Sequence[int],
    tokenizer: Any,
    notices: Notices,
    for_each: Collection[str] = (),
) -> None:
    """Warn of options of prompts that change nothing. ``options``: of each prompt; ``chats``: those of them.

    ``for_each``: the options that were given to each prompt by itself; another may be meant for some of the prompts.
    """
    groups = {id(options[index]): options[index] for index in chats}
    unknown: dict[str, tuple[str, set[int]]] = {}  # a template's option -> a hint, the groups that have it
    for group, each in groups.items():
        for name, hint in _warn_of_template(each, tokenizer, notices):
            unknown.setdefault(name, (hint, set()))[1].add(group)
    for name, (hint, having) in unknown.items():
        places = [index for index in chats if id(options[index]) in having]
        where = "`chat_template_kwargs`"
        if len(places) < len(options):  # without marks, as it is not what was given for all
            where = f"the chat_template_kwargs of {notices.places(places)}"
        what = f"`{name}` in {where} has no effect"
        notices(f"template {name}", f"{what}: the tokenizer's chat template does not name it{hint}")
    used = {
        (name, repr(getattr(each, name))) for each in groups.values() for name in each.for_chats if name not in for_each
    }
    idle: dict[int, list[str]] = {}
    alone: dict[str, list[int]] = {}
    are_chats = set(chats)
    for index, each in enumerate(options):
        if index in are_chats:
            continue
        if id(each) not in idle:
            idle[id(each)] = [name for name in each.for_chats if (name, repr(getattr(each, name))) not in used]
        for name in idle[id(each)]:
            alone.setdefault(name, []).append(index)
    if any(each.truncation_side is not None and each.max_prompt_tokens is None for each in options):
        notices("truncation_side", "`truncation_side` has no effect without `max_prompt_tokens`: set it, too")
    for name, indices in alone.items():
        what = "are no chats" if len(indices) > 1 else "is no chat"
        notices(
            f"{name} without a chat", f"`{name}` is for chats, and {notices.places(indices)} {what}: no effect there"
        )


def _warn_of_template(options: PromptOptions, tokenizer: Any, notices: Notices) -> Iterator[tuple[str, str]]:
    """A template passes over what it does not know, a misspelt name for one: (the name, a hint that follows)."""
    if not options.tools and not options.chat_template_kwargs:
        return
    given = dict(options.chat_template_kwargs or {})
    own = given.get("chat_template")
    try:
        template = tokenizer.get_chat_template(own, options.tools)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    except Exception:  # a missing template is reported where chats are encoded
        return
    if not isinstance(template, str):
        return
    words = set(re.findall(r"\w+", template))
    if options.tools and "tools" not in words:
        notices("tools", "`tools` has no effect: the tokenizer's chat template does not name them")
    for name in given:
        if name not in words and (name not in parameters or name == "documents"):
            yield name, did_you_mean(name, sorted(words))
