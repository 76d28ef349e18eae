"""What a result says of its prompt: the text, or the chat, as it was passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .chats import is_chat

AsPassed = str | list[dict[str, Any]] | None


def as_passed(prompts: Sequence[Any]) -> list[AsPassed]:
    """Strings themselves, chats with their messages; None for token ids, whose text a result does not make."""
    return [_one(prompt) for prompt in prompts]


def _one(prompt: Any) -> AsPassed:
    if isinstance(prompt, str):
        return prompt
    if is_chat(prompt) and all(isinstance(message, Mapping) for message in prompt):
        # People go on with a chat by adding the answer to the list: the result keeps a list of its own.
        return [dict(message) for message in prompt]
    return None
