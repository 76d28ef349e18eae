"""Products of which a library would add up a row in one way or another, for a while computed in another way.

Those on a GPU with few columns, such as a router's, and those whose sizes are odd run on a kernel of our own. Others
run on the library's, never with a single row: cuBLASLt has kernels for one row alone, which cut its sums into parts.
What takes part in training is left as it is: other threads may be at it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from .padded_products import FEWEST, MOST, PaddedRows, nothing_is_captured, seconds_on_a_gpu

Product = Callable[..., torch.Tensor]  # (input [rows, depth], weight [columns, depth], bias [columns] or None)

# From so many columns on, all rows of cuBLAS's products had the same bits in all that were measured.
_WIDE = 256
_ALIGNED = 16  # bytes
_MOST_ALIGNED = 256  # bytes: a library's choice depends on where in them a weight begins
_PLAIN = torch.Tensor, torch.nn.Parameter
_HALVES = torch.bfloat16, torch.float16
_TYPES = *_HALVES, torch.float32


def is_narrow(weight: torch.Tensor) -> bool:  # [columns, depth]
    (columns, depth), size = weight.shape, weight.element_size()
    odd = columns * size % _ALIGNED or depth * size % _ALIGNED
    return bool(odd) or columns < _WIDE or weight.dtype == torch.float32


_PADDED = PaddedRows(seconds_on_a_gpu, nothing_is_captured)


@cache
def row_by_row_linear(
    own: Product,
    product: Product,
    runs_a_step: Callable[[], bool],
    device_type: str = "cuda",
    padded: PaddedRows = _PADDED,
) -> Product:
    """What stands for ``torch.nn.functional.linear``, which is ``own``. The same function each time.

    A model whose functions have changed could not be replayed.

    runs_a_step: whether this thread does. Products of others are not measured: these settings may end meanwhile.
    """

    def by_library(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        are_rows = input.ndim > 0 and weight.ndim == 2 and input.shape[-1] == weight.shape[1] and input.numel() > 0
        is_usual = input.device.type == device_type and (bias is None or bias.ndim == 1)
        if not are_rows or not is_usual or torch.is_grad_enabled():
            return own(input, weight, bias)
        depth = input.shape[-1]
        rows = input.numel() // depth
        if rows > MOST:
            return own(input, weight, bias)
        if torch.compiler.is_compiling() or not _is_plain(input, weight, bias, device_type) or not runs_a_step():
            computed = max(rows, FEWEST)
        else:
            kind = (
                weight.shape, weight.stride(), weight.dtype, weight.device, weight.data_ptr() % _MOST_ALIGNED,
                input.dtype, bias is None, _autocast_dtype(device_type),
            )  # fmt: skip
            computed = padded.of(rows, lambda some: own(some, weight, bias), kind, input)
        if computed == rows:
            return own(input, weight, bias)
        if rows == 1 and computed == FEWEST:
            both = own(input.reshape(1, depth).repeat(FEWEST, 1), weight, bias)
            return both[:1].view(*input.shape[:-1], len(weight))
        more = input.new_empty(computed, depth)  # no row depends on what the others are
        more[:rows] = input.reshape(rows, depth)
        return own(more, weight, bias)[:rows].view(*input.shape[:-1], len(weight))

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.ndim == 2 and weight.dtype in _HALVES and not is_narrow(weight):  # most of them, and at once
            return by_library(input, weight, bias)
        given = (input, weight) if bias is None else (input, weight, bias)
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in given)
        if trains or torch.is_autocast_enabled(device_type) or not _is_ours(input, weight, bias, device_type):
            return by_library(input, weight, bias)
        made = product(input.reshape(-1, input.shape[-1]), weight, bias)
        return made.view(*input.shape[:-1], len(weight))

    return linear


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _is_plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, device_type: str) -> bool:
    """Whether a product is one of those that models usually have. What is wrong with others, the library says."""
    given = (x, weight) if bias is None else (x, weight, bias)
    return (
        all(type(each) in _PLAIN and each.layout == torch.strided and each.device == x.device for each in given)
        and all(each.dtype in _TYPES for each in given)
        and (torch.is_autocast_enabled(device_type) or all(each.dtype == x.dtype for each in given))
        and (bias is None or bias.shape == weight.shape[:1])
    )


def _is_ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, device_type: str) -> bool:
    """Whether a kernel of our own may read these tensors as they lie."""
    return (
        _is_plain(x, weight, bias, device_type)
        and x.device.type == device_type
        and weight.ndim == 2
        and x.ndim > 0
        and x.shape[-1] == weight.shape[1] > 0
        and is_narrow(weight)
    )
