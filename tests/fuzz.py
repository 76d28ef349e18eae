"""The differential fuzzer: random cases, held against ``model.generate`` and against themselves.

    make fuzz SECONDS=600
    make fuzz ARGS='--seed 3 --case 123'             one case again
    make fuzz ARGS='--device cuda' PYTHON=python3

Each case is drawn from the seed and its number. Its prompts are run one at a time by ``model.generate`` in float32, and
once more by the library in a way that must make no difference: in another order, with other settings, through another
door. Where the two best scores of the reference are closer than rounding, a difference proves nothing and is counted.
With --invariant on a GPU models are in bfloat16, and calls are held against themselves alone. The exit
status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable

import support_fuzz_models as models
import torch
from support_fuzz_calls import SEEN
from support_fuzz_cases import Case, draw_case
from support_fuzz_check import check, exact_on, smaller
from support_fuzz_models import missing
from support_live_tensors import Storages

_SAID_EVERY = 10.0  # seconds
_LEAKS_EVERY = 100  # cases


class Tally:
    """What has been run so far."""

    def __init__(self) -> None:
        self.began = self._said = time.monotonic()
        self.cases = self.rows = self.ties = self.raised = self.failed = 0
        self.left_out: Counter[str] = Counter()  # by the reason
        self.by: dict[str, Counter[str]] = {"kind": Counter(), "relation": Counter(), "family": Counter()}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def add(self, case: Case) -> None:
        self.cases += 1
        loop = " (a GPU's loop)" if case.device_loop else ""
        self.by["kind"][case.kind + loop] += 1
        self.by["relation"][case.relation] += 1
        self.by["family"][case.family] += 1

    def say_now_and_then(self) -> None:
        if time.monotonic() - self._said > _SAID_EVERY:
            self._said = time.monotonic()
            kinds = ", ".join(f"{count:,} {name}" for name, count in self.by["kind"].most_common())
            print(f"{self.seconds:6.0f} s  {self.cases:,} cases ({kinds}); {self._rest()}", flush=True)

    def _rest(self) -> str:
        return (
            f"{self.rows:,} rows, {self.ties:,} left to rounding, {self.raised:,} refused by both, {self.failed} failed"
        )

    def summary(self) -> str:
        lines = [f"{self.cases:,} cases in {self.seconds:.0f} s: {self._rest()}"]
        for what, counts in self.by.items():
            lines.append(f"by {what}: " + ", ".join(f"{name} {count:,}" for name, count in counts.most_common()))
        lines += [f"left out: {count:,} cases, as {why}" for why, count in self.left_out.items()]
        seen = (f"{count:,} {name.replace('_', ' ')}" for name, count in sorted(SEEN.items()))
        return "\n".join([*lines, "in all: " + ", ".join(seen)])


class Leaks:
    """Whether the memory of the KV cache is given back when a call's generator is closed."""

    def __init__(self) -> None:
        self._storages = Storages()
        self._storages.watch()
        gc.collect()
        gc.freeze()

    def found(self) -> str:
        alive = self._storages.alive()
        self._storages.seen.clear()
        return f"{alive} tensors of KV caches are still in memory" if alive else ""


def fuzz(
    seed: int, device: str, seconds: float, cases: Iterable[int], most_failures: int = 10, invariant: bool = False
) -> Tally:
    """Runs until the time is over, the cases are, or so many have failed."""
    tally, leaks = Tally(), Leaks()
    for number in cases:
        if tally.seconds > seconds or tally.failed >= most_failures:
            break
        case = draw_case(seed, number, device, invariant)
        if why := missing(case.family, case.device_loop, invariant, device):
            tally.left_out[why] += 1
            continue
        outcome = check(case)
        error = outcome.error
        if not error and number % _LEAKS_EVERY == _LEAKS_EVERY - 1:
            error = leaks.found()
        tally.add(case)
        tally.rows, tally.ties = tally.rows + outcome.rows, tally.ties + outcome.ties
        tally.raised += outcome.raised
        if error:
            tally.failed += 1
            _tell(case, error, seed, number)
        tally.say_now_and_then()
    return tally


def _tell(case: Case, error: str, seed: int, number: int) -> None:
    on = "" if case.device == "cpu" else f" --device {case.device}"
    on += " --invariant" if case.config.get("invariant") else ""
    print(f"\nFAILED: {error}\n{case}\n  again: make fuzz ARGS='--seed {seed} --case {number}{on}'", flush=True)
    less = smaller(case)
    if less != case:
        print(f"  smaller: {check(less).error}\n{less}", flush=True)
    print(flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random cases, held against model.generate and against themselves.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="by default another one each time, which is printed")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--invariant", action="store_true", help="with invariant=True: equal to the last bit")
    parser.add_argument("--failures", type=int, default=10, help="end after so many")
    given = parser.parse_args(arguments)
    seed = int(time.time()) if given.seed is None else given.seed
    torch.set_num_threads(1)
    models.HALVED = given.invariant and given.device != "cpu"
    exact_on(given.device)
    print(f"seed {seed}, torch {torch.__version__}, {given.device}", flush=True)
    one = given.case is not None
    if one:
        case = draw_case(seed, given.case, given.device, given.invariant)
        print(case, flush=True)
    numbers = range(given.case, given.case + 1) if one else range(given.cases)
    tally = fuzz(seed, given.device, given.seconds, numbers, given.failures, given.invariant)
    print(tally.summary(), flush=True)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
