"""Without a GPU every kernel is held against its reference under Triton's interpreter, in processes of their own.

Two processes, so that two workers of pytest-xdist have one each.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support_cases import SOME
from support_kernels import GPU, INTERPRETED
from support_quick_python import run as run_quickly

HERE = Path(__file__).parent
HAS_SUCH_TESTS = re.compile(r"^from support_kernels import .*\bkernel\b|skipif\(not INTERPRETED", re.MULTILINE)
FILES = sorted(path.name for path in HERE.glob("test_*.py") if HAS_SUCH_TESTS.search(path.read_text("utf-8")))


# Kernels that read by plain loads where the card has no copy engine.
BY_CARD = ["test_kernels_decode.py", "test_kernels_prefill_triton.py", "test_kernels_shapes.py"]


@pytest.mark.skipif(GPU or INTERPRETED, reason="the kernels run in this process")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("half", [0, 1])
def test_under_the_interpreter(half: int) -> None:
    assert len(FILES) > 8
    run(FILES[half::2])


@pytest.mark.skipif(GPU or INTERPRETED, reason="the kernels run in this process")
@pytest.mark.timeout(900)
def test_as_on_a_card_without_a_copy_engine() -> None:
    assert set(BY_CARD) <= set(FILES)
    which = "odd_shapes or random" if SOME else "shapes or softcap or random"  # how they are read is all that differs
    run([*BY_CARD, "-k", which], TRITON_OVERRIDE_ARCH="sm86")


def run(given: list[str], **environment: str) -> None:
    done = run_quickly(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-r", "f", *given],
        env=os.environ | {"TRITON_INTERPRET": "1"} | environment,
        capture_output=True,
        text=True,
        cwd=HERE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
