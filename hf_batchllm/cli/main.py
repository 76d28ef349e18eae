"""Picks the command, prints the help on all of them, and turns what is left of an error into an exit code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from .._version import __version__
from ..installed_versions import in_words
from .console import EXIT_CODES_HELP, INTERRUPTED, PROGRAM, STOPPED, USAGE, Console, UsageError

_COMMANDS = {  # where each one's ``main`` is, its files, and what it does
    "run": (".run", "IN OUT --model M", "answer every prompt of a file, into another file"),
    "merge": (".merge", "OUT", "join the results of jobs that ran with --shard"),
    "plan": (".plan", "IN", "what the prompts of a file share, without a model"),
    "check": (".check", "", "whether the kernels are right on this GPU, as a table"),
    "bench": ("..bench.__main__", "", "how fast a model is here, compared to model.generate"),
    "lm-eval": ("..lm_eval", "", "the lm-evaluation-harness, run by this library"),
}
_ENVIRONMENT = {  # which whoever starts the command may set otherwise
    "TRANSFORMERS_VERBOSITY": "error",  # it prints much; what matters comes as an error
    "DISABLE_SAFETENSORS_CONVERSION": "1",  # else it would ask the hub to convert somebody else's model
}
_LISTED = "\n".join(f"  {f'{name} {files}':22}  {about}" for name, (_, files, about) in _COMMANDS.items())
_HELP = f"""\
usage: {PROGRAM} COMMAND ...

Offline generation over a file of prompts, with a transformers model. What the
prompts have in common is computed once. A run that was stopped can continue.

commands:
{_LISTED}

examples:
  {PROGRAM} run in.jsonl out.jsonl --model path/or/name --max-new-tokens 100
  {PROGRAM} run in.csv out.csv --model M --template 'Q: {{question}}\\nA:'
  {PROGRAM} run batch.jsonl out.jsonl --model M     (OpenAI's batch files)
  {PROGRAM} plan in.jsonl --tokenizer path/or/name
  {PROGRAM} run --help

{EXIT_CODES_HELP}
options:
  -h, --help    this page; after a command, the page of the command
  --version     the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code, of which ``EXIT_CODES_HELP`` tells."""
    if None in (sys.stdin, sys.stdout, sys.stderr):  # a file opened later would get its number, and be printed into
        sys.exit(f"{PROGRAM} needs open streams: redirect a closed one to {os.devnull}")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except UsageError as error:
        Console().error(str(error))
        return USAGE
    except SystemExit as asked:  # argparse's, and those of the commands that are handed on
        return asked.code if isinstance(asked.code, int) else int(bool(asked.code))
    except ImportError as error:
        if (words := in_words(error)) is None:
            raise
        Console().error(str(words))
        return USAGE
    except KeyboardInterrupt:  # while modules are loaded
        Console().error("interrupted.")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has closed it, as `head` does
        with open(os.devnull, "wb") as nothing:  # else Python complains when it flushes stdout at its end
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        return STOPPED


def _dispatch(arguments: list[str]) -> int:
    command, rest = arguments[0] if arguments else "", arguments[1:]
    if command in ("-h", "--help"):
        print(_HELP, end="")
    elif command == "--version":
        print(f"{PROGRAM} {__version__}")
    elif command == "lm-eval" and importlib.util.find_spec("lm_eval") is None:
        raise UsageError("lm-eval needs the lm-evaluation-harness: pip install 'hf-batchllm[lm-eval]'")
    elif command in _COMMANDS:
        run = importlib.import_module(_COMMANDS[command][0], __package__).main
        return int(run(rest, f"{PROGRAM} bench") if command == "bench" else run(rest) or 0)
    else:
        what = f"there is no command {command!r}" if command else "no command was given"
        raise UsageError(f"{what}; commands are {', '.join(_COMMANDS)} (`{PROGRAM} --help` tells more)")
    return 0
