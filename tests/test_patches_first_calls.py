"""The first call of a function such as exp in a process, by several threads."""

from __future__ import annotations

import sys

import pytest
import torch
from support_families import build
from support_quick_python import run

from hf_batchllm import BatchGenerator

FIRST_AND_SECOND = """
import torch
torch.set_num_threads(1)
{before}
some = torch.ones(64, 1000)
some @ some.T  # another part of MKL, as a model has used it
torch.set_num_threads(2)
numbers = torch.arange(1 << 18, dtype=torch.float32).div(1 << 18).mul(0.9).add(0.05).{dtype}()
first, second = numbers.{name}(), numbers.{name}()
print(torch.equal(first, second))
"""
ONCE = "from hf_batchllm.patches.first_calls import call_functions_once; call_functions_once()"


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")
def test_the_first_is_as_exact_as_the_second() -> None:
    """Without the calls before, it fails in most runs: threads must meet at the right moment."""
    for name, dtype in (("exp", "float"), ("tanh", "float"), ("sqrt", "float"), ("exp", "double"), ("erf", "float")):
        script = FIRST_AND_SECOND.format(before=ONCE, name=name, dtype=dtype)
        done = run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout == "True\n", f"{name} of {dtype}"


def test_a_generator_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr("hf_batchllm.generator.call_functions_once", lambda: called.append(1))
    with BatchGenerator(build("llama")):
        assert called == [1]
