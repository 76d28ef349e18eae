"""The fields of BatchConfig as options of the command. Their help comes from the docstring of BatchConfig."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
from typing import Any

from ..config import BatchConfig
from ..errors import ConfigError
from .messages import UsageError

_SENTENCE = re.compile(r"(?<=[.]) (?=[A-Z])")
_ASIDE = re.compile(r" \([^()]{40,}\)")
_NOT_ON_A_COMMAND_LINE = re.compile(r",? or an\s+object with the methods of ``[^`]*``")


def add_config_flags(group: Any) -> None:
    docs = field_docs()
    for field in dataclasses.fields(BatchConfig):
        flag = f"--{field.name.replace('_', '-')}"
        help = shortened(docs.get(field.name, ""))
        if field.default is not None and "Default" not in help:
            help += f" Default: {'on' if field.default is True else field.default}."
        help = help.replace("%", "%%")
        if isinstance(field.default, bool):
            group.add_argument(flag, dest=field.name, action=argparse.BooleanOptionalAction, help=help)
        else:
            metavar = {"kv_memory": "SIZE", "scheduler": "NAME", "backend": "NAME"}.get(field.name, "N")
            group.add_argument(flag, dest=field.name, type=_value, metavar=metavar, help=help)


def config_from(asked: argparse.Namespace) -> BatchConfig:
    fields = {field.name: getattr(asked, field.name) for field in dataclasses.fields(BatchConfig)}
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return BatchConfig.of(None, given)
    except ConfigError as error:
        message = str(error)
        for name in given:
            message = message.replace(f"`{name}`", f"--{name.replace('_', '-')}")
        raise UsageError(message) from error


def field_docs() -> dict[str, str]:
    """The docstring of each field."""
    text = inspect.cleandoc(BatchConfig.__doc__ or "")
    names = [field.name for field in dataclasses.fields(BatchConfig)]
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        name, colon, rest = line.partition(": ")
        if colon and name in names:
            current = found[name] = [rest]
        elif current is not None and line.startswith(" "):
            current.append(line.strip())
        else:
            current = None
    return {name: _tidied(" ".join(lines)) for name, lines in found.items()}


def shortened(text: str) -> str:
    """The meaning, when to change it, and the default."""
    sentences = _SENTENCE.split(text)
    kept = sentences[:2] + [each for each in sentences[2:] if each.startswith("Default: ")]
    return _ASIDE.sub("", " ".join(kept))


def _tidied(text: str) -> str:
    """In the words of a command line."""
    text = _NOT_ON_A_COMMAND_LINE.sub("", text).replace("``", "`")
    return text.replace("None: ", "Default: ").strip()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
