"""The options of ``run`` and ``plan``."""

from __future__ import annotations

import argparse
from typing import Any

from .config_flags import add_config_flags
from .exits import WORDS
from .parser import Parser

_RUN = """\
Answer every prompt of a file. Prompts that begin alike are computed together,
whatever their order; results are written as they finish. If the run is
stopped, by whatever, run the same command again and it goes on.
"""
_RUN_EXAMPLES = f"""\
records:
  A line (or a row) is {{"prompt": "..."}} or {{"messages": [...]}}, with an "id" if
  you like. Settings may stand beside the prompt, by the names that they have in
  model.generate: {{"prompt": "...", "max_new_tokens": 20, "temperature": 0.7}}.
  They win over those given here, and these over the model's generation_config.
  Lines of an OpenAI batch ({{"custom_id", "method", "url", "body"}}) are known as
  such, and the output then has OpenAI's form. All of it: docs/files.md

examples:
  hf-batchllm run in.jsonl out.jsonl --model path/or/name --max-new-tokens 100
  hf-batchllm run in.csv out.csv --model M --keep question \\
      --template '{{context}}\\n\\nQ: {{question}}\\nA:'
  hf-batchllm run in.parquet out.parquet --model M --prompt-field question \\
      --chat --system 'Be brief.'
  hf-batchllm run in.jsonl out.jsonl --model M -n 4 --temperature 0.8 --seed 1
  cat in.jsonl | hf-batchllm run - - --model M --set no_repeat_ngram_size=3

{WORDS}"""
_PLAN = """\
What the prompts of a file have in common, and so what running them together
saves. No model is loaded, only a tokenizer (and none for token ids).
"""
_PLAN_EXAMPLES = f"""\
examples:
  hf-batchllm plan in.jsonl --tokenizer path/or/name
  hf-batchllm plan in.jsonl --tokenizer path/or/name --html plan.html

{WORDS}"""


def run_parser() -> Parser:
    parser = Parser("run", description=_RUN, epilog=_RUN_EXAMPLES)
    parser.usage = "hf-batchllm run IN OUT --model MODEL [options]"
    files = parser.add_argument_group("files")
    files.add_argument("source", metavar="IN", help=".jsonl, .csv, .tsv, .parquet, or - for stdin")
    files.add_argument("target", metavar="OUT", help="the same kinds, or - for stdout. Goes on if it is begun already")
    add_reading(files)
    files.add_argument("--output-format", metavar="KIND", help="of OUT, where its suffix does not say it")
    _add_model(parser.add_argument_group("the model"))
    add_prompts(parser.add_argument_group("prompts"))
    _add_settings(parser.add_argument_group("answers (a line may say otherwise for itself)"))
    _add_results(parser.add_argument_group("results"))
    _add_course(parser.add_argument_group("the run"))
    add_config_flags(parser.add_argument_group("the engine (right as it is for nearly everybody)"))
    _add_common(parser)
    return parser


def plan_parser() -> Parser:
    parser = Parser("plan", description=_PLAN, epilog=_PLAN_EXAMPLES)
    parser.usage = "hf-batchllm plan IN --tokenizer T [options]"
    files = parser.add_argument_group("files")
    files.add_argument("source", metavar="IN", help=".jsonl, .csv, .tsv, .parquet, or - for stdin")
    add_reading(files)
    files.add_argument("--json", action="store_true", help="print figures as JSON")
    files.add_argument("--html", metavar="FILE", help="write a picture of the plan")
    files.add_argument("--limit", type=_positive, metavar="N", help="only the first N records")
    files.add_argument("--window", metavar="SIZE", default="256MiB", help="as for `run` (default: %(default)s)")
    model = parser.add_argument_group("the tokenizer")
    model.add_argument("--tokenizer", "--model", metavar="T", help="a folder, or a name on the hub")
    _add_code(model, "the tokenizer")
    add_prompts(parser.add_argument_group("prompts"))
    sharing = parser.add_argument_group("sharing")
    sharing.add_argument("--min-shared-tokens", type=_whole, metavar="N", default=None, help="as for `run`")
    _add_common(parser)
    return parser


def add_reading(group: Any) -> None:
    group.add_argument("--format", metavar="KIND", help="of IN: jsonl, csv, tsv or parquet (default: by its suffix)")
    group.add_argument(
        "--dialect",
        choices=("auto", "plain", "openai"),
        default="auto",
        help="what records look like: plain ones, or an OpenAI batch's. Default: as the first record",
    )


def add_prompts(group: Any) -> None:
    group.add_argument(
        "--prompt-field", metavar="NAME", help="the field that is the prompt (default: prompt, messages)"
    )
    group.add_argument(
        "--template",
        metavar="TEXT",
        help="build the prompt from fields: '{context}\\n\\nQ: {question}\\nA:'. \\n and \\t are understood, a brace "
        "itself is {{ or }}; @FILE reads it from a file",
    )
    group.add_argument("--chat", action="store_true", help="make a user's message of each prompt, for chat models")
    group.add_argument(
        "--system",
        metavar="TEXT",
        help="a system message, for chats that have none; makes chats of prompts, as --chat. \\n is understood",
    )
    group.add_argument(
        "--no-line-settings",
        action="store_true",
        help="fields named as settings (n, stop, seed, ...) are data like any others",
    )


def _add_model(group: Any) -> None:
    group.add_argument("--model", "-m", metavar="M", required=True, help="a folder, or a name on the hub")
    group.add_argument("--tokenizer", metavar="T", help="another than that beside the model")
    group.add_argument("--revision", metavar="R", help="a branch, tag or commit on the hub")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto (the default): as the model was saved",
    )
    group.add_argument(
        "--device", metavar="D", default="auto", help="cpu, cuda, cuda:1; auto (the default): a GPU if any"
    )
    group.add_argument("--threads", type=_positive, metavar="N", help="of a CPU")
    _add_code(group, "the model")


def _add_code(group: Any, whose: str) -> None:
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help=f"run Python code that comes with {whose}. Off unless you say so: only for authors whom you trust",
    )


def _add_settings(group: Any) -> None:
    group.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        type=_whole,
        metavar="N",
        help="the longest answer (default: the model's, or 20)",
    )
    group.add_argument(
        "--temperature", type=_number, metavar="T", help="above 0 tokens are drawn; 0: the likeliest one, always"
    )
    group.add_argument("--top-p", type=_number, metavar="P", help="draw from the likeliest, which make up P together")
    group.add_argument("--top-k", type=_whole, metavar="K", help="draw from the K likeliest (generate's default: 50)")
    group.add_argument("-n", "--num-return-sequences", type=_whole, metavar="N", help="answers to each prompt")
    group.add_argument(
        "--seed", type=_whole, metavar="N", help="of what is drawn (default: any; it is noted beside OUT)"
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends an answer; may be given several times. \\n is understood"
    )
    group.add_argument("--logprobs", type=_whole, metavar="K", help="log-probabilities, and of the K likeliest tokens")
    group.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any other option of generate; VALUE is JSON"
    )
    group.add_argument("--generation-config", metavar="FILE", help="a generation_config.json; options here win over it")


def _add_results(group: Any) -> None:
    group.add_argument("--keep", metavar="FIELDS", help="copy these fields of a record into its result: a,b or all")
    group.add_argument("--token-ids", action="store_true", help="write the ids of new tokens, too")
    group.add_argument(
        "--order",
        choices=("input", "finished"),
        default="input",
        help="input (the default): in the end OUT is put into the order of IN",
    )


def _add_course(group: Any) -> None:
    group.add_argument("--limit", type=_positive, metavar="N", help="only the first N records")
    group.add_argument("--retry-errors", action="store_true", help="run lines again that had errors")
    group.add_argument("--restart", action="store_true", help="begin anew; what OUT holds is kept as OUT.bak-1, ...")
    group.add_argument(
        "--on-error",
        choices=("record", "raise"),
        default="record",
        help="record (the default): a bad line gets its error as its result; raise: it ends the run",
    )
    group.add_argument(
        "--fsync",
        metavar="WHEN",
        default="5s",
        help="always, never, or every so often: what a power cut may cost (default: %(default)s)",
    )
    group.add_argument(
        "--window",
        metavar="SIZE",
        default="256MiB",
        help="so much of IN is in memory at a time; prompts share within it (default: %(default)s)",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("this command")
    group.add_argument("--quiet", "-q", action="store_true", help="nothing on stderr but errors")
    group.add_argument("--traceback", action="store_true", help="with an error, show where it came from")
    group.add_argument("--help", "-h", action="help", help="this page")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
