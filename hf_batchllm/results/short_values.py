"""Values in a result's repr: long ones are shortened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CHARACTERS = 80
_IDS = 6


def short_text(value: Any) -> str:
    """The repr of a text, its beginning and end if it is long; a chat by its last message."""
    if isinstance(value, list):
        message = value[-1] if value else {}
        before = f"{len(value) - 1} before, " if len(value) > 1 else ""
        return f"<chat: {before}{message.get('role', '?')} {short_text(message.get('content'))}>"
    if isinstance(value, str) and len(value) > _CHARACTERS:
        half = _CHARACTERS // 2
        return repr(f"{value[:half]} ... {value[-half:]}")
    shown = repr(value)
    return shown if isinstance(value, str) or len(shown) <= _CHARACTERS else f"{shown[:_CHARACTERS]}..."


def short_ids(ids: Sequence[int]) -> str:
    if len(ids) <= _IDS:
        return repr(list(ids))
    return f"[{', '.join(map(str, ids[:_IDS]))}, ... {len(ids):,} in all]"
