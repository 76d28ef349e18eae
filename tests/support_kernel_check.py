"""What tests of the check share: a CPU that is taken for a card, and kernels that are broken on purpose.

They are broken in child processes alone: Python imports ``sitecustomize`` when it starts.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support_quick_python import QuickPython

from hf_batchllm.kernel_check import run_in_child, trust
from hf_batchllm.kernel_check.child import GROUPS
from hf_batchllm.kernel_check.comparing import Where

CPU = torch.device("cpu")
LAYERS = list(GROUPS["layers"](Where(CPU)))  # the names of their cases
START = """\
import sys
if "hf_batchllm.kernel_check.child" in " ".join(sys.orig_argv):
    from hf_batchllm.kernels.triton import decode_triton, layer_ops_triton
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
    "no room": "import torch; raise torch.OutOfMemoryError('CUDA out of memory')",
    "full disk": "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (0, 0)); return real(*given, **named)",
    "left with 0": "import os; os._exit(0)",
    "left with 7": "import os; os._exit(7)",
    "left behind": "import os; left = os.fork(); "
    "(open('FOLDER/noted', 'w').write(str(left)), os.abort()) if left else __import__('time').sleep(600)",
    "noted, hung": "import os, time; open('FOLDER/noted', 'w').write(str(os.getpid())); time.sleep(600)",
}
Break = Callable[..., None]


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_BATCHLLM_CACHE", str(tmp_path / "cache"))
    forget(monkeypatch)


def forget(patch: pytest.MonkeyPatch) -> None:
    """From now on this is as another process."""
    patch.setattr(trust, "_answers", {})
    patch.setattr(trust, "_no_checks", {})


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process takes its CPU for a device that kernels run on; only the child knows that they are interpreted."""
    monkeypatch.setenv("HF_BATCHLLM_CHECK", "always")
    monkeypatch.setattr(trust, "unusable", lambda device, amd=False: None)
    monkeypatch.setattr("hf_batchllm.model.attention.choose_backend.unusable", lambda device, amd=False: None)
    monkeypatch.setattr("hf_batchllm.model.attention.choose_backend.is_interpreted", lambda: False)


@pytest.fixture
def break_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Break:
    """From now on each check runs interpreted kernels, of which one is broken: none if ``way`` is None.

    ``start``: what else a child does first. ``anew``: it starts as it does for users, and not as a fork of a process
    that has imported PyTorch and Triton.
    """

    def broken(
        way: str | None, kernel: str = "layer_ops_triton.add_rms_norm", start: str = "", anew: bool = False
    ) -> None:
        if not anew:
            monkeypatch.setattr(
                run_in_child, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": QuickPython})
            )
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setenv("HF_BATCHLLM_CHECK_SECONDS", "60" if way != "hung" else "6")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        if way is not None:
            start += START.replace("KERNEL", kernel).replace("WAY", WAYS[way]).replace("FOLDER", str(tmp_path))
        (tmp_path / "sitecustomize.py").write_text(start, "utf-8")

    return broken
