"""Random failures of processes that have a model together, in a pool: no call may hang, and each gives its answers.

    python tests/kill_ranks.py --kills 100 --seed 0

Each pool has several models in two parts. While a call runs, a process is killed after a time that is drawn, or it is
killed or raises an error at a moment that is drawn. All others must have raised or exited within ten seconds. Then the
call has the answers of one process, or its error names what happened; and the next call has the answers. At the end a
table is printed. The exit status is 1 if anything was not as it should be.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support_broken_parts import (
    MOMENTS,
    WAYS,
    LoadsToBreak,
    break_at,
    broken_call,
    forget,
    groups_of,
    kill,
    whole_model,
)
from support_pool import is_running
from support_quick_workers import quick_workers

from hf_batchllm import BatchGenerator, GeneratorPool

_MODELS = 4  # in a pool: all but one of them may be lost
_AT_MOST = 10.0  # seconds until all others have raised, or exited
_HANGS = 120.0  # seconds of a call
_TIMES = {"planning": 1, "rehearsal": 4, "prefill": 8, "decode": 40, "capture": 1}  # most times before, of a moment
_SHORT: dict[str, Any] = {"max_new_tokens": 12, "progress": False}
_MANY: dict[str, Any] = {"max_new_tokens": 2, "progress": False}  # of a call that is rehearsed


@dataclass
class Row:
    """Of the table."""

    broken: int = 0
    longest: float = 0.0
    failures: int = 0


class Kills:
    def __init__(self, folder: Path, one: BatchGenerator) -> None:
        self.folder = folder
        self.rows: defaultdict[tuple[str, str, str], Row] = defaultdict(Row)
        self.failed: list[int] = []
        self._one = one
        self._pool: GeneratorPool | None = None
        self._processes: list[int] = []  # of the pool
        self._seconds = 0.0  # of a call

    @property
    def broken(self) -> int:
        return sum(row.broken for row in self.rows.values())

    def one_more(self, seed: int) -> None:
        drawn = random.Random(seed)
        moment, way, rank = drawn.choice((*MOMENTS, "any time")), drawn.choice(WAYS), drawn.choice((0, 1))
        pool = self._with_models()
        given = _MANY if moment == "rehearsal" else _SHORT
        prompts = [[1, seed % 90, each % 90] for each in range(2000 if moment == "rehearsal" else drawn.randint(8, 60))]
        wanted = self._one.generate(prompts, **given).token_ids
        timer: threading.Thread | None = None
        if moment == "any time":
            way, after = "is killed", drawn.uniform(0, self._seconds)
            timer = threading.Timer(after, kill, (self.folder, drawn.choice(groups_of(pool))[rank]))
        else:
            break_at(self.folder, moment, rank, way, drawn.randrange(_TIMES[moment]))
        who = "follower" if rank else "leader"
        what = f"seed {seed}: a {who} {way}, {moment}"
        late = threading.Timer(_HANGS, _hangs, [what])
        late.start()
        began = time.monotonic()
        found = broken_call(pool, self.folder, lambda: pool.generate(prompts, **given), timer)
        took = time.monotonic() - began
        forget(self.folder)
        try:
            wrong = found.wrong(wanted, way)
            again = pool.generate(prompts[:20], **given).token_ids
            wrong = wrong or ("" if again == wanted[:20] else "other answers in the next call")
        except Exception:
            wrong = traceback.format_exc()
        finally:
            late.cancel()
        if found.seconds > _AT_MOST:
            wrong = wrong or "too long"
        if found.broken is not None or wrong:
            row = self.rows[moment, who, way]
            row.broken += 1
            row.longest = max(row.longest, found.seconds)
            row.failures += bool(wrong)
        self.failed += [seed] if wrong else []
        how = "did not come to it" if found.broken is None else f"{found.seconds:.1f} s"
        ended = "raised" if found.tokens is None else "answers"
        print(f"{what}: {how}, {ended}, {took:.1f} s, {len(pool)} models left: {wrong or 'well'}", flush=True)

    def _with_models(self) -> GeneratorPool:
        """A pool that has one to spare."""
        if self._pool is not None and len(self._pool) < 2:
            self.close()
        if self._pool is None:
            load = LoadsToBreak(self.folder / "model", self.folder)
            self._pool = GeneratorPool(load, gpus=["cpu"] * 2 * _MODELS, tp=2, page_size=16)
            self._pool.wait()
            self._processes = [each for group in groups_of(self._pool) for each in group]
            began = time.monotonic()
            self._pool.generate([[1, 2, each] for each in range(30)], **_SHORT)
            self._seconds = time.monotonic() - began
        return self._pool

    def close(self) -> None:
        """Nobody is left behind."""
        if self._pool is not None:
            self._pool.close()
        self._pool, until = None, time.monotonic() + _AT_MOST
        while any(map(is_running, self._processes)) and time.monotonic() < until:
            time.sleep(0.05)
        left = [each for each in self._processes if is_running(each)]
        if left:
            print(f"left behind: {left}", flush=True)
            self.failed.append(-1)

    def table(self) -> str:
        lines = [f"{'moment':10} {'who':9} {'what':10} {'number':>6} {'longest':>8} {'failures':>8}"]
        for (moment, who, way), row in sorted(self.rows.items()):
            lines.append(f"{moment:10} {who:9} {way:10} {row.broken:6} {row.longest:6.1f} s {row.failures:8}")
        longest = max((row.longest for row in self.rows.values()), default=0.0)
        lines.append(f"{'all':31} {self.broken:6} {longest:6.1f} s {len(self.failed):8}")
        return "\n".join(lines)


def _hangs(what: str) -> None:
    print(f"{what}: hangs", flush=True)
    faulthandler.dump_traceback()
    os._exit(3)


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--kills", type=int, default=100)
    given.add_argument("--seed", type=int, default=0, help="of the first one; the next has the next number")
    asked = given.parse_args()
    warnings.simplefilter("ignore")
    quick_workers()
    with tempfile.TemporaryDirectory() as name, BatchGenerator(whole_model(), page_size=16) as one:
        whole_model().save_pretrained(Path(name) / "model")
        kills, seed = Kills(Path(name), one), asked.seed
        while kills.broken < asked.kills:
            kills.one_more(seed)
            seed += 1
        kills.close()
    print(kills.table())
    print(f"failed: {kills.failed}" if kills.failed else "all ended well")
    return 1 if kills.failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
