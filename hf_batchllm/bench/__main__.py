"""The command: what is measured, in which order, and what is printed."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from ..bench import __doc__ as about
from ..config import BatchConfig
from .contenders import Measurement, Ours, best_batch_size, by_generate, by_generate_batch, machine_name, measure
from .floor import Floor, NoFloorError, Shape, floor_of, measure_rates, with_shares
from .workload import SHAPES, Workload, known_config, load_model, words_of

_DEFAULTS = {
    "rfc": {"requests": 64, "degree": 16, "shared": 512, "own": 32, "new": 32},
    "decode": {"requests": 256, "degree": 1, "shared": 0, "own": 128, "new": 512},
    "sharegpt": {"requests": 256, "degree": 1, "shared": 0, "own": 2048, "new": 2048},
    "mixed": {"requests": 400, "degree": 8, "shared": 2000, "own": 200, "new": 2048},
}
_EPILOG = """\
workloads, with the values that hold unless you set others:
  rfc       64 prompts, 16 to a prefix; 512 shared tokens, 32 own tokens and 32 new tokens each
  decode    nothing shared, long answers: 256 prompts of 128 tokens, 512 new tokens each
  sharegpt  lengths as in people's chats: 256 prompts of about 220 tokens, answers of about 200. --own and --new set the
            longest (2,048). model.generate runs each batch to its longest answer
  mixed     400 prompts, 8 to a prefix, of many lengths. --shared (2,000) and --own (200) are medians; --new (2,048) is
            the longest answer, of which the median answer is a tenth

  python -m hf_batchllm.bench --config tiny                             takes a minute on a laptop
  python -m hf_batchllm.bench --config tiny --degrees 1,2,4,8 --floor   how much sharing brings
"""


def main(arguments: Sequence[str] | None = None, program: str = "python -m hf_batchllm.bench") -> int:
    asked = _read(arguments, program)
    torch.set_num_threads(asked.threads or torch.get_num_threads())
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    model = load_model(asked.model, asked.config, asked.device, asked.dtype)
    name = f"{type(model).__name__}, {sum(weight.numel() for weight in model.parameters()) / 1e6:,.0f}M weights"
    figures: dict[str, Any] = {"model": name, "dtype": str(asked.dtype), "machine": machine_name(asked.device)}
    figures |= {"torch": torch.__version__, "transformers": transformers.__version__}
    figures["work"] = "\n".join(map(str, asked.workloads))
    print(f"{name}, {asked.dtype}, on {figures['machine']}\n{figures['work']}\n", flush=True)

    ours, rows = Ours(model, dict(asked.set)), []
    for workload in asked.workloads:
        name = "hf_batchllm" + (f", degree {workload.degree}" if len(asked.workloads) > 1 else "")
        rows.append(measure(ours, model, Measurement(name, workload), asked.runs))
    most = max(rows, key=lambda row: row.workload.requests)
    floor, why_not = floor_for(model, most) if asked.floor else (None, "")
    tried = _measure_rivals(model, asked, most.workload, rows)
    for row in rows:
        row.floor = floor(row.workload) if floor else None
    theirs = next((row for row in rows if row.name.startswith("model.generate,") and not row.error), None)
    same = _same_tokens(most, theirs, words_of(model)) if theirs else None

    print(f"\n{table(rows, theirs)}\n")
    if asked.floor:
        print(floor_line(rows[0].floor) if rows[0].floor else f"no floor: {why_not}")
    if same:
        note = "" if asked.dtype == torch.float32 else " (below float32 they differ where the best logits almost tie)"
        print(f"same tokens as model.generate: {same[0]} of {same[1]} prompts{note}")
    if tried:
        each = ", ".join(f"{size}: {speed:.2f}" for size, speed in tried.items())
        print(f"model.generate, prompts/s by batch size: {each}")
        if len(tried) > 1 and max(tried, key=tried.__getitem__) == max(tried):
            print("The largest size tried is the best: try larger ones with --batch-sizes.")
    print(f"\n{ours.report}")
    if asked.json:
        figures |= {"contenders": [row.as_dict() for row in rows], "same_tokens": same}
        figures["generate_prompts_per_second_by_batch_size"] = tried
        figures |= {name: getattr(ours.report, name) for name in ("computed_tokens", "prompt_tokens", "steps")}
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def floor_for(model: Any, ran: Measurement) -> tuple[Callable[[Workload], Floor] | None, str]:
    """The floor of any workload on this model and machine, or why there is none. Experts are counted in ``ran``."""
    try:
        sizes = Shape.of(model)
    except NoFloorError as error:
        return None, str(error)
    rates = measure_rates(model.device, model.dtype)
    print(f"rates of the machine: {rates}", flush=True)
    if sizes.mixtures:
        try:
            sizes = with_shares(sizes, model, ran.workload.prompts(words_of(model)), ran.tokens)
            print(f"routing of the run: counted over {sizes.routed_tokens:,} tokens", flush=True)
        except Exception as error:  # out of memory, for example: the other figures stand
            print(f"routing of the run: {type(error).__name__}; experts are taken to be chosen equally often")
    return lambda workload: floor_of(sizes, workload.groups, rates), ""


def _measure_rivals(
    model: Any, asked: argparse.Namespace, workload: Workload, rows: list[Measurement]
) -> dict[int, float]:
    """Adds the rivals' measurements to ``rows``. Returns generate's prompts/s by batch size."""
    several, cuda, tried = len(rows) > 1, model.device.type == "cuda", dict[int, float]()
    if "generate" in asked.rivals:
        sizes = asked.batch_sizes or [1 << power for power in range(10 if cuda else 7)]
        best, tried = best_batch_size(model, workload.first(asked.rival_requests or workload.requests), sizes)
        part = workload.first(asked.rival_requests or (2 * best if several else workload.requests))
        row = Measurement(f"model.generate, batch {best}", part)
        rows.append(measure(partial(by_generate, model, best), model, row, asked.runs, rival=True))
    if "generate_batch" in asked.rivals and not several:
        part = workload.first(asked.rival_requests or (64 if cuda else workload.requests))  # up to half a second each
        ways = [("generate_batch", part)]
        if part.shared:
            ways = [("generate_batch, sorted", replace(part, shuffle=False))]
            ways = [("generate_batch, shuffled", part), *ways] if part.shuffle else ways
        for name, each in ways:
            rows.append(
                measure(partial(by_generate_batch, model), model, Measurement(name, each), asked.runs, rival=True)
            )
    return tried


def _same_tokens(ours: Measurement, theirs: Measurement, words: int) -> tuple[int, int]:
    """(prompts with the same tokens from both, prompts compared)."""
    mine, others = (
        dict(zip(map(tuple, row.workload.prompts(words)), row.tokens, strict=True)) for row in (ours, theirs)
    )
    return sum(mine[prompt] == answer for prompt, answer in others.items()), len(others)


def table(rows: Sequence[Measurement], theirs: Measurement | None = None) -> str:
    """``theirs``: the row with whose new tokens per second all are compared: prompts of rivals may be fewer."""
    width = max(28, *(len(row.name) + 2 for row in rows))
    head = f"{'':<{width}}{'prompts':>8}{'seconds':>10}{'prompts/s':>11}{'new tokens/s':>14}"
    head += f"{'x generate':>11}" if theirs else ""
    head += f"{'floor, prompts/s':>18}{'of it':>7}" if rows[0].floor else ""
    lines = [head + (f"{'peak memory':>13}" if rows[0].peak_bytes else "")]
    for row in rows:
        line = f"{row.name:<{width}}{row.workload.requests:>8,}"
        if row.error:
            lines.append(f"{line}  failed: {row.error[:60]}")
            continue
        line += f"{row.seconds:>10.2f}{row.prompts_per_second:>11.2f}{row.new_tokens_per_second:>14,.0f}"
        line += f"{row.new_tokens_per_second / theirs.new_tokens_per_second:>11.2f}" if theirs else ""
        if row.floor:
            line += f"{row.workload.requests / row.floor.seconds:>18.2f}{row.share_of_floor:>7.0%}"
        lines.append(line + (f"{row.peak_bytes / 2**30:>9.1f} GiB" if row.peak_bytes else ""))
    return "\n".join(lines)


def floor_line(floor: Floor) -> str:
    text = f"floor of the first row, at {floor.rates}, measured in this run: {floor.seconds:.2f} s, of which products "
    text += f"and prompts' attention {floor.products_seconds:.2f}, K and V that decode steps read "
    text += f"{floor.kv_seconds:.2f}, waiting for weights {floor.weights_seconds:.2f}"
    if floor.experts_met:
        how = f"counted over {floor.routed_tokens:,} tokens" if floor.routed_tokens else "if all are met alike"
        text += f"; a decode step meets {floor.experts_met:.1f} of {floor.experts} experts in a layer, {how}"
    return textwrap.fill(text, 118)


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positives(text: str) -> list[int]:
    return [positive(number) for number in text.split(",")]


def setting(text: str) -> tuple[str, Any]:
    """A field of BatchConfig and its value."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    with contextlib.suppress(ValueError):
        return name, json.loads(value)
    return name, value


_RIVALS = ("generate", "generate_batch")
_NUMBERS: dict[str, tuple[Callable[[str], Any], str]] = {  # options: type, help
    "--threads": (int, "torch's threads on a CPU"),
    "--requests": (positives, "prompts. Of several degrees: of each, or of the largest; others then take as long"),
    "--degrees": (positives, "prompts that share each prefix (also --degree); several with commas: a table"),
    "--shared": (int, "tokens of each prefix"),
    "--own": (int, "tokens of each prompt after its prefix"),
    "--new": (int, "tokens to generate for each prompt"),
    "--seed": (int, "of the prompts (default: 0)"),
    "--runs": (positive, "of each contender; the median counts (default: 3)"),
    "--rival-requests": (positive, "give the rivals only the first N prompts (default: all; 64 for generate_batch on "
                         "a GPU; with several degrees two of generate's best batches)"),
    "--batch-sizes": (positives, "that generate is tried with (default: 1,2,4,...,64; on a GPU up to 512)"),
}  # fmt: skip


def _read(arguments: Sequence[str] | None, program: str) -> argparse.Namespace:
    """The options, checked before any work. Adds ``workloads``, made from them."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(program, description=about, epilog=_EPILOG, formatter_class=raw)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", help="a folder or a name on the hub")
    text = f"random weights (default: tiny): {', '.join(SHAPES)}, or a config.json"
    which.add_argument("--config", type=known_config, default="tiny", help=text)
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE",
                        help="a field of BatchConfig")  # fmt: skip
    parser.add_argument("--workload", choices=tuple(_DEFAULTS), default="rfc", help="default: %(default)s")
    parser.add_argument("--sorted", action="store_true", help="pass the prompts in group by group, not shuffled")
    parser.add_argument("--rivals", default=",".join(_RIVALS), help="default: %(default)s; or one of them, or none")
    parser.add_argument("--floor", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    for flag, (kind, text) in _NUMBERS.items():
        parser.add_argument(flag, type=kind, metavar="N", help=text)
    parser.set_defaults(runs=3)
    asked = parser.parse_args(arguments)
    try:
        asked.device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        gpu = asked.device.type != "cpu"
        asked.dtype = getattr(torch, asked.dtype or ("bfloat16" if gpu else "float32"))
        asked.floor = gpu if asked.floor is None else asked.floor
        asked.rivals = set(asked.rivals.split(","))
        if unknown := asked.rivals - {*_RIVALS, "none"}:
            raise ValueError(f"--rivals: {', '.join(unknown)} is not one of {', '.join(_RIVALS)}, none")
        if asked.json and (asked.json.is_dir() or not asked.json.parent.is_dir()):
            raise ValueError(f"--json {asked.json}: name a file in a folder that there is")
        asked.workloads = _workloads(asked)
        BatchConfig.of(None, dict(asked.set))
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    return asked


def _workloads(asked: argparse.Namespace) -> list[Workload]:
    """One workload, or one for each degree."""
    given = {name: value for name in ("shared", "own", "new", "seed") if (value := getattr(asked, name)) is not None}
    if asked.workload == "sharegpt" and (asked.degrees or asked.sorted or "shared" in given):
        raise ValueError("--workload sharegpt shares nothing: leave out --degree, --shared and --sorted")
    values: dict[str, Any] = {**_DEFAULTS[asked.workload], **given, "shuffle": not asked.sorted}
    values["kind"] = "rfc" if asked.workload == "decode" else asked.workload
    degrees = asked.degrees or [values["degree"]]
    counts = asked.requests or [values["requests"]]
    if len(degrees) > 1 and asked.workload != "rfc":
        raise ValueError(f"several degrees vary the rfc workload: leave out --workload {asked.workload}")
    if len(counts) not in (1, len(degrees)):
        raise ValueError(f"--requests has {len(counts)} numbers, and there are {len(degrees)} degrees")
    made = [Workload(**{**values, "degree": degree, "requests": counts[0]}) for degree in degrees]
    if len(counts) < len(degrees):  # so many that each takes about as long: at least one group
        times = [each.shared / each.degree + each.own + each.new for each in made]
        whole = counts[0] * times[degrees.index(max(degrees))]
        pairs = zip(degrees, times, strict=True)
        counts = [max(round(whole / time / degree), 1) * degree for degree, time in pairs]
    return [replace(each, requests=count) for each, count in zip(made, counts, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
