"""Products on a GPU whose rows have the same bits, however many there are: cuBLASLt without room to split a sum.

By default cuBLAS cuts the sums of a product with few rows into parts (split-K) and adds the parts up. That takes
memory. Without that memory each number of a wide product is added up in one way. Narrow products run on a kernel of our
own. Whether all is so is tried with each model (engine/invariance_trial.py).

PyTorch asks the environment how much memory there is, anew for each product. The memory itself it gets once for each
stream, as much as the environment says then, and keeps it. Were that while these settings are in force, a product of
somebody else would later write beyond its end. So each stream gets its memory before, as its owner has set it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ..patches.narrow_products import narrow_products

_NO_ROOM = {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}  # KiB; KiB and how many
_LT_APART = "TORCH_CUBLASLT_UNIFIED_WORKSPACE"  # by default cuBLASLt uses what cuBLAS has
_owners: list[dict[str, str | None]] = []  # the environment before each block that runs


def why_not_unsplit() -> str | None:
    """In words that say what stands in the way."""
    if os.environ.get(_LT_APART, "1").lower() in ("0", "n", "no", "f", "false", "off"):
        return f"{_LT_APART} is off, so cuBLASLt keeps memory of its own: unset it"
    return None


@contextmanager
def unsplit_products() -> Iterator[None]:
    """While the block runs, products on the current stream are such, and graphs that are captured keep them."""
    matmul = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    reduced = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    make_room_on_stream()
    owners = {name: os.environ.get(name) for name in _NO_ROOM}
    _owners.append(owners)
    try:
        os.environ.update(_NO_ROOM)
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
        with narrow_products(_narrow_product):
            yield
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = reduced
        _put(owners)
        _owners.remove(owners)


def _narrow_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from ..kernels.narrow_products_triton import narrow_product  # Triton may not be there

    return narrow_product(x, weight, bias)


def make_room_on_stream() -> None:
    """Have the current stream's memory made, as large as the owner has set it. Not while the stream is captured."""
    with _as_its_owner_has_it() if _owners else nullcontext():
        torch.cuda.current_blas_handle()  # makes it where there is none


@contextmanager
def _as_its_owner_has_it() -> Iterator[None]:
    _put(_owners[0])
    try:
        yield
    finally:
        os.environ.update(_NO_ROOM)


def _put(owners: dict[str, str | None]) -> None:
    for name, value in owners.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
