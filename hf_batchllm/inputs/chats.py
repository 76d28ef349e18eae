"""Chats: what counts as one, and checks of its messages, as chat templates silently leave out what they miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..wording import a_kind, shown

NO_TEMPLATE = "the tokenizer has no chat template: pass strings, or set `tokenizer.chat_template`"
_A_MESSAGE_IS = "a message is a dict such as {'role': 'user', 'content': '...'}"
_MEDIA = ("image", "audio", "video")


def is_chat(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def is_bare_chat(prompts: Sequence[Any]) -> bool:
    """Whether the list is one chat, and not a list of prompts, some of which are dicts by mistake."""
    return is_chat(prompts) and all(isinstance(item, Mapping) and is_message(item) for item in prompts)


def is_message(given: Mapping[Any, Any]) -> bool:
    return any(key in given for key in ("role", "content", "from"))


def chat_problem(chat: Sequence[Any]) -> str | None:
    """Why the chat cannot be run. A template would render missing parts as nothing, and unknown ones as their repr."""
    for place, message in enumerate(chat):
        why = _message_problem(message)
        if why is not None:
            return f"is a chat whose message {place} {why}"
    return None


def _message_problem(message: Any) -> str | None:
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
        medium = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(medium, str) and any(name in medium for name in _MEDIA):
            return f"holds a part of type {medium!r}; only text is supported"
    return None
