"""Picks the command, and prints the help on all of them."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence

from .._version import __version__
from .exits import EXIT_CODES_HELP
from .messages import PROGRAM, UsageError

_HELP = f"""\
usage: {PROGRAM} COMMAND ...

Offline generation over a file of prompts, with a transformers model. What the
prompts have in common is computed once. A run that was stopped can continue.

commands:
  run IN OUT --model M    answer every prompt of a file, into another file
  merge OUT               join the results of jobs that ran with --shard
  plan IN                 what the prompts of a file share, without a model
  check                   whether the kernels are right on this GPU, as a table
  bench                   how fast a model is here, compared to model.generate
  lm-eval                 the lm-evaluation-harness, run by this library

examples:
  {PROGRAM} run in.jsonl out.jsonl --model path/or/name --max-new-tokens 100
  {PROGRAM} run in.csv out.csv --model M --template 'Q: {{question}}\\nA:'
  {PROGRAM} run batch.jsonl out.jsonl --model M     (OpenAI's batch files)
  {PROGRAM} plan in.jsonl --tokenizer path/or/name
  {PROGRAM} run --help

{EXIT_CODES_HELP}
options:
  --help, -h    this page; after a command, the page of the command
  --version     the version
"""
_COMMANDS = ("run", "merge", "plan", "check", "bench", "lm-eval")


def dispatch(arguments: Sequence[str]) -> int:
    if not arguments:
        raise UsageError(f"no command was given. Commands are {', '.join(_COMMANDS)}\n(`{PROGRAM} --help` tells more)")
    command, rest = arguments[0], list(arguments[1:])
    if command in ("--help", "-h", "help"):
        print(_HELP, end="")
        return 0
    if command in ("--version", "-V"):
        print(f"{PROGRAM} {__version__}")
        return 0
    if command == "run":
        from .run import main as run

        return run(rest)
    if command == "merge":
        from .merge import main as merge

        return merge(rest)
    if command == "plan":
        from .plan import main as plan

        return plan(rest)
    if command == "check":
        from .check import main as check

        return check(rest)
    if command == "bench":
        from ..bench.__main__ import main as bench

        return bench(rest, "hf-batchllm bench")
    if command in ("lm-eval", "lm_eval"):
        return _lm_eval(rest)
    if command.startswith("-"):
        hint = "the command comes first, as in `hf-batchllm run IN OUT --model M`"
        raise UsageError(f"there is no option {command} before a command: {hint}")
    if command in ("run-batch", "run_batch", "batch", "generate"):
        raise UsageError(f"there is no command {command!r}; did you mean run, as in `{PROGRAM} run IN OUT --model M`?")
    near = difflib.get_close_matches(command, _COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(_COMMANDS)}"
    raise UsageError(f"there is no command {command!r}; {hint}")


def _lm_eval(arguments: list[str]) -> int:
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("lm-eval needs the lm-evaluation-harness: pip install 'hf-batchllm[lm-eval]'")
    from ..lm_eval import main as lm_eval

    return lm_eval(arguments) or 0
