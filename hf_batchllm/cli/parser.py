"""argparse with suggestions for misspelt options, and with help that fits the terminal."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .messages import PROGRAM, UsageError
from .other_flags import what_instead

_WIDEST_HELP = 110
_SIMILARITY = 0.75  # of a guess: below it, another option is meant more often than not


class Parser(argparse.ArgumentParser):
    _given: Sequence[str] = ()

    def __init__(self, command: str = "", **given: Any) -> None:
        prog = f"{PROGRAM} {command}".strip()
        super().__init__(prog=prog, formatter_class=_Formatter, allow_abbrev=False, add_help=False, **given)

    def parse_args(self, arguments: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        self._given = sys.argv[1:] if arguments is None else arguments
        asked: argparse.Namespace
        asked, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            self.error(self._why_unknown(unknown))
        return asked

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), [str(choice) for choice in action.choices or ()], 1, 0.5)
            if not near:
                raise
            raise argparse.ArgumentError(action, f"{error.message}; did you mean {near[0]}?") from None

    def error(self, message: str) -> NoReturn:
        options = [text for text in self._given if text.startswith("--") and " " not in text and text != "--"]
        unknown = [text for text in options if text.partition("=")[0] not in self._option_string_actions]
        if unknown and "arguments are required" in message:  # what is missing may be what is misspelt
            message = self._why_unknown(unknown)
        raise UsageError(f"{message}\n(`{self.prog} --help` tells more)")

    def _why_unknown(self, unknown: Sequence[str]) -> str:
        options = [text for text in unknown if text.startswith("-") and text != "-"]
        if not options:
            return f"there is one argument too many: {unknown[0]!r}"
        name = options[0].partition("=")[0]
        known = [text for text in self._option_string_actions if text.startswith("--")]
        short = [f"-{name.lstrip('-')}"] if f"-{name.lstrip('-')}" in self._option_string_actions else []
        same = short or [text for text in known if text.replace("-", "") == name.replace("-", "").replace("_", "")]
        if not same and (instead := what_instead(name, self._option_string_actions)) is not None:
            return f"there is no option {name}; {instead}"
        near = same or difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=_SIMILARITY)
        return f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else "")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(prog, max_help_position=26, width=min(columns, _WIDEST_HELP) - 2)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """``-n, --samples N`` rather than ``-n N, --samples N``."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        metavar = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {metavar}"
