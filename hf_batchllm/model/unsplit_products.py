"""Products on a GPU whose rows have the same bits, however many there are: cuBLASLt that may not split a sum.

By default cuBLAS cuts the sums of a product with few rows into parts (split-K) and adds the parts up. Of cuBLASLt's
products PyTorch can forbid that. It splits a single row all the same, where there is memory for the parts: so it gets
next to none. Each number of a wide product is added up in one way then. Narrow products run on a kernel of our own.
Whether all is so is tried with each model (engine/invariance_trial.py).

How much memory cuBLASLt may use is a call in newer versions of PyTorch. Older ones ask the environment, anew for each
product. ``CUBLAS_WORKSPACE_CONFIG``, which is for cuBLAS, stays as it is: where it is set, PyTorch reads it with a
regular expression, and each product takes the host 45 to 70 us more.

All this belongs to the process. Several threads may run such steps: the first to begin notes what the owner has set,
and the last to end puts it back. Products of other threads run under these settings meanwhile.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..patches.narrow_products import narrow_linear

_ROOM = 1024  # bytes: with none at all PyTorch says that memory ran out
_ROOM_IN_ENVIRONMENT = "CUBLASLT_WORKSPACE_SIZE"  # in KiB
_LT_APART = "TORCH_CUBLASLT_UNIFIED_WORKSPACE"  # by default cuBLASLt uses the memory that cuBLAS has
_REDUCED = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"


def why_not_unsplit() -> str | None:
    """In words that say what stands in the way."""
    if torch.version.hip is not None:
        return "on AMD's GPUs nobody has tried it"
    # It gets its memory with the first product of a stream. Were that one of ours, it would be too little for others'.
    if os.environ.get(_LT_APART, "1").lower() in ("0", "n", "no", "f", "false", "off"):
        return f"{_LT_APART} is off, so cuBLASLt keeps memory of its own: unset it"
    return None


@dataclass(frozen=True)
class _Settings:
    """Of a process."""

    room: int | str | None  # for cuBLASLt: in bytes, or what the environment says
    library: Any
    reduced: dict[str, tuple[bool, bool]]  # whether sums may be rounded on their way, and whether they may be split
    linear: Any

    @staticmethod
    def now() -> _Settings:
        cuda = torch.backends.cuda
        return _Settings(
            cuda.cublaslt_workspace_size() if _room_is_a_call() else os.environ.get(_ROOM_IN_ENVIRONMENT),
            cuda.preferred_blas_library(),
            {name: (getattr(cuda.matmul, name), getattr(cuda.matmul, f"{name}_split_k")) for name in _REDUCED},
            torch.nn.functional.linear,
        )

    def without_splitting(self) -> _Settings:
        return _Settings(
            _ROOM if _room_is_a_call() else str(_ROOM >> 10),
            torch._C._BlasBackend.Cublaslt,
            dict.fromkeys(_REDUCED, (False, False)),
            narrow_linear(self.linear, _narrow_product),
        )

    def put(self) -> None:
        if isinstance(self.room, int):
            torch.backends.cuda.cublaslt_workspace_size(self.room)
        elif self.room is None:
            os.environ.pop(_ROOM_IN_ENVIRONMENT, None)
        else:
            os.environ[_ROOM_IN_ENVIRONMENT] = self.room
        _prefer(self.library)
        for name, pair in self.reduced.items():
            setattr(torch.backends.cuda.matmul, name, pair)
        torch.nn.functional.linear = self.linear


def _room_is_a_call() -> bool:
    return hasattr(torch._C, "_cuda_setCublasLtWorkspaceSize")


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
_in_force: dict[object, None] = {}  # the blocks that run
_owners: _Settings | None = None  # those before the first of them


class UnsplitProducts:
    """``restore`` may be called again and again: an interrupt may come in the midst of it."""

    def __init__(self) -> None:
        self._blocks: list[object] = []

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While the block runs, products are such, and graphs that are captured keep them."""
        block = object()
        self._blocks.append(block)
        try:
            _begin(block)
            yield
        finally:
            _end(block)
            self._blocks.remove(block)

    def restore(self) -> None:
        while self._blocks:
            _end(self._blocks[-1])
            self._blocks.pop()
        _end(self)  # it may have come while the last block ended


def _begin(block: object) -> None:
    global _owners
    with _lock:
        if _owners is None:
            _owners = _Settings.now()
        _in_force[block] = None
        _owners.without_splitting().put()


def _end(block: object) -> None:
    """Once or more often."""
    global _owners
    with _lock:
        _in_force.pop(block, None)
        if not _in_force and _owners is not None:
            _owners.put()
            _owners = None


def _narrow_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from ..kernels.narrow_products_triton import narrow_product  # Triton may not be there

    with torch.cuda.device(x.device):
        return narrow_product(x, weight, bias)
