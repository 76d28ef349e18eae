"""What the tests of small kernels share: where they run, and their random inputs.

Without a GPU kernels run under Triton's interpreter. It must be chosen before anything imports Triton, and then holds
for the whole process; so unless it was, ``test_kernels_interpreted`` runs them in a process of their own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"

# On a GPU such a test is one of those that `make test-gpu` picks.
kernel = pytest.mark.gpu if GPU else pytest.mark.skipif(not INTERPRETED, reason="is run by test_kernels_interpreted")
alone_on_the_gpu = pytest.mark.skipif(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1",
    reason="takes all memory of the device: run this file alone, with -n 0 or -n 1",
)
plain = pytest.mark.skipif(INTERPRETED, reason="is no kernel's test")


# Triton 3.9's interpreter turns what a comparison of scalars says into a number, and refuses that as a mask.
_TRITON = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "0.0"
_REFUSES_MASKS = _TRITON.startswith("3.9.")
takes_all_masks = pytest.mark.skipif(
    _REFUSES_MASKS and not GPU, reason=f"Triton {_TRITON}'s interpreter refuses some masks"
)


def _read_masks_as_truth() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    def reading(own: Any, place: int) -> Any:
        def call(self: Any, *given: Any, **named: Any) -> Any:
            given[place].data = given[place].data.astype(bool)
            return own(self, *given, **named)

        return call

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(InterpreterBuilder, name, reading(getattr(InterpreterBuilder, name), place))


def _patch_for_each_function_once() -> None:
    """The interpreter patches Triton's language again whenever a kernel calls a function, and walks through all of it.

    What it patches for the kernel holds until the kernel ends, and what it patches for a function alone stays.
    """
    from triton.runtime.interpreter import InterpretedFunction

    own, patched = InterpretedFunction.__call__, set[Any]()

    def call(self: Any, *given: Any, **named: Any) -> Any:
        if self.fn in patched:
            return self.rewrite()(*given, **named)
        patched.add(self.fn)
        return own(self, *given, **named)

    InterpretedFunction.__call__ = call


if INTERPRETED:
    _patch_for_each_function_once()
    if _REFUSES_MASKS:
        _read_masks_as_truth()


@pytest.fixture
def dot_without_blas() -> Iterator[None]:
    """Under the interpreter a plain sum takes the place of `tl.dot`, and a row has the same bits at every place.

    The interpreter's own is NumPy's matrix product. BLAS computes it, and on some processors takes other instructions
    for some rows of a block than for others.
    """
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        total = np.zeros_like(d.data)
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., k, None, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


def draw(rng: np.random.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(dtype)


def copies(given: dict[str, Any], device: str) -> dict[str, Any]:
    """Each tensor once more, on ``device``."""
    return {
        name: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value for name, value in given.items()
    }
