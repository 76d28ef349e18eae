"""Which of a cache's tensors are still in memory, whoever holds them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_batchllm.model.attention.kv_storage import KVStorage
from hf_batchllm.model.attention.torch_attention import Scratch
from hf_batchllm.model.attention.triton_attention import TritonBackend


class Storages:
    """Of every K and V of the cache, and of what attention keeps beside it from one step to the next."""

    def __init__(self) -> None:
        self.seen: list[StorageWeakRef] = []

    def watch(self, set_attribute: Callable[[type, str, Any], None] = setattr) -> None:
        for owner, name in ((KVStorage, "of"), (Scratch, "gather"), (TritonBackend, "parts")):
            set_attribute(owner, name, self._noting(getattr(owner, name)))

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            made = method(*args)
            self.note(*(made if isinstance(made, tuple) else [made]))
            return made

        return noting

    def note(self, *tensors: torch.Tensor) -> None:
        self.seen.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)

    def note_kept(self, storage: KVStorage) -> None:
        """Prefixes that are kept have been copied out of the cache."""
        for pair in storage._layers.values():
            self.note(*pair)

    def alive(self) -> int:
        gc.collect()
        return sum(not storage.expired() for storage in self.seen)
