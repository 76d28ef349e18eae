"""For a while, products of which a library would add up the rows in one way or another run on a kernel of our own.

These are products on a GPU with few columns, such as a router's, and those whose sizes are odd. What takes part in
training is left as it is: other threads may be at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

# From so many columns on, all rows of cuBLAS's products had the same bits in all that were measured.
_WIDE = 256
_ALIGNED = 16  # bytes
_PLAIN = torch.Tensor, torch.nn.Parameter
_TYPES = torch.bfloat16, torch.float16, torch.float32


def is_narrow(weight: torch.Tensor) -> bool:  # [columns, depth]
    columns, depth = weight.shape
    odd = any(size * weight.element_size() % _ALIGNED for size in (columns, depth))
    return odd or columns < _WIDE or weight.dtype == torch.float32


@contextmanager
def narrow_products(product: Product, device_type: str = "cuda") -> Iterator[None]:
    """While the block runs, ``torch.nn.functional.linear`` takes ``product`` for such ones."""
    own = functional.linear

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ours = type(weight) in _PLAIN and weight.ndim == 2 and weight.dtype in _TYPES and input.dtype == weight.dtype
        ours = ours and weight.device.type == device_type and input.device == weight.device
        trains = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        if not ours or not is_narrow(weight) or trains or torch.is_autocast_enabled(device_type):
            return own(input, weight, bias)
        made = product(input.reshape(-1, input.shape[-1]), weight, bias)
        return made.view(*input.shape[:-1], len(weight))

    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = own
