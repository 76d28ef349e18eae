"""The fields of BatchConfig as options of the command, out of the dataclass and what it says of each."""

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
    words = field_words()
    for field in dataclasses.fields(BatchConfig):
        flag = f"--{field.name.replace('_', '-')}"
        said = shortened(words.get(field.name, ""))
        if field.default is not None and "Default" not in said:
            said += f" Default: {'on' if field.default is True else field.default}."
        said = said.replace("%", "%%")
        if isinstance(field.default, bool):
            group.add_argument(flag, dest=field.name, action=argparse.BooleanOptionalAction, help=said)
        else:
            metavar = {"kv_memory": "SIZE", "scheduler": "NAME", "backend": "NAME"}.get(field.name, "N")
            group.add_argument(flag, dest=field.name, type=_value, metavar=metavar, help=said)


def config_of(asked: argparse.Namespace) -> BatchConfig:
    fields = {field.name: getattr(asked, field.name) for field in dataclasses.fields(BatchConfig)}
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return BatchConfig.of(None, given)
    except ConfigError as error:
        said = str(error)
        for name in given:
            said = said.replace(f"`{name}`", f"--{name.replace('_', '-')}")
        raise UsageError(said) from error


def field_words() -> dict[str, str]:
    """What the class says of each of its fields."""
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


def shortened(words: str) -> str:
    """What it is, when to change it, and what it is by default."""
    sentences = _SENTENCE.split(words)
    kept = sentences[:2] + [each for each in sentences[2:] if each.startswith("Default: ")]
    return _ASIDE.sub("", " ".join(kept))


def _tidied(text: str) -> str:
    """In the words of a command line: first what it is, then when to change it."""
    text = _NOT_ON_A_COMMAND_LINE.sub("", text).replace("``", "`")
    return text.replace("None: ", "Default: ").strip()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
