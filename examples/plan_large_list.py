"""How long it takes to plan a very large list: to check the prompts and to find everything that they share.

    python examples/plan_large_list.py                       # the two default sizes, two shapes each
    python examples/plan_large_list.py 20000 --shared 500 --degree 4

Shape "groups": shuffled prompts in groups of ``--degree``; a group shares ``--shared`` tokens, each adds ``--own``.
Shape "one system prompt": all prompts share the same ``--shared`` tokens. Prompts are plain lists of Python ints. Each
row runs in a fresh process. "extra GB" is the peak of memory beyond the input; "user s" is the library's own part of
the total, and most of the rest is the system handing out fresh memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a source checkout needs no installation

from hf_batchllm.inputs.prompts import prepare_prompts
from hf_batchllm.planning.sharing import plan_sharing

VOCABULARY = 128_000


def make_prompts(count: int, degree: int, shared: int, own: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    prompts = []
    for begin in range(0, count, degree):
        prefix = rng.integers(0, VOCABULARY, shared).tolist()
        for _ in range(min(degree, count - begin)):
            prompts.append(prefix + rng.integers(0, VOCABULARY, own).tolist())
    return [prompts[index] for index in rng.permutation(count)]


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(count: int, degree: int, shared: int, own: int) -> dict[str, float]:
    prompts = make_prompts(count, degree, shared, own)
    held = psutil.Process().memory_info().rss
    user_before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    started = time.perf_counter()
    prepared = prepare_prompts(prompts, vocab_size=VOCABULARY)
    checked = time.perf_counter()
    plan = plan_sharing(prepared)
    planned = time.perf_counter()
    return {
        "check": checked - started,
        "plan": planned - checked,
        "user": resource.getrusage(resource.RUSAGE_SELF).ru_utime - user_before,
        "input": held,
        "extra": peak_bytes() - held,
        "saving": plan.saving,
        "segments": len(plan.segments),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", type=int, nargs="*", default=[100_000, 200_000], help="prompts in the list")
    parser.add_argument("--degree", type=int, default=16, help="prompts in a group")
    parser.add_argument("--shared", type=int, default=1800, help="tokens that a group shares")
    parser.add_argument("--own", type=int, default=200, help="tokens that each prompt adds")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # one row, as JSON, in this process
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.counts[0], args.degree, args.shared, args.own)))
        return

    print(f"{args.shared:,} tokens shared by {args.degree} prompts or by all, {args.own:,} own; plain lists of ints\n")
    print("  prompts  shape              check s  plan s total s  user s input GB extra GB  saving")
    for count in args.counts:
        for shape, degree in (("groups", args.degree), ("one system prompt", count)):
            options = {"--degree": degree, "--shared": args.shared, "--own": args.own}
            flags = [str(part) for option in options.items() for part in option]
            command = [sys.executable, __file__, str(count), *flags, "--measure"]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            seconds = (row["check"], row["plan"], row["check"] + row["plan"], row["user"])
            print(
                f"{count:>9,}  {shape:<18}" + "".join(f"{value:>8.2f}" for value in seconds),
                f"{row['input'] / 1e9:>8.2f}{row['extra'] / 1e9:>9.2f}{row['saving']:>8.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
