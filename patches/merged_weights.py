"""Weights that multiply the same input, laid end to end: one matrix product where there were two or three.

The Parameters stay the user's: the same objects, values, types and strides; only their place in memory changes. Each
gets a storage of its own over its part of the memory (by way of DLPack), not a slice of a common storage: code that
compares storages would take slices for tied weights. Saving a model would then clone them all on the device first.

Only the Parameters keep the memory alive. A model that is moved, cast or dropped frees its old weights as usual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from .sharded_modules import is_rows_of_it, local

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# From each part's address to the memory that contains it.
_parts: dict[int, StorageWeakRef] = {}


def why_not_used(parameter: torch.Tensor) -> str | None:
    """Why a kernel cannot read the weight outside its module, in words that follow "it"; None if it can."""
    if not _is_plain(parameter):
        return "is sharded or quantised"
    return None if parameter.dtype in _DTYPES else f"is {str(parameter.dtype).removeprefix('torch.')}"


def why_not_merge(parameters: Sequence[torch.Tensor]) -> str | None:
    """Why these weights cannot be merged, in words that follow "they"; None if they can."""
    if not all(map(_is_plain, parameters)):
        return "are sharded or quantised"
    cut_out = [local(each) is not each for each in parameters]  # when they were loaded, of the whole weight
    parameters = [local(each) for each in parameters]
    first = parameters[0]
    for each, may_be_a_view in zip(parameters, cut_out, strict=True):
        if each.dtype not in _DTYPES:
            return f"are {str(each.dtype).removeprefix('torch.')}"
        if (each.dtype, each.device) != (first.dtype, first.device):
            return "are of different types or on different devices"
        if each.shape[1:] != first.shape[1:]:
            return "do not take the same input"
        if each.is_inference():
            return "were made in inference mode"
        whole = may_be_a_view or each.untyped_storage().nbytes() == each.nbytes
        if not each.is_contiguous() or not whole:
            return "are views of a larger tensor"
    if len({id(each) for each in parameters}) < len(parameters):
        return "are tied to each other"
    if merged(parameters) is None and any(_is_held_elsewhere(each) for each in parameters):
        return "share their memory with something else (a state_dict() or the graph of a forward that is kept, say)"
    return None


def _is_plain(parameter: torch.Tensor) -> bool:
    """A Parameter as PyTorch makes it, or one of which this process has some rows."""
    if local(parameter) is not parameter:
        return is_rows_of_it(parameter)
    if hasattr(parameter, "ds_id"):  # whole for as long as its user has gathered it, in memory of DeepSpeed's
        return False
    return type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor


def merged(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:  # [sum of rows, ...]
    """All of them as one tensor, if they lie end to end."""
    parameters = [local(each) for each in parameters]
    whole = _whole(parameters[0])
    at = parameters[0].data_ptr()
    for each in parameters:
        if whole is None or each.data_ptr() != at or _whole(each) != whole:
            return None
        at += each.nbytes
    assert whole is not None
    storage = torch.UntypedStorage._new_with_weak_ptr(whole.cdata)
    first = parameters[0]
    if storage is None or storage.nbytes() != sum(each.nbytes for each in parameters):
        return None
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=first.dtype, device=first.device)
        shape = (sum(map(len, parameters)), *first.shape[1:])
        return empty.set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]  # strides are optional


def merge(parameters: Sequence[torch.Tensor]) -> torch.Tensor:  # [sum of rows, ...]
    """Lay them end to end. Interrupted half-way, each keeps its values, in its new place or in its old one."""
    parameters = [local(each) for each in parameters]
    for address in [address for address, whole in _parts.items() if whole.expired()]:
        del _parts[address]
    with torch.no_grad(), torch.inference_mode(False):
        flat = torch.cat([each.detach().view(-1) for each in parameters])
        whole = StorageWeakRef(flat.untyped_storage())
        for each, numbers in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
            _parts[numbers.data_ptr()] = whole
            # Passed on flat: DLPack changes the strides of dimensions of size one.
            each.data = from_dlpack(numbers).view(each.shape)
        return flat.view(-1, *parameters[0].shape[1:])


def unmerge(parameter: torch.Tensor) -> bool:
    """Give it memory of its own again, if it lies in merged memory. Returns whether it did.

    It stays where it is if something else holds the memory, too (a state_dict() that is kept): the user made that tie.
    """
    if not _is_plain(parameter) or _whole(local(parameter)) is None or _is_held_elsewhere(local(parameter)):
        return False
    parameter = local(parameter)
    with torch.no_grad(), torch.inference_mode(False):
        parameter.data = parameter.detach().clone()
    return True


def _whole(parameter: torch.Tensor) -> StorageWeakRef | None:
    """The merged memory that contains it, if that is still alive."""
    whole = _parts.get(parameter.data_ptr())
    return None if whole is None or whole.expired() else whole


def _is_held_elsewhere(parameter: torch.Tensor) -> bool:
    return _references(parameter) > _references(torch.empty(0, dtype=torch.float32, device="cpu"))


def _references(tensor: torch.Tensor) -> int:
    """How many tensors share its memory, including the reference that the question itself holds."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
