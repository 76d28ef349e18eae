"""Products on a GPU whose rows have the same bits, however many there are: cuBLASLt without room to split a sum.

By default cuBLAS cuts the sums of a product with few rows into parts (split-K) and adds the parts up. That takes
memory. Without that memory each number is added up in one way. How much there is, is read once in a process, by the
first product: where one has run before, a trial tells (engine/invariance_trial.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_NO_ROOM = {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}  # KiB; KiB and how many


@contextmanager
def unsplit_products() -> Iterator[None]:
    """While the block runs, products are such, and graphs that are captured keep them."""
    matmul = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    reduced = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    there = {name: os.environ.get(name) for name in _NO_ROOM}
    try:
        os.environ.update(_NO_ROOM)
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = reduced
        for name, value in there.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
