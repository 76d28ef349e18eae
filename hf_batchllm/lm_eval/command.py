"""The harness's own command line, with this model as its default."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import BatchLLMError
from .registration import NAME

_OTHER_COMMANDS = ("ls", "validate")
_CHOOSE_A_MODEL = ("--model", "-M", "--config", "-C")
_ASK_FOR_HELP = ("--help", "-h")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run ``lm_eval`` with these arguments (by default: those of this process), and return its exit status."""
    from lm_eval.__main__ import cli_evaluate

    before = sys.argv
    sys.argv = [
        "lm-eval",
        *with_our_model(before[1:] if arguments is None else arguments),
    ]  # read by the harness
    try:
        cli_evaluate()
    except BatchLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        sys.argv = before
    return 0


def with_our_model(arguments: Sequence[str]) -> list[str]:
    """The same arguments, with this model added if they start an evaluation and name no model."""
    given = list(arguments)
    if not given or given[0] in _OTHER_COMMANDS or given == ["run"]:
        return given
    named = any(each.split("=")[0] in _CHOOSE_A_MODEL or each in _ASK_FOR_HELP for each in given)
    return given if named else [*given, "--model", NAME]
