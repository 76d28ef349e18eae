"""Ranks as torchrun starts them, each of which runs the cases of a script and leaves what it found in a file."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from support_quick_python import run

HERE = Path(__file__).parent
# As ``python -m torch.distributed.run``, which itself and whose ranks have PyTorch and the library from their start.
LAUNCH = """
from support_quick_python import QuickPython
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main
subprocess_handler.Popen = QuickPython
main()
"""


def run_ranks(
    script: str, folder: Path, count: int, *cases: str, on: str = "cpu", timeout: float = 280
) -> list[dict[str, Any]]:
    """What each rank found. script: its name in this folder. on: the kind of device that it uses."""
    command = [sys.executable, "-c", LAUNCH, "--standalone", "--nproc-per-node", str(count)]
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on == "cpu" else {}
    found = [folder / str(rank) for rank in range(count)]
    try:
        ended = run(
            [*command, str(HERE / script), str(folder), *cases],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TENSOR_RANKS_ON": on, **hidden},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        through = [list(pickle.loads(each.read_bytes())) if each.exists() else [] for each in found]
        said = (error.stderr or b"").decode()[-6000:] if isinstance(error.stderr, bytes) else error.stderr
        raise AssertionError(f"{timeout} s were not enough; cases that came to their end: {through}; {said}") from error
    assert any(each.exists() for each in found), ended.stderr[-3000:]
    last = {case for case in cases if case != "one_is_gone"}
    answers = [pickle.loads(each.read_bytes()) if each.exists() else {} for each in found]
    assert all(last <= each.keys() for each in answers), (answers, ended.stderr[-3000:])
    return answers
