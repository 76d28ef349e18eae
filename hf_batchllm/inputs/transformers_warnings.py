"""transformers' own warning of options without effect, left out where this library has one in its own words."""

from __future__ import annotations

import ast
import logging
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

_LOGGER = "transformers.generation.configuration_utils"
_BEGINS = "The following generation flags are not valid and may be ignored: "


@contextmanager
def not_warned_twice(own: Collection[str]) -> Iterator[None]:
    """Within the block transformers' warning is left out where all options that it names are among ``own``."""
    thread = threading.get_ident()

    def says_more(record: logging.LogRecord) -> bool:
        if record.thread != thread:
            return True
        named = _named(record.getMessage())
        return not named or not named.issubset(own)

    logger = logging.getLogger(_LOGGER)
    logger.addFilter(says_more)
    try:
        yield
    finally:
        logger.removeFilter(says_more)


def _named(message: str) -> set[str]:
    if not message.startswith(_BEGINS):
        return set()
    try:
        return set(ast.literal_eval(message[len(_BEGINS) :].partition("]")[0] + "]"))
    except (SyntaxError, ValueError):
        return set()
