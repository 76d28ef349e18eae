"""Products on a GPU whose rows have the same bits, however many there are: cuBLAS without room to split a sum.

By default cuBLAS cuts the sums of a product with few rows into parts (split-K) and adds the parts up. That takes
memory. Without that memory each number of a wide product is added up in one way. Narrow products run on a kernel of our
own. Whether all is so is tried with each model (engine/invariance_trial.py).

PyTorch asks the environment how much memory there is, anew for each product. The memory itself it gets once for each
stream, as much as the environment says then, and keeps it. Were that while these settings are in force, a product of
somebody else would later write beyond its end. So each stream gets its memory before, as its owner has set it.

All this belongs to the process. Several threads may run such steps: the first to begin notes what the owner has set,
and the last to end puts it back. Products of other threads run under these settings meanwhile. A stream which such a
thread uses for the first time just then is not known here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..patches.narrow_products import narrow_linear

_NO_ROOM = {"CUBLASLT_WORKSPACE_SIZE": "0", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}  # KiB; KiB and how many
# PyTorch's deterministic mode allows no less. cuBLAS can split within it; cuBLASLt cannot, but takes the host 119 us
# instead of 51 for each product.
_LITTLE_ROOM = {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
_LT_APART = "TORCH_CUBLASLT_UNIFIED_WORKSPACE"  # by default cuBLASLt uses what cuBLAS has
_REDUCED = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"


def why_not_unsplit() -> str | None:
    """In words that say what stands in the way."""
    if torch.version.hip is not None:
        return "on AMD's GPUs nobody has tried it"
    if os.environ.get(_LT_APART, "1").lower() in ("0", "n", "no", "f", "false", "off"):
        return f"{_LT_APART} is off, so cuBLASLt keeps memory of its own: unset it"
    return None


@dataclass(frozen=True)
class _Settings:
    """What a process has set."""

    environment: dict[str, str | None]
    library: Any
    reduced: dict[str, tuple[bool, bool]]  # whether sums may be rounded on their way, and whether they may be split
    linear: Any

    @staticmethod
    def now() -> _Settings:
        matmul = torch.backends.cuda.matmul
        return _Settings(
            {name: os.environ.get(name) for name in _NO_ROOM},
            torch.backends.cuda.preferred_blas_library(),
            {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in _REDUCED},
            torch.nn.functional.linear,
        )

    def put_environment(self) -> None:
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def put(self) -> None:
        self.put_environment()
        if torch.backends.cuda.preferred_blas_library() != self.library:  # PyTorch warns of it
            torch.backends.cuda.preferred_blas_library(self.library)
        for name, pair in self.reduced.items():
            setattr(torch.backends.cuda.matmul, name, pair)
        torch.nn.functional.linear = self.linear


_lock = threading.RLock()
_in_force: dict[object, None] = {}  # the blocks that run
_owners: _Settings | None = None  # those before the first of them
_has_multiplied = False


class UnsplitProducts:
    """``restore`` may be called again and again: an interrupt may come in the midst of it."""

    def __init__(self) -> None:
        self._blocks: list[object] = []

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While the block runs, products on the current stream are such, and graphs that are captured keep them."""
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
            _first_product()
            _owners = _Settings.now()
        _make_room_on_stream()
        _in_force[block] = None
        _take_room()
        for name in _REDUCED:
            setattr(torch.backends.cuda.matmul, name, False)
        assert _owners is not None
        torch.nn.functional.linear = narrow_linear(_owners.linear, _narrow_product)


def _first_product() -> None:
    """With the first product of a process PyTorch reads once and for all whether its deterministic mode may be used."""
    global _has_multiplied
    if not _has_multiplied and torch.cuda.is_available():
        one = torch.ones(16, 16, dtype=torch.float32, device="cuda")
        one @ one
        _has_multiplied = True


def _take_room() -> None:
    if torch.are_deterministic_algorithms_enabled():
        os.environ.update(_LITTLE_ROOM)
        torch.backends.cuda.preferred_blas_library("cublaslt")
    else:
        os.environ.update(_NO_ROOM)


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


def make_room_for_capture() -> None:
    """To be called on the stream of a capture before it begins: within a block the capture would make too little."""
    if _in_force:
        _make_room_on_stream()


def _make_room_on_stream() -> None:
    """Have the current stream's memory made, as large as the owner has set it. Not while the stream is captured."""
    with _lock:
        if not _in_force or _owners is None:
            torch.cuda.current_blas_handle()  # makes it where there is none
            return
        _owners.put_environment()
        try:
            torch.cuda.current_blas_handle()
        finally:
            _take_room()
