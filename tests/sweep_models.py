"""Every causal and image-text class of transformers against ``model.generate``, as tiny random models.

``make sweep`` runs it and writes docs/models.md; ``make sweep-oldest`` runs it on the oldest transformers. It takes
five minutes on two cores. ``python tests/sweep_models.py LlamaForCausalLM`` looks at some classes, or types of
config, alone. The exit status is 1 where a class is wrong, refused late, or not built for a reason that is not known.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's library, whichever is installed

import transformers
from support_sweep_models import PATTERNS, STRAYS, cases
from support_sweep_page import PAGE, counts, described, is_bad, kind_of, page, worst_difference
from support_sweep_workers import Kept, Row, swept

KEPT = Path(__file__).resolve().parents[1] / "build" / f"sweep-{transformers.__version__}.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes, or types of config; all if none is given")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (2)")
    parser.add_argument(
        "--resume", action="store_true", help=f"go on with an interrupted sweep, which left {KEPT.name} in build/"
    )
    parser.add_argument("--write-page", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    names = set(arguments.names)
    chosen = [case for case in cases() if not names or names & {case.class_name, case.model_type}]
    if names - {name for case in chosen for name in (case.class_name, case.model_type)} or not chosen:
        parser.error(f"transformers {transformers.__version__} does not have all of {', '.join(sorted(names))}")
    if names and arguments.write_page:
        parser.error("the page is about all classes: name none")
    kept = Kept(KEPT)
    if not names and not arguments.resume:
        KEPT.unlink(missing_ok=True)
    found = {case: row for case, row in kept.rows().items() if case in chosen} if arguments.resume else {}
    for row in swept([case for case in chosen if case not in found], max(arguments.jobs, 1)):
        found[row.case] = row
        if not names or arguments.resume:
            kept.add(row)
        print(f"[{len(found)}/{len(chosen)}] {row.seconds:5.1f} s  {_line(row)}", flush=True)
    rows = [found[case] for case in chosen]
    bad = [row for row in rows if is_bad(row)]
    number = ", ".join(f"{count} {kind}" for kind, count in counts(rows).most_common())
    print(f"\ntransformers {transformers.__version__}: {len(rows)} classes: {number}")
    print(f"worst difference of a log-probability where exact: {worst_difference(rows):.1e}")
    for row in bad:
        print(f"  {_line(row)}")
    if arguments.write_page:
        PAGE.write_text(page(rows), encoding="utf-8")
        print(f"written: {PAGE}")
    return bool(bad)


def _line(row: Row) -> str:
    parts = [kind_of(row), described(row, PATTERNS), described(row, tuple(STRAYS))]
    return f"{row.case!s:60s} {' | '.join(part for part in parts if part)}"


if __name__ == "__main__":
    sys.exit(main())
