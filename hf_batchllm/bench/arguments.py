"""The command line's options, and the checks that refuse wrong ones before any work."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import BatchConfig
from .ablation import MAX_RUNNING, NAMES, variants_of
from .plot import PICTURES
from .shapes import SHAPES
from .workload import Mix, MixedGroups, Workload

_DESCRIPTION = """\
Measures this library on a list of prompts with shared prefixes, beside model.generate (at its best batch size) and
model.generate_batch. All run in one process, each after a warm-up; the median of several runs counts.
"""
_EXAMPLES = f"""\
workloads:
  rfc       groups of prompts that share a prefix: 64 prompts, 16 to a prefix; 512 shared tokens, 32 own tokens and 32
            new tokens each
  decode    nothing shared, long answers: 256 prompts of 128 tokens, 512 new tokens each
  sharegpt  lengths mixed as in people's chats: 256 prompts of about 220 tokens, answers of about 200 on average. Many
            are short and a few reach 2,048; --own and --new set the longest, and all others shrink with it. EOS is
            ignored: each answer has a length of its own, the same for every contender. Unlike in real runs it is known
            beforehand (see --stop-after): to this library through its scheduler, to generate_batch as a limit of each
            request. model.generate runs each batch, sorted by prompt length, to its longest answer
  mixed     groups of prompts that share a prefix, with lengths that differ between groups and within them: 400 prompts,
            8 to a prefix. --shared (2,000) and --own (200) are medians; --new (2,048) is the longest answer, of which
            the median answer is a tenth. Answers are known beforehand as in sharegpt; with --stop-after they end at
            random instead

examples:
  python -m hf_batchllm.bench --config tiny                                 takes a minute on a laptop
  python -m hf_batchllm.bench --model path/or/name --degree 1               nothing shared
  python -m hf_batchllm.bench --config llama-8b --device cuda --dtype bfloat16 \\
      --requests 800 --shared 2000 --own 200 --new 100 --rival-requests 64
  python -m hf_batchllm.bench --config tiny --degrees 1,2,4,8 --floor       how much sharing brings
  python -m hf_batchllm.bench --config tiny --workload decode --steps-per-sync 1,2,4
  python -m hf_batchllm.bench --config tiny --ablation --runs 3             what each part of the engine brings
  python -m hf_batchllm.bench --config tiny --ablation order,admission --max-running 8 --set kv_memory=3MB

shapes for --config (random weights), or a config.json:
  {", ".join(SHAPES)}
"""

_RIVALS = ("generate", "generate_batch")
_DEFAULTS = {
    "rfc": {"requests": 64, "degree": 16, "shared": 512, "own": 32, "new": 32},
    "decode": {"requests": 256, "degree": 1, "shared": 0, "own": 128, "new": 512},
    "sharegpt": {"requests": 256, "own": 2048, "new": 2048},
    "mixed": {"requests": 400, "degree": 8, "shared": 2000, "own": 200, "new": 2048},
}


def read_arguments(arguments: Sequence[str] | None, program: str) -> argparse.Namespace:
    """The options, checked. Adds ``workloads``, ``fields`` (of BatchConfig) and ``torch_device``, made from them."""
    parser = _parser(program)
    asked = parser.parse_args(arguments)
    try:
        asked.torch_device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        _refuse_conflicts(asked)
        asked.workloads = _workloads(asked)
        asked.fields = dict(_setting(text) for text in asked.set)
        BatchConfig.of(None, asked.fields)
        _refuse_fields_of_ablation(asked)
        if asked.steps_per_sync and (double := {"steps_per_sync", "cuda_graphs"} & set(asked.fields)):
            raise ValueError(f"--steps-per-sync sets {', '.join(sorted(double))} itself: leave out --set")
        for flag, path in (("--json", asked.json), ("--plot", asked.plot), ("--trace", asked.trace)):
            if path and not path.parent.is_dir():
                raise ValueError(f"{flag} {path}: there is no folder {path.parent}")
            if path and path.is_dir():
                raise ValueError(f"{flag} {path} is a folder: name a file in it")
        most = 512 if asked.torch_device.type == "cuda" else 64
        asked.batch_sizes = asked.batch_sizes or [1 << power for power in range(most.bit_length())]
        if asked.rivals is None:
            asked.rivals = _RIVALS
        if asked.torch_device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device {asked.device}: this torch finds no CUDA device")
        if asked.torch_device.type == "mps" and not torch.backends.mps.is_available():
            raise ValueError(f"--device {asked.device}: this torch finds no GPU of a Mac (MPS)")
        if asked.config and asked.config not in SHAPES and not Path(asked.config).exists():
            raise ValueError(f"--config {asked.config!r} is neither one of {', '.join(SHAPES)} nor a file")
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    asked.runs = asked.runs or (1 if asked.ablation else 3)
    asked.max_running = asked.max_running or MAX_RUNNING
    if asked.floor is None:
        asked.floor = asked.torch_device.type != "cpu" and not asked.stop_after
    return asked


def _refuse_conflicts(asked: argparse.Namespace) -> None:
    tables = {"--degrees": asked.degrees, "--steps-per-sync": asked.steps_per_sync, "--ablation": asked.ablation}
    given = [name for name, value in tables.items() if value]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} are two tables: ask for one of them")
    if given:
        (table,) = given
        unused = {
            "--no-pieces": asked.no_pieces,
            "--gpus": asked.gpus,
            "--rivals generate_batch": "generate_batch" in (asked.rivals or ()),
        }
        if not asked.degrees:
            numbers = {"--rival-requests": asked.rival_requests, "--rival-runs": asked.rival_runs}
            unused |= {"--rivals": asked.rivals, "--batch-sizes": asked.batch_sizes} | numbers
        if asked.steps_per_sync:
            unused["--floor"] = asked.floor
        if asked.ablation:
            unused["--stop-after"] = asked.stop_after
        if given := [name for name, value in unused.items() if value]:
            raise ValueError(f"{given[-1]} has no place in the table of {table}: leave it out")
    if asked.degrees and (asked.workload != "rfc" or asked.degree):
        other = "--degree" if asked.degree else f"--workload {asked.workload}"
        raise ValueError(f"--degrees varies the rfc workload: leave out {other}")
    if asked.ablation and (asked.workload != "rfc" or asked.shared == 0 or asked.degree == 1):
        other = "--shared 0" if asked.shared == 0 else "--degree 1"
        other = other if asked.workload == "rfc" else f"--workload {asked.workload}"
        raise ValueError(f"--ablation is about prompts that share prefixes: leave out {other}")
    if asked.gpus and asked.stop_after:
        raise ValueError("--gpus loads the model in other processes, where --stop-after does nothing: leave out one")
    if asked.max_running and "admission" not in (asked.ablation or ()):
        raise ValueError("--max-running is about the row admission of --ablation: ask for it")
    if asked.requests and len(asked.requests) != 1 and len(asked.requests) != len(asked.degrees or [0]):
        what = f"--degrees has {len(asked.degrees)}" if asked.degrees else "there is a single workload"
        raise ValueError(f"--requests has {len(asked.requests)} numbers, and {what}")
    if asked.workload == "sharegpt":
        for name in ("shared", "degree", "sorted", "stop_after"):
            if getattr(asked, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} does not go with --workload sharegpt: its lengths are drawn"
                )
    if asked.off_new and not asked.steps_per_sync:
        raise ValueError("--off-new is about the runs without graphs of --steps-per-sync: ask for it")
    if asked.stop_after and (asked.floor or asked.degrees):
        other = "--floor" if asked.floor else "--degrees"
        raise ValueError(f"--stop-after ends answers at random, and {other} needs to know their lengths")
    if asked.profile:
        if asked.torch_device.type != "cuda":
            raise ValueError("--profile says where a GPU's time goes: it needs --device cuda")
        unused = {"--steps-per-sync": asked.steps_per_sync, "--ablation": asked.ablation, "--rivals": asked.rivals}
        unused |= {"--rival-requests": asked.rival_requests, "--rival-runs": asked.rival_runs, "--runs": asked.runs}
        unused |= {"--batch-sizes": asked.batch_sizes, "--no-pieces": asked.no_pieces, "--floor": asked.floor}
        unused |= {"--plot": asked.plot, "--gpus": asked.gpus}
        if given := [name for name, value in unused.items() if value]:
            raise ValueError(f"--profile measures nothing else: leave out {given[0]}")
    if asked.trace and (given := [name for name, value in {**tables, "--profile": asked.profile}.items() if value]):
        raise ValueError(f"--trace draws one run, not {given[0]}")
    if asked.plot and asked.steps_per_sync:
        raise ValueError("--plot draws one workload, --degrees or --ablation, not --steps-per-sync")
    for flag, path in (("--plot", asked.plot), ("--trace", asked.trace)):
        if path and path.suffix not in PICTURES:
            raise ValueError(f"{flag} {path}: the name must end in {', '.join(PICTURES)}")
        if path and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(f"{flag} needs matplotlib: pip install matplotlib, or pip install 'hf-batchllm[bench]'")


def _refuse_fields_of_ablation(asked: argparse.Namespace) -> None:
    if not asked.ablation:
        return
    own = {name for variant in variants_of(asked.ablation) for name in variant.fields} | {"scheduler"}
    if double := sorted(own & set(asked.fields)):
        raise ValueError(f"--ablation sets {', '.join(double)} itself: leave out --set")


def _workloads(asked: argparse.Namespace) -> list[Workload | Mix]:
    """One workload, or one for each of --degrees."""
    values = {**_DEFAULTS[asked.workload], "seed": asked.seed}
    values |= {
        name: getattr(asked, name) for name in ("degree", "shared", "own", "new") if getattr(asked, name) is not None
    }
    given = asked.requests or [values["requests"]]
    values["requests"] = given[0]
    if asked.workload == "sharegpt":
        return [Mix(**values)]
    values["shuffle"] = not asked.sorted
    if asked.workload == "mixed":
        return [MixedGroups(**values, open_ended=asked.stop_after is not None)]
    if not asked.degrees:
        return [Workload(**values)]
    most = Workload(**{**values, "degree": max(asked.degrees)})
    counts = given if len(given) > 1 else [_equally_long(most, degree) for degree in asked.degrees]
    return [
        Workload(**{**values, "degree": degree, "requests": count})
        for degree, count in zip(asked.degrees, counts, strict=True)
    ]


def _equally_long(most: Workload, degree: int) -> int:
    """The number of prompts at ``degree`` for which a run takes about as long as ``most``: at least one group."""

    def tokens(degree: int) -> float:
        return most.shared / degree + most.own + most.new

    return max(round(most.requests * tokens(most.degree) / tokens(degree) / degree), 1) * degree


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set takes NAME=VALUE, not {text!r}")
    with contextlib.suppress(ValueError):
        return name, json.loads(value)
    return name, value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _positives(text: str) -> list[int]:
    return [_positive(number) for number in text.split(",")]


def _wholes(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, or several with commas") from None


def _rivals(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name and name != "none")
    for name in names:
        if name not in _RIVALS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(_RIVALS)}, none")
    return names


def _ablation(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(NAMES)}")
    if not names:
        raise argparse.ArgumentTypeError(f"name some of {', '.join(NAMES)}, or none for all of them")
    return names


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("the model")
    which = model.add_mutually_exclusive_group()
    which.add_argument("--model", help="a folder or a name on the hub")
    which.add_argument("--config", help="a shape with random weights (default: tiny)")
    model.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one, else cpu)")
    model.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU, else bfloat16"
    )
    model.add_argument("--threads", type=_positive, metavar="N", help="torch's threads on a CPU")
    model.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="set a field of BatchConfig")
    _add_work(parser.add_argument_group("the workload (defaults: see below)"))
    _add_measuring(parser.add_argument_group("what is measured"))
    return parser


def _add_work(work: Any) -> None:
    work.add_argument("--workload", choices=tuple(_DEFAULTS), default="rfc", help="default: %(default)s")
    work.add_argument(
        "--requests",
        type=_wholes,
        metavar="N",
        help="number of prompts. With --degrees: one number for each degree, or one for the largest degree; the others "
        "then get as many as run for about the same time",
    )
    work.add_argument("--degree", type=int, metavar="N", help="prompts that share each prefix")
    work.add_argument("--shared", type=int, metavar="N", help="tokens of each prefix")
    work.add_argument("--own", type=int, metavar="N", help="tokens of each prompt after its prefix")
    work.add_argument("--new", type=int, metavar="N", help="tokens to generate for each prompt")
    work.add_argument("--sorted", action="store_true", help="pass the prompts in group by group, not shuffled")
    work.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    work.add_argument(
        "--stop-after",
        type=_positive,
        metavar="N",
        help="end answers at random, after N tokens on average and --new at most: tokens are drawn, and one in N ends "
        "its answer. Lengths then differ between contenders, and speeds count the tokens really made",
    )


def _add_measuring(measuring: Any) -> None:
    measuring.add_argument(
        "--gpus",
        metavar="N",
        help="a GeneratorPool beside one process: how many GPUs, or their numbers, as in 0,1. Its share is of as many "
        "floors",
    )
    measuring.add_argument(
        "--runs",
        type=_positive,
        metavar="N",
        help="runs of each contender; the median counts (default: 3; with --ablation: 1)",
    )
    measuring.add_argument(
        "--rivals",
        type=_rivals,
        metavar="NAMES",
        help=f"{','.join(_RIVALS)} (default: both), or none. With --degrees only generate is measured; with the other "
        "tables none",
    )
    measuring.add_argument(
        "--rival-requests",
        type=_positive,
        metavar="N",
        help="give the rivals only the first N prompts (default: all; 64 for generate_batch on a GPU; with --degrees "
        "two of generate's best batches)",
    )
    measuring.add_argument("--rival-runs", type=_positive, metavar="N", help="runs of the rivals (default: as --runs)")
    measuring.add_argument(
        "--batch-sizes",
        type=_positives,
        metavar="N,N,...",
        help="batch sizes that model.generate is tried with (default: 1,2,4,...,64; on a GPU up to 512)",
    )
    measuring.add_argument(
        "--no-pieces", action="store_true", help="do not time the model's parts alone, without an engine"
    )
    measuring.add_argument(
        "--floor",
        action=argparse.BooleanOptionalAction,
        help="work out the floor, the least time that a run can take, from two rates of the machine measured in the "
        "same run (default: on a GPU)",
    )
    measuring.add_argument(
        "--degrees",
        type=_positives,
        metavar="N,N,...",
        help="instead: a table over the number of prompts that share a prefix",
    )
    measuring.add_argument(
        "--steps-per-sync",
        type=_positives,
        metavar="N,N,...",
        help="instead: a table over BatchConfig.steps_per_sync, with CUDA graphs and without",
    )
    measuring.add_argument(
        "--ablation",
        nargs="?",
        type=_ablation,
        const=NAMES,
        metavar="NAMES",
        help=f"instead: a table of what each part of the engine brings: the same prompts with one part off at a time. "
        f"NAMES: some of {','.join(NAMES)} (default: all). Each round has one run of each; sharing runs in the first "
        "round only",
    )
    measuring.add_argument(
        "--max-running",
        type=_positive,
        metavar="N",
        help=f"the most sequences at once in --ablation's row admission (default: {MAX_RUNNING})",
    )
    measuring.add_argument(
        "--profile",
        action="store_true",
        help="instead: where the GPU's time goes, by kind of kernel, and its gaps (with --degrees, for each degree)",
    )
    measuring.add_argument(
        "--off-new",
        type=_positive,
        metavar="N",
        help="with --steps-per-sync: new tokens of the runs without graphs, which are slow",
    )
    measuring.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    measuring.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into this .svg, .png or .pdf")
    measuring.add_argument(
        "--trace", type=Path, metavar="FILE", help="draw the tokens of each step over time, for this library's last run"
    )
