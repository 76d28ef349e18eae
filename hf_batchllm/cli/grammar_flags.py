"""The options of ``run`` that say which form answers have."""

from __future__ import annotations

import argparse
from typing import Any

from .messages import UsageError

GRAMMAR_FLAGS = ("schema", "regex", "grammar", "choice")  # the settings behind them


def add_grammar_flags(group: Any) -> None:
    group.add_argument("--schema", metavar="FILE", help="answers are JSON of this schema: a file, or the JSON itself")
    group.add_argument("--regex", metavar="REGEX", help="answers match this regular expression")
    group.add_argument("--grammar", metavar="FILE", help="answers are of the grammar in this file, in Lark")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="answers are one of these texts; to be given several times"
    )


def grammar_flags(asked: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, as settings by their names."""
    given = {
        "schema": None if asked.schema is None else _schema(asked.schema),
        "regex": asked.regex,
        "grammar": None if asked.grammar is None else text_of("--grammar", asked.grammar),
        "choice": asked.choice,
    }
    return {name: value for name, value in given.items() if value is not None}


def _schema(given: str) -> Any:
    if given.strip() in ("true", "json", "json_object"):
        return True
    return given if given.lstrip().startswith("{") else text_of("--schema", given)


def text_of(option: str, path: str) -> str:
    """What is in the file that an option names."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{option} {path}: {why}") from None
