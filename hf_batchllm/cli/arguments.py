"""The options of ``run`` and ``plan``."""

from __future__ import annotations

import argparse
from typing import Any

from .config_flags import add_config_flags
from .exits import EXIT_CODES_HELP
from .grammar_flags import add_grammar_flags
from .parser import Parser
from .prompt_flags import add_prompt_flags

_RUN = """\
Answer every prompt of a file. Prompts that begin alike are computed together,
whatever their order, and results are written as they finish. If the run is
stopped for any reason, run the same command again: it continues.
"""
_RUN_EXAMPLES = f"""\
records:
  A line (or a row) is {{"prompt": "..."}} or {{"messages": [...]}}, with an "id" if
  you like. Settings may stand beside the prompt, under their names in
  model.generate: {{"prompt": "...", "max_new_tokens": 20, "temperature": 0.7}}.
  They win over options of this command, which win over the model's
  generation_config. Lines of an OpenAI batch ({{"custom_id", "method", "url",
  "body"}}) are recognised, and the output then has OpenAI's form.
  More in docs/files.md

examples:
  hf-batchllm run in.jsonl out.jsonl --model path/or/name --max-new-tokens 100
  hf-batchllm run in.csv out.csv --model M --keep question \\
      --template '{{context}}\\n\\nQ: {{question}}\\nA:'
  hf-batchllm run in.parquet out.parquet --model M --prompt-field question \\
      --chat --system 'Be brief.'
  hf-batchllm run in.jsonl out.jsonl --model M -n 4 --temperature 0.8 --seed 1
  hf-batchllm run in.jsonl out.jsonl --model M --shard 2/8    (a job of eight)
  cat in.jsonl | hf-batchllm run - - --model M --set no_repeat_ngram_size=3

{EXIT_CODES_HELP}"""
_PLAN = """\
Show what the prompts of a file have in common, and so what running them
together saves. No model is loaded, only a tokenizer (none for token ids).
"""
_PLAN_EXAMPLES = f"""\
examples:
  hf-batchllm plan in.jsonl --tokenizer path/or/name
  hf-batchllm plan in.jsonl --tokenizer path/or/name --html plan.html

{EXIT_CODES_HELP}"""


def run_parser() -> Parser:
    parser = Parser("run", description=_RUN, epilog=_RUN_EXAMPLES)
    parser.usage = "hf-batchllm run IN OUT --model MODEL [options]"
    files = parser.add_argument_group("files")
    files.add_argument("source", metavar="IN", help=".jsonl, .csv, .tsv, .parquet, .txt, or - for stdin")
    files.add_argument(
        "target", metavar="OUT", help="the same kinds but .txt, or - for stdout. An unfinished OUT is continued"
    )
    add_reading(files)
    files.add_argument(
        "--output-format", metavar="KIND", help="format of OUT: jsonl, csv, tsv or parquet (default: by its suffix)"
    )
    _add_model(parser.add_argument_group("the model"))
    prompts = parser.add_argument_group("prompts")
    add_prompts(prompts)
    _add_images(prompts)
    _add_settings(parser.add_argument_group("answers (a line may have settings of its own)"))
    _add_results(parser.add_argument_group("results"))
    _add_course(parser.add_argument_group("the run"))
    add_config_flags(parser.add_argument_group("the engine (the defaults suit nearly everybody)"))
    add_common(parser)
    return parser


def plan_parser() -> Parser:
    parser = Parser("plan", description=_PLAN, epilog=_PLAN_EXAMPLES)
    parser.usage = "hf-batchllm plan IN --tokenizer T [options]"
    files = parser.add_argument_group("files")
    files.add_argument("source", metavar="IN", help=".jsonl, .csv, .tsv, .parquet, .txt, or - for stdin")
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
    add_common(parser)
    return parser


def add_reading(group: Any) -> None:
    group.add_argument(
        "--format", metavar="KIND", help="format of IN: jsonl, csv, tsv, parquet or txt (default: by its suffix)"
    )
    group.add_argument(
        "--dialect",
        choices=("auto", "plain", "openai"),
        default="auto",
        help="the form of records: plain, or requests of an OpenAI batch. Default: as the first record looks",
    )


def add_prompts(group: Any) -> None:
    group.add_argument(
        "--prompt-field", metavar="NAME", help="the field that is the prompt (default: prompt, messages)"
    )
    group.add_argument(
        "--template",
        metavar="TEXT",
        help="build the prompt from fields: '{context}\\n\\nQ: {question}\\nA:'. \\n and \\t are understood; write a "
        "brace itself as {{ or }}; @FILE reads the template from a file",
    )
    group.add_argument("--chat", action="store_true", help="make each prompt a user's message, for chat models")
    group.add_argument(
        "--system",
        metavar="TEXT",
        help="a system message for chats without one; turns prompts into chats, as --chat does. \\n is understood",
    )
    add_prompt_flags(group)
    group.add_argument(
        "--no-line-settings",
        action="store_true",
        help="treat fields named as settings (n, stop, seed, ...) as data, too",
    )


def _add_images(group: Any) -> None:
    group.add_argument(
        "--image-folder",
        metavar="DIR",
        help="read images whose path is in a line, from inside this folder alone (default: no file is read for a line)",
    )
    group.add_argument(
        "--image-urls",
        action="store_true",
        help="fetch images whose http or https URL is in a line (default: nothing is)",
    )


def _add_model(group: Any) -> None:
    group.add_argument(
        "--model",
        "-m",
        metavar="M",
        required=True,
        help="a folder, or a name on the hub. A PEFT folder brings its base",
    )
    group.add_argument("--tokenizer", metavar="T", help="a tokenizer other than the model's own")
    group.add_argument(
        "--adapter",
        action="append",
        metavar="NAME=PATH",
        help='load a PEFT adapter; may be given several times. A line chooses it by {"adapter": "NAME"}; '
        "--set adapter=NAME is for lines that choose none",
    )
    group.add_argument("--revision", metavar="R", help="a branch, tag or commit on the hub")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="auto (the default): the dtype that the model was saved in",
    )
    group.add_argument(
        "--device",
        metavar="D",
        default="auto",
        help="cpu, cuda, cuda:1, mps (a Mac's GPU), xpu (Intel's); auto (the default): a CUDA or ROCm GPU if there is "
        "one, else cpu",
    )
    group.add_argument(
        "--gpus",
        metavar="N",
        help="several GPUs, a process with a whole model on each: how many, or their numbers, as in 0,2",
    )
    group.add_argument(
        "--tp",
        type=_positive,
        metavar="N",
        help="with --gpus: how many GPUs have a model together, each a part of it, where it does not fit into one",
    )
    group.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (with --gpus, of each process)")
    _add_code(group, "the model")


def _add_code(group: Any, whose: str) -> None:
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help=f"run Python code that comes with {whose}. Off by default: turn it on only for authors whom you trust",
    )


def _add_settings(group: Any) -> None:
    group.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        type=_whole,
        metavar="N",
        help="longest answer, in tokens (default: the model's, or 20)",
    )
    group.add_argument(
        "--temperature", type=_number, metavar="T", help="above 0: sample; 0: always take the likeliest token"
    )
    group.add_argument(
        "--top-p", type=_number, metavar="P", help="sample from the likeliest tokens that make up P together"
    )
    group.add_argument(
        "--top-k", type=_whole, metavar="K", help="sample from the K likeliest tokens (generate's default: 50)"
    )
    group.add_argument("-n", "--num-return-sequences", type=_whole, metavar="N", help="answers to each prompt")
    group.add_argument(
        "--seed",
        type=_whole,
        metavar="N",
        help="seed of sampling (default: a random one, kept beside OUT; with --shard, one made of IN)",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="text that ends an answer; may be given several times. \\n is understood",
    )
    add_grammar_flags(group)
    group.add_argument(
        "--logprobs",
        type=_whole,
        metavar="K",
        help="write log-probabilities of new tokens, and of the K likeliest ones",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set any other option of generate; VALUE is JSON",
    )
    group.add_argument(
        "--generation-config", metavar="FILE", help="a generation_config.json; options of this command win over it"
    )


def _add_results(group: Any) -> None:
    group.add_argument("--keep", metavar="FIELDS", help="copy these fields of a record into its result: a,b or all")
    group.add_argument("--token-ids", action="store_true", help="write the ids of the new tokens, too")
    group.add_argument(
        "--order",
        choices=("input", "finished"),
        default="input",
        help="input (the default): in the end, results get the order of IN; finished: they stay as they came",
    )


def _add_course(group: Any) -> None:
    group.add_argument("--limit", type=_positive, metavar="N", help="only the first N records")
    group.add_argument(
        "--shard",
        metavar="I/N",
        help="only part I of N, counted from 1, into OUT.shard-I-of-N.jsonl: for N jobs, each with a part of its own. "
        "`merge OUT` joins them",
    )
    group.add_argument("--retry-errors", action="store_true", help="run lines with errors again")
    group.add_argument("--restart", action="store_true", help="begin afresh; the old OUT is kept as OUT.bak-1, ...")
    group.add_argument(
        "--on-error",
        choices=("record", "raise"),
        default="record",
        help="record (the default): the result of a bad line is its error; raise: refuse the file if a line is bad",
    )
    group.add_argument(
        "--fsync",
        metavar="WHEN",
        default="5s",
        help="when results are forced onto the disk, and so what a power cut may cost: always, never, or "
        "an interval (default: %(default)s)",
    )
    group.add_argument(
        "--window",
        metavar="SIZE",
        default="256MiB",
        help="how much of IN is in memory at a time; prompts share within a window (default: %(default)s)",
    )


def add_common(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("this command")
    group.add_argument("--quiet", "-q", action="store_true", help="print nothing but errors on stderr")
    group.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    group.add_argument("--help", "-h", action="help", help="show this page")


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
