"""``hf-batchllm merge``: the results of jobs that ran a part of a file each, to one output. No model, and no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OutputWriteError
from ..files.merge_shards import merge
from .arguments import OUTPUT_FORMAT, Parser, add_common, add_options
from .console import DONE, EXIT_CODES_HELP, INTERRUPTED, SOME_ERRORS, STOPPED, USAGE, Console, interruptible, reason

_ABOUT = """\
Join the results of jobs that ran a part of a file each. OUT is what one run
would have written: `run IN OUT` without --shard finds it complete, or
continues it. The files of the parts stay as they are.
"""
_EXAMPLES = f"""\
examples:
  hf-batchllm run in.jsonl out.jsonl --model M --shard 1/2    (one job)
  hf-batchllm run in.jsonl out.jsonl --model M --shard 2/2    (another one)
  hf-batchllm merge out.jsonl

{EXIT_CODES_HELP}"""

_OPTIONS = {
    "--partial": "merge what is there, though results are missing. It may be repeated",
    "--restart": "begin afresh; the old OUT is kept as OUT.bak-1, ...",
}


def main(arguments: Sequence[str]) -> int:
    asked = _parser().parse_args(arguments)
    console = Console(asked.quiet, asked.traceback)
    with interruptible(), console.warnings_shown():
        try:
            report = merge(
                asked.target, asked.output_format, partial=asked.partial, restart=asked.restart, note=console.note
            )
        except KeyboardInterrupt:
            console.error("interrupted. The same command continues, and the parts are as they were")
            return INTERRUPTED
        except Exception as error:
            console.error(reason(error), error)
            return STOPPED if isinstance(error, OutputWriteError) else USAGE
    console.plain(str(report))
    return SOME_ERRORS if report.errors else DONE


def _parser() -> Parser:
    parser = Parser("merge", "OUT [options]", description=_ABOUT, epilog=_EXAMPLES)
    files = {"target OUT": "the OUT of the jobs, beside which their files are"}
    add_options(parser.add_argument_group("files"), files | OUTPUT_FORMAT)
    add_options(parser.add_argument_group("the merge"), _OPTIONS)
    add_common(parser)
    return parser
