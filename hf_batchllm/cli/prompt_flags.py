"""The options of ``run`` and ``plan`` that say how chats and long prompts become tokens."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..inputs.prompt_options import SIDES
from ..wording import shown
from .grammar_flags import text_of
from .messages import UsageError

PROMPT_FLAGS = ("chat_template_kwargs", "tools", "max_prompt_tokens", "truncation_side")  # the settings behind them


def add_prompt_flags(group: Any) -> None:
    group.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="what else chat templates are given, an object such as '{\"enable_thinking\": false}'",
    )
    group.add_argument(
        "--tools", metavar="FILE", help="the tools that chats may call: a JSON file with a list of schemas"
    )
    group.add_argument(
        "--max-prompt-tokens", type=int, metavar="N", help="cut longer prompts, instead of running them whole"
    )
    group.add_argument(
        "--truncation-side",
        choices=SIDES,
        help="where they are cut: left (the default: the end of a prompt stays) or right",
    )


def prompt_flags(asked: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, as settings by their names."""
    given = {
        "chat_template_kwargs": _json("--chat-template-kwargs", asked.chat_template_kwargs, asked.chat_template_kwargs),
        "tools": None if asked.tools is None else _json(f"--tools {asked.tools}", _text(asked.tools), None),
        "max_prompt_tokens": asked.max_prompt_tokens,
        "truncation_side": asked.truncation_side,
    }
    return {name: value for name, value in given.items() if value is not None}


def _text(path: str) -> str:
    if path.lstrip().startswith(("[", "{")):  # the schemas themselves
        return path
    return text_of("--tools", path)


def _json(option: str, text: str | None, value: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        what = "" if value is None else f": {shown(value)}"
        raise UsageError(f"{option} is not JSON ({error}){what}") from None
