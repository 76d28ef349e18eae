"""``hf-batchllm merge``: the results of jobs that ran a part of a file each, to one output. No model, and no torch."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import OutputWriteError
from ..files.merge_shards import merge
from .arguments import add_common
from .exits import DONE, EXIT_CODES_HELP, SOME_ERRORS, STOPPED, USAGE, interruptible
from .messages import Console, reason
from .parser import Parser

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


def main(arguments: Sequence[str]) -> int:
    asked = _parser().parse_args(arguments)
    console = Console(asked.quiet, asked.traceback, lambda message: message.replace("`--format", "`--output-format"))
    with interruptible() as interrupts, console.warnings_shown():
        try:
            report = merge(
                asked.target, asked.output_format, partial=asked.partial, restart=asked.restart, note=console.note
            )
        except KeyboardInterrupt:
            console.error("interrupted. The same command continues, and the parts are as they were")
            return interrupts.code
        except Exception as error:
            console.error(reason(error), error)
            return STOPPED if isinstance(error, OutputWriteError) else USAGE
    console.plain(str(report))
    return SOME_ERRORS if report.errors else DONE


def _parser() -> Parser:
    parser = Parser("merge", description=_ABOUT, epilog=_EXAMPLES)
    parser.usage = "hf-batchllm merge OUT [options]"
    files = parser.add_argument_group("files")
    files.add_argument("target", metavar="OUT", help="the OUT of the jobs, beside which their files are")
    files.add_argument(
        "--output-format", metavar="KIND", help="format of OUT: jsonl, csv, tsv or parquet (default: by its suffix)"
    )
    course = parser.add_argument_group("the merge")
    course.add_argument(
        "--partial", action="store_true", help="merge what is there, though results are missing. It may be repeated"
    )
    course.add_argument("--restart", action="store_true", help="begin afresh; the old OUT is kept as OUT.bak-1, ...")
    add_common(parser)
    return parser
