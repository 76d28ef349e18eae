"""The options of ``run`` and ``plan``: those of the command, of ``generate`` by its table, and of BatchConfig."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ..config import BatchConfig
from ..errors import BatchLLMError
from ..files.settings import NAMES, NO_SETTINGS, GenerationSettings, read_settings
from ..files.templates import unescaped
from ..inputs.option_row import Takes
from ..inputs.option_table import ALIASES, PROMPT_OPTIONS, TABLE
from .console import EXIT_CODES_HELP, PROGRAM, reason

_WIDEST_HELP = 110  # columns


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations: ``--max-new-token`` is no option, and not another one."""

    def __init__(self, command: str, usage: str, **given: Any) -> None:
        prog = f"{PROGRAM} {command}"
        super().__init__(
            prog, f"{prog} {usage}", formatter_class=_formatter, allow_abbrev=False, add_help=False, **given
        )


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(shutil.get_terminal_size().columns, _WIDEST_HELP) - 2
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=width)


# -- values ------------------------------------------------------------------------------------------------------------


def value(text: str) -> Any:
    """JSON, or a number such as ``.7``; else the text itself."""
    if text.strip() == "null":
        raise argparse.ArgumentTypeError("null says nothing: leave the option out")
    for read in (json.loads, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


def positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (number := int(text)) > 0:
            return number
    raise argparse.ArgumentTypeError(f"it must be a whole number above 0, not {text!r}")


def size(text: str) -> int:
    """``256MiB``, ``256M`` or bytes."""
    found = re.fullmatch(r"(\d+|\d*\.\d+)([KMG]?)(I?B)?", text.strip().upper())
    if found is None or (count := int(float(found[1]) * 1024 ** " KMG".index(found[2] or " "))) < 1:
        raise argparse.ArgumentTypeError(f"it must be a size such as 256MiB, not {text!r}")
    return count


def text_of(path: str) -> str:
    """What is in a file."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8-sig") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(reason(error)) from error


def json_or_file(text: str) -> Any:
    """JSON, or a file with JSON."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"it is neither JSON nor a file: {text}")
    try:
        return json.loads(text_of(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: it is not JSON ({error})") from error


def config_file(path: str) -> GenerationSettings:
    """The settings in a generation_config.json, or in the one of a folder."""
    given = json_or_file(os.path.join(path, "generation_config.json") if os.path.isdir(path) else path)
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f"{path}: it holds no JSON object")
    try:
        own = {name: each for name, each in given.items() if name != "transformers_version" and name[0] != "_"}
        return read_settings(own, settle=False)
    except BatchLLMError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error


def template(text: str) -> str:
    return text_of(text[1:]) if text.startswith("@") else unescaped(text)


def fields(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def add_options(group: Any, options: Mapping[str, str]) -> Any:
    """``options``: their names and metavars as the help shows them, and the help. Without a metavar it is a switch."""
    for given, help in options.items():
        names, _, metavar = given.replace(", ", ",").partition(" ")
        flags = names.split(",")
        how: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        group.add_argument(*flags, help=help, **how | _HOW.get(flags[0], {}))
    return group


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# -- options of generate -----------------------------------------------------------------------------------------------


class _Shown(NamedTuple):
    """A setting that has a line in the help."""

    metavar: str
    help: str
    type: Callable[[str], Any] = value


_SHOWN = {
    "chat_template_kwargs": _Shown(
        "JSON", "what else chat templates are given, such as '{\"enable_thinking\": false}'", json_or_file
    ),
    "tools": _Shown("FILE", "the tools that chats may call: a JSON file with a list of schemas", json_or_file),
    "max_prompt_tokens": _Shown("N", "cut longer prompts, instead of running them whole"),
    "truncation_side": _Shown("SIDE", "where they are cut: left (the default: the end of a prompt stays) or right"),
    "max_new_tokens": _Shown("N", "longest answer, in tokens (default: the model's, or 20)"),
    "temperature": _Shown("T", "above 0: sample; 0: always take the most likely token"),
    "top_p": _Shown("P", "sample from the most likely tokens that make up P together"),
    "top_k": _Shown("K", "sample from the K most likely tokens (generate's default: 50)"),
    "num_return_sequences": _Shown("N", "answers to each prompt"),
    "seed": _Shown("N", "seed of sampling (default: a random one, kept beside OUT; with --shard, one made of IN)"),
    "stop": _Shown("TEXT", "text that ends an answer; may be given several times. \\n is understood", unescaped),
    "schema": _Shown("FILE", "answers are JSON of this schema: a file, or the JSON itself", json_or_file),
    "regex": _Shown("REGEX", "answers match this regular expression", str),
    "grammar": _Shown("FILE", "answers are of the grammar in this file, in Lark", text_of),
    "choice": _Shown("TEXT", "answers are one of these texts; to be given several times", str),
    "logprobs": _Shown("K", "write log-probabilities of new tokens, and of the K most likely ones"),
}
_BY_SETTING = {ALIASES.get(name, name): shown for name, shown in _SHOWN.items()}
_SEVERAL = ("stop_strings", "choice")  # given once for each text
_OWN = ("adapter",)  # --adapter loads one; --set adapter=NAME chooses it


def add_settings(group: Any, names: Iterable[str]) -> None:
    """The settings as options, under all of their names. Those of ``_SHOWN`` have a line in the help."""
    names = set(names).difference(_OWN)
    for name in [*(name for name in _SHOWN if name in names), *sorted(names.difference(_SHOWN))]:
        known = ALIASES.get(name, name)
        row = TABLE.get(known)
        shown = _BY_SETTING.get(known, _Shown("VALUE", ""))
        how: dict[str, Any] = {"type": shown.type, "metavar": shown.metavar}
        if row and row.takes is Takes.FLAG:
            how = {"action": argparse.BooleanOptionalAction}
        elif known in _SEVERAL:
            how["action"] = "append"
        short = ["-n"] if name == "num_return_sequences" else []
        help = shown.help if name in _SHOWN else argparse.SUPPRESS
        group.add_argument(*short, option(name), dest=known, help=help, **how)


def settings_in(asked: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as options, by their names."""
    names = {ALIASES.get(name, name) for name in NAMES}.difference(_OWN)
    return {name: given for name in sorted(names) if (given := getattr(asked, name, None)) is not None}


# -- options of BatchConfig --------------------------------------------------------------------------------------------

_CONFIG = [field.name for field in dataclasses.fields(BatchConfig)]


def add_config(group: Any, names: Collection[str]) -> None:
    """The fields of these names, with the first sentence that the class has for each, and the default."""
    docs = dict(re.findall(r"^(\w+): (.*(?:\n    .*)*)", inspect.getdoc(BatchConfig) or "", re.MULTILINE))
    for field in (field for field in dataclasses.fields(BatchConfig) if field.name in names):
        first, *more = re.split(r"(?<=[.]) (?=[A-Z])", " ".join(docs[field.name].split()))
        switch = isinstance(field.default, bool)
        default = ("on" if field.default else "off") if switch else field.default
        said = next((each for each in more if each.startswith("None: ")), f"Default: {default}")
        help = f"{first} {said.replace('None: ', 'Default: ')}".rstrip(".").replace("%", "%%")
        if switch:
            group.add_argument(option(field.name), action=argparse.BooleanOptionalAction, help=help)
        else:
            metavar = "NAME" if isinstance(field.default, str) else "N"
            group.add_argument(option(field.name), type=value, metavar=metavar, help=help)


def config_from(asked: argparse.Namespace) -> BatchConfig:
    given = {name: getattr(asked, name, None) for name in _CONFIG}
    return BatchConfig(**{name: each for name, each in given.items() if each is not None})


# -- the commands ------------------------------------------------------------------------------------------------------

_IN = {"source IN": ".jsonl, .csv, .tsv, .parquet, .txt, or - for stdin"}
_OUT = {"target OUT": "the same kinds but .txt, or - for stdout. An unfinished OUT is continued"}
_FORMAT = {
    "--format KIND": "format of IN: jsonl, csv, tsv, parquet or txt (default: by its suffix)",
}
OUTPUT_FORMAT = {"--output-format KIND": "format of OUT: jsonl, csv, tsv or parquet (default: by its suffix)"}
_PICTURES = {"--json": "print figures as JSON", "--html FILE": "write a picture of the plan"}
_MODEL = {
    "-m, --model M": "a folder, or a name on the hub. A PEFT folder brings its base",
    "--tokenizer T": "a tokenizer other than the model's own",
    "--adapter NAME=PATH": 'load a PEFT adapter; may be given several times. A line chooses it by {"adapter": "NAME"}; '
    "--set adapter=NAME is for lines that choose none",
    "--revision R": "a branch, tag or commit on the hub",
    "--dtype D": "auto (the default: that in which the model was saved), float32, bfloat16 or float16",
}
_DEVICE_OR_GPUS = {
    "--device D": "cpu, cuda, cuda:1, mps (a Mac), xpu (Intel), or auto (the default): a CUDA or ROCm GPU, else cpu",
    "--gpus N": "several GPUs, a process with a whole model on each: how many, or their numbers, as in 0,2",
}
_PROCESSES = {
    "--tp N": "with --gpus: how many GPUs have a model together, each a part of it, where it does not fit into one",
    "--threads N": "CPU threads (with --gpus, of each process)",
}
_TOKENIZER = {"--tokenizer, --model T": "a folder, or a name on the hub"}
_CODE = {
    "--trust-remote-code": "run Python code that comes with the model or tokenizer. For authors whom you trust",
}
_FIELD_OR_TEMPLATE = {
    "--prompt-field NAME": "the field that is the prompt (default: prompt, messages)",
    "--template TEXT": "build the prompt from fields: '{context}\\n\\nQ: {question}\\nA:'. \\n and \\t are understood; "
    "write a brace itself as {{ or }}; @FILE reads the template from a file",
}
_PROMPTS = {
    "--chat": "make each prompt a user's message, for chat models",
    "--system TEXT": "a system message for chats without one; makes prompts chats, as --chat does. \\n is understood",
    "--no-line-settings": "treat fields named as settings (n, stop, seed, ...) as data, too",
}
_IMAGES = {
    "--image-folder DIR": "read images whose path is in a line, from inside this folder alone (default: none is read)",
    "--image-urls": "fetch images whose http or https URL is in a line (default: none is fetched)",
}
_ANSWERS = {
    "--set NAME=VALUE": "any option of generate by its name there; VALUE is JSON",
    "--generation-config FILE": "a generation_config.json; options of this command win over it",
}
_RESULTS = {
    "--keep FIELDS": "copy these fields of a record into its result: a,b or all",
    "--token-ids": "write the ids of the new tokens, too",
}
_COURSE = {
    "--shard I/N": "only part I of N, counted from 1, into OUT.shard-I-of-N.jsonl. `merge OUT` joins the parts",
    "--retry-errors": "run lines with errors again",
    "--restart": "begin afresh; the old OUT is kept as OUT.bak-1, ...",
    "--on-error WHAT": "record (the default): a bad line's result is its error; raise: a bad line refuses the file",
}
_LIMIT = {"--limit N": "only the first N records"}
_WINDOW = {
    "--window SIZE": "how much of IN is in memory at a time; prompts share within a window (default: %(default)s)",
}
_COMMON = {
    "-q, --quiet": "print nothing but errors on stderr",
    "--traceback": "show the traceback of an error",
    "-h, --help": "show this page",
}
_HOW: dict[str, dict[str, Any]] = {  # what argparse is told of an option beside its help
    "-m": {"type": os.path.expanduser, "required": True},
    "--tokenizer": {"type": os.path.expanduser},
    "--adapter": {"action": "append", "default": [], "dest": "adapters"},
    "--dtype": {"choices": ("auto", "float32", "bfloat16", "float16"), "default": "auto"},
    "--tp": {"type": positive},
    "--threads": {"type": positive},
    "--device": {"default": "auto"},
    "--template": {"type": template},
    "--system": {"type": unescaped},
    "--set": {"action": "append", "default": []},
    "--generation-config": {"type": config_file, "default": NO_SETTINGS},
    "--keep": {"type": fields, "default": []},
    "--on-error": {"choices": ("record", "raise"), "default": "record"},
    "--limit": {"type": positive},
    "--window": {"type": size, "default": "256MiB"},
    "-h": {"action": "help"},
}
_RUN = """\
Answer every prompt of a file. Prompts that begin alike are computed together,
whatever their order, and results are written as they finish. If the run is
stopped for any reason, run the same command again: it continues.
"""
_RECORDS = """records:
  A line (or a row) is {"prompt": "..."} or {"messages": [...]}, with an "id" if
  you like. Settings may stand beside the prompt, under their names in
  model.generate: {"prompt": "...", "max_new_tokens": 20, "temperature": 0.7}.
  They win over options of this command, which win over the model's
  generation_config. Lines of an OpenAI batch ({"custom_id", "method", "url",
  "body"}) are recognised: then OUT has OpenAI's form. More in docs/files.md

examples:
  hf-batchllm run in.jsonl out.jsonl --model path/or/name --max-new-tokens 100
  hf-batchllm run in.csv out.csv --model M --keep question \\
      --template '{context}\\n\\nQ: {question}\\nA:'
  hf-batchllm run in.parquet out.parquet --model M --chat --system 'Be brief.'
  hf-batchllm run in.jsonl out.jsonl --model M -n 4 --temperature 0.8 --seed 1
  hf-batchllm run in.jsonl out.jsonl --model M --shard 2/8    (a job of eight)
  cat in.jsonl | hf-batchllm run - - --model M --no-repeat-ngram-size 3

"""
_OTHER_SETTINGS = """Every other option of generate is an option here, too: --min-p 0.05,
--num-beams 4, --ignore-eos, ... (docs/generate.md)"""
_PLAN = """\
Show what the prompts of a file have in common, and so what running them
together saves. No model is loaded, only a tokenizer (none for token ids).
"""
_PLAN_EXAMPLES = """\
examples:
  hf-batchllm plan in.jsonl --tokenizer path/or/name
  hf-batchllm plan in.jsonl --tokenizer path/or/name --html plan.html

"""


def run_parser() -> Parser:
    parser = Parser("run", "IN OUT --model MODEL [options]", description=_RUN, epilog=_RECORDS + EXIT_CODES_HELP)
    group = parser.add_argument_group
    add_options(group("files"), _IN | _OUT | _FORMAT | OUTPUT_FORMAT)
    model = add_options(group("the model"), _MODEL)
    add_options(model.add_mutually_exclusive_group(), _DEVICE_OR_GPUS)
    add_options(model, _PROCESSES | _CODE)
    add_options(_add_prompts(parser), _IMAGES)
    answers = group("answers (a line may have settings of its own)", _OTHER_SETTINGS)
    add_settings(answers, NAMES.difference(PROMPT_OPTIONS))
    add_options(answers, _ANSWERS)
    add_options(group("results"), _RESULTS)
    add_options(group("the run"), _LIMIT | _WINDOW | _COURSE)
    add_config(group("the engine (the defaults suit nearly everybody)"), _CONFIG)
    add_common(parser)
    return parser


def plan_parser() -> Parser:
    parser = Parser("plan", "IN --tokenizer T [options]", description=_PLAN, epilog=_PLAN_EXAMPLES + EXIT_CODES_HELP)
    group = parser.add_argument_group
    add_options(group("files"), _IN | _FORMAT | _PICTURES | _LIMIT)
    add_options(group("the tokenizer"), _TOKENIZER | _CODE)
    _add_prompts(parser)
    add_config(group("sharing"), ["min_shared_tokens"])
    add_common(parser)
    return parser


def add_common(parser: Parser) -> None:
    add_options(parser.add_argument_group("this command"), _COMMON)


def _add_prompts(parser: Parser) -> Any:
    group = parser.add_argument_group("prompts")
    add_options(group.add_mutually_exclusive_group(), _FIELD_OR_TEMPLATE)
    add_options(group, _PROMPTS)
    add_settings(group, PROMPT_OPTIONS)
    return group
