"""Products on a GPU whose rows have the same bits, however many there are: cuBLASLt, which may not split a sum.

By default cuBLAS cuts the sums of a product with few rows into parts (split-K) and adds the parts up. Of cuBLASLt's
products PyTorch can forbid that. Each number of a wide product is then added up in one way, but for those of a single
row, which is computed with others. Narrow products run on a kernel of our own. Whether all is so is tried with each
model (engine/invariance_trial.py).

How much memory cuBLASLt has stays as the process's user has set it. Less of it would forbid the same, but PyTorch gets
that memory once for each stream, and others' products would later write beyond its end; and where
``CUBLAS_WORKSPACE_CONFIG`` is set, PyTorch reads it with a regular expression, for 45 to 70 us of the host's time in
each product.

All this belongs to the process. Several threads may run such steps: the first to begin notes what the user has set,
and the last to end puts it back. Products of other threads run under these settings meanwhile.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..patches.narrow_products import row_by_row_linear

# cuBLASLt has no memory then, and PyTorch's error says that memory ran out.
_NO_ROOM = {"CUBLASLT_WORKSPACE_SIZE": r"0+", "CUBLAS_WORKSPACE_CONFIG": r"(:0+:\d+|:\d+:0+)+"}
_REDUCED = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"


def why_not_unsplit() -> str | None:
    """In words that say what stands in the way."""
    if torch.version.hip is not None:
        return "on AMD's GPUs nobody has tried it"
    for name, nothing in _NO_ROOM.items():
        value = os.environ.get(name, "")
        if re.fullmatch(nothing, value):
            return f"{name}={value} leaves cuBLASLt no memory: unset it"
    return None


@dataclass(frozen=True)
class _Settings:
    """The settings of a process."""

    library: Any
    reduced: dict[str, tuple[bool, bool]]  # whether sums may be rounded on their way, and whether they may be split
    linear: Any

    @staticmethod
    def now() -> _Settings:
        cuda = torch.backends.cuda
        return _Settings(
            cuda.preferred_blas_library(),
            {name: (getattr(cuda.matmul, name), getattr(cuda.matmul, f"{name}_split_k")) for name in _REDUCED},
            torch.nn.functional.linear,
        )

    def without_splitting(self) -> _Settings:
        return _Settings(
            torch._C._BlasBackend.Cublaslt,
            dict.fromkeys(_REDUCED, (False, False)),
            row_by_row_linear(self.linear, _narrow_product, _runs_a_step),
        )

    def put(self) -> None:
        forbids = (False, False) in self.reduced.values()
        if forbids:  # cuBLAS refuses products then, and another thread may be about to begin one
            _prefer(self.library)
        for name, pair in self.reduced.items():
            setattr(torch.backends.cuda.matmul, name, pair)
        if not forbids:
            _prefer(self.library)
        torch.nn.functional.linear = self.linear


_has_preferred = False


def _prefer(library: Any) -> None:
    global _has_preferred
    if torch.backends.cuda.preferred_blas_library() == library:
        return
    if _has_preferred:
        torch.backends.cuda.preferred_blas_library(library)
        return

    def prefer(number: float) -> float:
        torch.backends.cuda.preferred_blas_library(library)
        return number

    # PyTorch says once in a process that this is experimental. What is tried with each model needs no such words. They
    # go past Python's warnings, but not while one of PyTorch's functions calls one of Python's.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(1, dtype=torch.float32, device="cpu").apply_(prefer)
    _has_preferred = True


_lock = threading.RLock()
_in_force: dict[object, int] = {}  # the blocks that run, and their threads
_owners: _Settings | None = None  # those before the first of them


@contextmanager
def unsplit() -> Iterator[None]:
    """While the block runs, products are such, and graphs that are captured keep them."""
    block = object()
    try:
        _begin(block)
        yield
    finally:
        _end(block)


def _begin(block: object) -> None:
    global _owners
    with _lock:
        if _owners is None:
            _owners = _Settings.now()
        _in_force[block] = threading.get_ident()
        _owners.without_splitting().put()


def _end(block: object) -> None:
    global _owners
    with _lock:
        _in_force.pop(block, None)
        if not _in_force and _owners is not None:
            _owners.put()
            _owners = None


def _runs_a_step() -> bool:
    """Whether this thread does."""
    return threading.get_ident() in tuple(_in_force.values())


def _narrow_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from ..kernels.triton.narrow_products_triton import narrow_product  # Triton may not be there

    with torch.cuda.device(x.device):
        return narrow_product(x, weight, bias)
