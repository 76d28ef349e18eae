"""Weights that are spread over processes: each holds a part, and no process alone can run the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import UnsupportedModelError

_WHOLE = "load the model whole on one device, in a process of its own"
# By the name of the class of a parameter, how it came about. By name: importing these modules takes a second.
_SHARDED = {
    "DTensor": "by transformers' tensor parallelism, or by FSDP",
    "FlatParameter": "by FSDP",
}


def refuse_sharded(model: torch.nn.Module, parameters: Sequence[torch.Tensor], name: str) -> None:
    how = "by transformers' tensor parallelism" if (getattr(model, "_tp_size", None) or 1) > 1 else None
    for kind in set(map(type, parameters)):
        how = how or _SHARDED.get(kind.__name__)
    if how is None and hasattr(next(model.parameters(), None), "ds_id"):
        how = "by DeepSpeed's ZeRO-3"
    if how is not None:
        raise UnsupportedModelError(
            f"{name} has its weights spread over several processes, {how}; that is not supported: {_WHOLE}"
        )
