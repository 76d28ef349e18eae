"""Random kills of processes that have a model together, in a pool: no call may hang, and each gives all answers.

    python tests/kill_parts.py --kills 100 --seed 0

Each pool has several models in two parts. While a call runs, one process is killed after a time that is drawn. The call
must end with the answers of one process, and so must the next one. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from support_broken_parts import LoadsToBreak, whole_model
from support_quick_workers import quick_workers

from hf_batchllm import BatchGenerator, GeneratorPool

_MODELS = 4  # in a pool: all but one of them are lost
_AT_MOST = 30.0  # seconds of a call
_PROMPTS = [[1, 2, each % 90] for each in range(200)]
_ASKED: dict[str, Any] = {"max_new_tokens": 24, "progress": False}


def parts_of(pool: GeneratorPool) -> list[int]:
    workers = [worker.process_id for worker in pool._crew.alive]
    said = subprocess.run(["pgrep", "-P", ",".join(map(str, workers))], capture_output=True, text=True)
    return [*workers, *map(int, said.stdout.split())]


def one_kill(pool: GeneratorPool, seed: int, wanted: list[list[int]], seconds: float) -> str:
    """What went wrong; nothing if all is well. ``seconds``: that such a call takes."""
    drawn = random.Random(seed)
    parts, after = parts_of(pool), drawn.uniform(0, seconds)
    victim = drawn.choice(parts)
    timer = threading.Timer(after, os.kill, (victim, signal.SIGKILL))
    late = threading.Timer(4 * _AT_MOST, os._exit, (3,))  # a call that hangs: the seed has been printed
    late.start()
    timer.start()
    began = time.monotonic()
    leads = victim in [worker.process_id for worker in pool._crew.alive]
    print(f"seed {seed}: a {'leader' if leads else 'follower'} after {after:.2f} s", end="", flush=True)
    try:
        for place in range(2):
            found = pool.generate(_PROMPTS, **_ASKED).token_ids
            took, began = time.monotonic() - began, time.monotonic()
            print(f", {took:.1f} s", end="", flush=True)
            if found != wanted:
                return f"other answers in call {place}"
            if took > _AT_MOST:
                return f"call {place} took {took:.0f} s"
            timer.join()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        timer.join()
        late.cancel()
    return ""


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--kills", type=int, default=100)
    given.add_argument("--seed", type=int, default=0, help="of the first one; the next has the next number")
    asked = given.parse_args()
    warnings.simplefilter("ignore")
    quick_workers()
    failed, seed, last = [], asked.seed, asked.seed + asked.kills
    with tempfile.TemporaryDirectory() as name, BatchGenerator(whole_model(), page_size=16) as one:
        folder = Path(name)
        whole_model().save_pretrained(folder / "model")
        wanted = one.generate(_PROMPTS, **_ASKED).token_ids
        while seed < last:
            load = LoadsToBreak(folder / "model", folder)
            with GeneratorPool(load, gpus=["cpu"] * 2 * _MODELS, tp=2, page_size=16) as pool:
                pool.wait()
                began = time.monotonic()
                pool.generate(_PROMPTS, **_ASKED)
                seconds = time.monotonic() - began
                for _ in range(min(_MODELS - 1, last - seed)):
                    wrong = one_kill(pool, seed, wanted, seconds)
                    print(f": {wrong or 'ended well'}", flush=True)
                    failed += [seed] if wrong else []
                    seed += 1
    print(f"{asked.kills} kills, of which {asked.kills - len(failed)} ended well; others: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
