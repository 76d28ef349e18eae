"""What an attention backend has to do: the base class of the plain PyTorch one and of the one over Triton kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..patches.attention_interface import AttentionContext
from .batch import AttentionBatch
from .kv_storage import KVStorage


class AttentionBackend(ABC):
    storage: KVStorage
    short_chunk: int = 0  # tokens: a step's prompt chunks of no more than these stand before longer ones

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> AttentionContext:
        """Work out once for a step whatever all its layers need."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory that is kept from one step to the next."""

    @property
    def does_all(self) -> bool:
        """Whether this backend could run every layer so far without falling back to a slower way."""
        return True
