"""What two trees answer to the same random cases: recorded on each, then compared.

    python tests/record.py --cases 3000 before.jsonl
    python tests/record.py --compare before.jsonl after.jsonl

The cases are the fuzzer's, which are drawn from a seed and a number. Both records have to be made on one machine.
Tokens must be equal, log-probabilities within 1e-5. It is counted how many are equal but for the last bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support_fuzz_calls import Calls, running_as
from support_fuzz_cases import Case, draw_case
from support_fuzz_check import quiet
from support_fuzz_models import missing

SEED, CLOSE = 62, 1e-5


def answers(case: Case) -> dict[str, Any]:
    """The rows of each prompt, or the error of the call."""
    with quiet(), running_as(case):
        try:
            rows = Calls(case).rows(case.asks)
        except Exception as error:
            return {"error": type(error).__name__}
    return {"rows": [[_row(each) for each in row] for row in rows]}


def _row(generation: Any) -> dict[str, Any]:
    names = ("token_ids", "finish_reason", "score", "logprobs", "prompt_logprobs")
    return {name: value for name in names if (value := getattr(generation, name)) is not None}


def record(count: int, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            case = draw_case(SEED, number)
            if missing(case.family, case.device_loop) is None:
                facts = {"case": number, "family": case.family, "kind": case.kind}
                file.write(json.dumps(facts | answers(case)) + "\n")


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """What is not the same in the two records of a case."""
    if "rows" not in before or "rows" not in after:
        if before.get("error") != after.get("error"):
            yield f"an error in one: {before.get('error')}, {after.get('error')}"
        return
    ours, theirs = ([row for rows in each["rows"] for row in rows] for each in (before, after))
    if [row["token_ids"] for row in ours] != [row["token_ids"] for row in theirs]:
        yield "tokens"
    elif any(_far_apart({**one}, {**other}) for one, other in zip(ours, theirs, strict=True)):
        yield "log-probabilities, scores or reasons of an end"
    elif ours != theirs:
        yield BITS


BITS = "the last bits alone"


def _far_apart(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return not (abs(one - other) <= CLOSE * max(1.0, abs(one)) or repr(one) == repr(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(_far_apart(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(map(_far_apart, one, other))
    return bool(one != other)


def compare(paths: list[Path]) -> int:
    before, after = ({line["case"]: line for line in map(json.loads, path.open(encoding="utf-8"))} for path in paths)
    found: Counter[str] = Counter()
    for number in sorted(before.keys() | after.keys()):
        if number not in before or number not in after:
            found["in one record alone"] += 1
            continue
        for what in differences(before[number], after[number]):
            kind = before[number]["kind"]
            found[what if what == BITS else f"{kind}: {what}"] += 1
            if what != BITS:
                print(f"case {number} ({before[number]['family']}, {kind}): {what}")
    print(
        f"{len(before):,} cases, {', '.join(f'{count:,} differ in {what}' for what, count in found.items()) or 'equal'}"
    )
    return int(any(what != BITS for what in found))


def main() -> int:
    parser = argparse.ArgumentParser(description="Records answers to random cases, and compares two records.")
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--compare", action="store_true", help="two records that are there")
    parser.add_argument("paths", type=Path, nargs="+")
    given = parser.parse_args()
    if given.compare:
        return compare(given.paths)
    torch.set_num_threads(1)
    record(given.cases, given.paths[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
