"""Functions such as exp are called once by one thread, before several threads call one at the same time.

Where several threads share a process's first call of one, a thread may compute its part in low accuracy: on two cores
exp was wrong by 1e-4 in a quarter of all processes, and only once in each. That is MKL's choice of a kernel, which is
not safe among threads (https://github.com/pytorch/pytorch/issues/188792).
"""

from __future__ import annotations

from functools import cache

import torch

_FUNCTIONS = (
    *("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "erf", "erfc", "erfinv", "lgamma"),
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "trunc"),
)


@cache
def call_functions_once() -> None:
    """Those that models and samplers may use: a few milliseconds."""
    if not torch.backends.mkl.is_available():
        return
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")  # a single one is no work for a second thread
        for name in _FUNCTIONS:
            getattr(torch, name)(number)
