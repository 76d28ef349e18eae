"""Kernels that are broken on purpose, in child processes alone: Python imports ``sitecustomize`` when it starts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from support_quick_python import QuickPython

from hf_batchllm.kernel_check import run_in_child

START = """\
import sys
if "hf_batchllm.kernel_check.child" in " ".join(sys.orig_argv):
    from hf_batchllm.kernels import decode_triton, layer_ops_triton
    real = KERNEL
    def broken(*given, **named):
        WAY
    KERNEL = broken
"""
WAYS = {
    "wrong": "made = real(*given, **named); (given[4] if len(given) > 6 else made).add_(1); return made",
    "hung": "import time; time.sleep(600)",
    "aborted": "import os; os.abort()",
    "out of bounds": "import ctypes; ctypes.string_at(0)",
    "out of resources": "from triton.runtime.errors import OutOfResources as Out; raise Out(9, 8, 'shared memory')",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(9)",
    "no compiler": "raise RuntimeError('Failed to find C compiler. Please specify via CC environment variable')",
    "missing file": "open('/proc/there/is/no/such/file')",
    "no headers": "import subprocess; print('fatal error: Python.h: No such file', file=sys.stderr, flush=True);"
    "raise subprocess.CalledProcessError(1, ['gcc', 'main.c', '-O3'])",
    "left": "import os; os._exit(CODE)",
    "left behind": "import os; left = os.fork(); "
    "(open('FOLDER/left', 'w').write(str(left)), os.abort()) if left else __import__('time').sleep(600)",
    "no room": "import torch; raise torch.OutOfMemoryError('CUDA out of memory')",
}


def broken(
    patch: pytest.MonkeyPatch,
    folder: Path,
    way: str | None,
    kernel: str = "decode_triton.attend_items",
    code: str = "0",
    anew: bool = False,
) -> None:
    """From now on each check runs interpreted kernels, of which one is broken; none if ``way`` is None.

    ``anew``: each child starts as it does for users, and not as a fork of one that has imported PyTorch and Triton.
    """
    if not anew:
        patch.setattr(run_in_child, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": QuickPython}))
    patch.setenv("TRITON_INTERPRET", "1")
    patch.setenv("HF_BATCHLLM_CHECK", "always")
    patch.setenv("HF_BATCHLLM_CHECK_SECONDS", "60" if way != "hung" else "6")
    patch.setenv("HF_BATCHLLM_CACHE", str(folder / "cache"))
    if way is not None:
        text = START.replace("KERNEL", kernel).replace("WAY", WAYS[way])
        text = text.replace("CODE", code).replace("FOLDER", str(folder))
        (folder / "sitecustomize.py").write_text(text, "utf-8")
        patch.setenv("PYTHONPATH", str(folder))
