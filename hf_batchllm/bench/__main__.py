"""The command line, and the table that it prints."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from ..config import BatchConfig
from .contenders import Generate, GenerateBatch, Ours, Prompts, Tokens, best_batch_size, timed
from .models import SHAPES, load_model
from .pieces import Pieces, bare_pieces
from .workload import Workload

_DESCRIPTION = """\
Prompts with shared prefixes: this library beside model.generate (at its best batch size) and model.generate_batch, all
in one process, each after a warm-up, the median of several runs.
"""
_EXAMPLES = f"""\
examples:
  python -m hf_batchllm.bench --config tiny                                 a minute on a laptop
  python -m hf_batchllm.bench --model path/or/name --degree 1               nothing shared
  python -m hf_batchllm.bench --config llama-8b --device cuda --dtype bfloat16 \\
      --requests 800 --shared 2000 --own 200 --new 100 --rival-requests 64

shapes for --config: {", ".join(SHAPES)} (random weights), or a config.json
"""


_RIVALS = ("generate", "generate_batch")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        workload = Workload(
            asked.requests, asked.shared, asked.own, asked.new, asked.degree, not asked.sorted, asked.seed
        )
        fields = dict(_setting(text) for text in asked.set)
        BatchConfig.of(None, fields)
        device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if asked.json and not asked.json.parent.is_dir():
            raise ValueError(f"--json {asked.json}: there is no folder {asked.json.parent}")
        if asked.config and asked.config not in SHAPES and not Path(asked.config).exists():
            raise ValueError(f"--config {asked.config!r} is neither one of {', '.join(SHAPES)} nor a file")
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    if asked.threads:
        torch.set_num_threads(asked.threads)
    dtype = getattr(torch, asked.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    model = load_model(asked.model, asked.config or (None if asked.model else "tiny"), device, dtype)
    vocabulary = model.config.get_text_config().vocab_size
    machine = _machine(device)
    print(f"{_name(model)}, {str(dtype).removeprefix('torch.')}, on {machine}\n{workload}\n", flush=True)

    ours = Ours(model, fields)
    rows = [_measure(ours, workload, workload.prompts(vocabulary), asked.runs)]
    pieces = None
    if not asked.no_pieces:
        pieces = bare_pieces(model, ours.scheduler.sizes)
    smaller = workload.first(asked.rival_requests or workload.requests)
    given = smaller.prompts(vocabulary)
    runs = asked.rival_runs or asked.runs
    tried: dict[int, float] = {}
    if "generate" in asked.rivals:
        best, tried = best_batch_size(model, given, smaller.new, asked.batch_sizes)
        rows.append(_measure(Generate(model, best, f"model.generate, batch {best}"), smaller, given, runs))
    if "generate_batch" in asked.rivals:
        orders = {"shuffled": given} if workload.shuffle else {}
        for order, prompts in {**orders, "sorted": smaller.grouped(vocabulary)}.items():
            rows.append(_measure(GenerateBatch(model, f"generate_batch, {order}"), smaller, prompts, runs))
    same = _agreement(rows, workload, smaller, vocabulary)
    print(_table(rows, pieces))
    if same is not None:
        note = "" if dtype == torch.float32 else " (short of float32 they part where the best logits all but tie)"
        print(f"\nsame tokens as model.generate: {same[0]} of {same[1]} prompts{note}")
    if tried:
        print("model.generate, prompts/s by batch size: " + ", ".join(f"{n}: {s:.2f}" for n, s in tried.items()))
    print(f"\n{ours.report}")
    if asked.json:
        _write(asked.json, rows, pieces, same, tried, workload, machine, model, ours)
    return 0


def _measure(contender: Any, workload: Workload, prompts: Prompts, runs: int) -> dict[str, Any]:
    device = contender.model.device
    row: dict[str, Any] = {"name": contender.name, "requests": len(prompts), "new": workload.new}
    print(f"{contender.name} ...", end=" ", flush=True)
    try:
        contender.run(prompts[:2], min(2, workload.new))  # what is made or compiled on first use
        seconds = []
        for _ in range(runs):
            took, row["tokens"] = timed(device, lambda: contender.run(prompts, workload.new))
            seconds.append(took)
            print(f"{took:.2f} s", end=" ", flush=True)
    except Exception as error:  # a rival that fails is reported as such
        if isinstance(contender, Ours):
            raise
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(row["error"][:100])
        return row
    print(flush=True)
    row["runs"] = seconds
    row["seconds"] = statistics.median(seconds)
    row["prompts_per_second"] = len(prompts) / row["seconds"]
    row["new_tokens_per_second"] = len(prompts) * workload.new / row["seconds"]
    return row


def _agreement(
    rows: list[dict[str, Any]], workload: Workload, smaller: Workload, vocabulary: int
) -> tuple[int, int] | None:
    """How many prompts got the same tokens from ``generate`` as from us."""
    theirs_row = next((row for row in rows if row["name"].startswith("model.generate,") and "tokens" in row), None)
    if theirs_row is None:
        return None
    ours = _by_prompt(workload.prompts(vocabulary), rows[0]["tokens"])
    theirs = _by_prompt(smaller.prompts(vocabulary), theirs_row["tokens"])
    return sum(ours[prompt] == tokens for prompt, tokens in theirs.items()), len(theirs)


def _by_prompt(prompts: Prompts, tokens: Tokens) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): answer for prompt, answer in zip(prompts, tokens, strict=True)}


def _table(rows: list[dict[str, Any]], pieces: Pieces | None) -> str:
    ours = rows[0]["prompts_per_second"]
    lines = [f"\n{'':<28}{'prompts':>8}{'seconds':>10}{'prompts/s':>11}{'new tokens/s':>14}{'ours is':>10}"]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['name']:<28}{row['requests']:>8,}  failed: {row['error'][:60]}")
            continue
        ratio = "" if row is rows[0] else f"{ours / row['prompts_per_second']:.2f} x"
        lines.append(
            f"{row['name']:<28}{row['requests']:>8,}{row['seconds']:>10.2f}{row['prompts_per_second']:>11.2f}"
            f"{row['new_tokens_per_second']:>14,.0f}{ratio:>10}"
        )
    if pieces is not None:
        over = rows[0]["seconds"] / pieces.total - 1
        what = "matrix products" if pieces.products_only else "layers without attention"
        lines += [
            "",
            f"{'bare pieces':<28}{'':>8}{pieces.total:>10.2f}    ours takes {over:.0%} more",
            f"{'  prompts: ' + what:<36}{pieces.prefill:>10.2f}",
            f"{'  decode: layers without attention':<36}{pieces.decode:>10.2f}",
            f"{'  LM head where a row samples':<36}{pieces.head:>10.2f}",
        ]
    return "\n".join(lines)


def _write(
    path: Path,
    rows: list[dict[str, Any]],
    pieces: Pieces | None,
    same: tuple[int, int] | None,
    tried: dict[int, float],
    workload: Workload,
    machine: str,
    model: Any,
    ours: Ours,
) -> None:
    assert ours.report is not None
    figures = {
        "model": _name(model),
        "dtype": str(model.dtype),
        "machine": machine,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "workload": workload.as_dict(),
        "contenders": [{key: value for key, value in row.items() if key != "tokens"} for row in rows],
        "pieces": asdict(pieces) if pieces else None,
        "same_tokens": same,
        "generate_prompts_per_second_by_batch_size": tried,
        "computed_tokens": ours.report.computed_tokens,
        "prompt_tokens": ours.report.prompt_tokens,
        "steps": ours.report.steps,
    }
    path.write_text(json.dumps(figures, indent=2) + "\n")


def _name(model: Any) -> str:
    return f"{type(model).__name__} of {sum(weight.numel() for weight in model.parameters()) / 1e6:,.0f}M weights"


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


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


def _rivals(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name and name != "none")
    for name in names:
        if name not in _RIVALS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(_RIVALS)}, none")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_batchllm.bench",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="a folder or a name on the hub")
    which.add_argument("--config", help="a shape with random weights (default: tiny)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU, else bfloat16"
    )
    parser.add_argument("--threads", type=_positive, help="of torch on a CPU")
    parser.add_argument("--requests", type=int, default=64, help="prompts (default: %(default)s)")
    parser.add_argument("--degree", type=int, default=16, help="prompts that share a prefix (default: %(default)s)")
    parser.add_argument("--shared", type=int, default=512, help="tokens of a prefix (default: %(default)s)")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt's own (default: %(default)s)")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--sorted", action="store_true", help="hand the prompts over group by group, not shuffled")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--runs", type=_positive, default=3, help="of each; the median counts (default: %(default)s)")
    parser.add_argument(
        "--rivals",
        type=_rivals,
        default=_RIVALS,
        metavar="NAMES",
        help=f"{','.join(_RIVALS)} (default: both), or none",
    )
    parser.add_argument("--rival-requests", type=_positive, help="give the rivals only the first so many prompts")
    parser.add_argument("--rival-runs", type=_positive, help="fewer runs of the rivals, where they take long")
    parser.add_argument("--no-pieces", action="store_true", help="do not time the bare pieces")
    parser.add_argument(
        "--batch-sizes",
        type=lambda text: [_positive(size) for size in text.split(",")],
        default=[1, 2, 4, 8, 16, 32, 64],
        help="those that model.generate is tried with (default: 1,2,4,...,64)",
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of BatchConfig")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
