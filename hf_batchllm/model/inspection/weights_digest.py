"""A digest of tensors: a few numbers that change with any value of theirs, and with the place of any value.

A write through ``.data`` moves no version counter, and tensors made in inference mode have none. So nothing but the
values tells whether they are the ones of before. The digest reads each of them once, at nearly the speed of memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from ...kernel_check.trust import is_known_good
from ...patches.sharded_modules import local

_ROW = 1024  # words that are multiplied with a weight each, and added up


class Digest:
    """Computed when it is made; on a GPU nobody waits for it before it is compared."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        numbers: dict[torch.device, list[torch.Tensor]] = {}
        by_kernel = cache(has_kernel)
        self._kinds: list[object] = []
        with torch.no_grad():
            for tensor in tensors:
                for part in parts_of(tensor):
                    self._kinds.append((part.shape, part.stride(), part.dtype, part.device))
                    if not part.numel():
                        continue
                    numbers.setdefault(part.device, []).append(_number_in_this_process(part, by_kernel(part.device)))
            self._numbers = [torch.stack(each) for each in numbers.values()]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Digest) or self._kinds != other._kinds:
            return False
        return all(map(torch.equal, self._numbers, other._numbers))

    __hash__ = None  # type: ignore[assignment]


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of: itself, mostly."""
    tensor = local(tensor)
    if tensor.is_meta:
        return []
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        return [part for name in flatten()[0] for part in parts_of(getattr(tensor, name))]
    if tensor.layout == torch.strided:
        parts = [tensor.detach().as_subclass(torch.Tensor)]
    elif tensor.layout == torch.sparse_coo:
        parts = [tensor.detach()._indices(), tensor.detach()._values()]
    else:
        parts = [tensor.detach().to_dense()]
    quantized = getattr(tensor, "quant_state", None)  # of bitsandbytes: the scales
    return parts + [each for each in vars(quantized).values() if isinstance(each, torch.Tensor)] if quantized else parts


def has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and is_known_good("layers", device)


def number_of(tensor: torch.Tensor, by_kernel: bool) -> torch.Tensor:  # int64, a single one
    """The same in every process and on every device, with a kernel and without."""
    if by_kernel:
        from ...kernels.triton.digest_triton import digest
    else:
        from ...kernels.reference.digest_torch import digest
    return digest(_flat(tensor))


def _number_in_this_process(tensor: torch.Tensor, by_kernel: bool) -> torch.Tensor:  # int64, a single one
    """On a CPU a number that is found faster, and depends on how PyTorch adds up there."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.bfloat16):
        return number_of(tensor, by_kernel)
    flat = _flat(tensor)
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    rows = len(words) // _ROW
    summed = [words[rows * _ROW :], flat[8 * len(words) :].to(torch.int64)]
    if rows:
        summed.append(_rows(words[: rows * _ROW].view(rows, _ROW)))
    return _mixed(torch.cat(summed))


def _flat(tensor: torch.Tensor) -> torch.Tensor:  # uint8 [bytes]
    """The tensor's bytes: in place, or copied where they do not lie one after the other."""
    if not tensor.is_contiguous() and tensor.dim() >= 2 and tensor.mT.is_contiguous():
        tensor = tensor.mT
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat if flat.storage_offset() % 8 == 0 else flat.clone()


def _rows(words: torch.Tensor) -> torch.Tensor:  # int64 [rows]
    """A number for each row, which depends on the place of each word.

    In whole numbers the highest bits of two words cancel out: the signs of every second number in float32. A sum of
    float32 numbers shows these, and only these are left to it.
    """
    signs = words.view(torch.float32).sum(dim=1).view(torch.int32)
    return words @ _weights(_ROW, words.device) + signs


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """One number of many, by the places that they have."""
    size = 1 << max(10, (len(numbers) - 1).bit_length())
    return ((numbers ^ (numbers >> 32)) * _weights(size, numbers.device)[: len(numbers)]).sum()


@cache
def _weights(count: int, device: torch.device) -> torch.Tensor:  # int64 [count]
    """Random odd numbers, the same in every call."""
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(count)
        made = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator, dtype=torch.int64, device="cpu")
        return (made | 1).to(device)
