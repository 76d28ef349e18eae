"""What an attention backend has to do: the base class of the plain PyTorch one and of the one over Triton kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ...patches.attention_interface import AttentionContext
from ...patches.fixed_forwards import ForwardsInPlace
from ...patches.fixed_products import WideProducts
from ..batch import AttentionBatch, ModelBatch
from .kv_storage import KVStorage

# Of ids, positions, attention and the rows whose logits are wanted.
Forward = Callable[[torch.Tensor, torch.Tensor, AttentionContext, torch.Tensor], torch.Tensor]


class AttentionBackend(ABC):
    storage: KVStorage
    short_chunk: int = 0  # tokens: a step's prompt chunks of no more than these stand before longer ones
    fewest_rows = 1  # of a decode step as a graph
    has_passes = False  # whether a step takes several passes through the model
    wide_products: WideProducts | None = None  # where some passes of ``in_passes`` may have many rows

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> AttentionContext:
        """Work out once for a step whatever all its layers need."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory that is kept from one step to the next."""

    def products(self) -> AbstractContextManager[object]:
        """What the products of steps need around them."""
        return nullcontext()

    def fixed_forwards(self, model: nn.Module) -> ForwardsInPlace | None:
        """What modules run in place of their own forwards."""
        return None

    def in_passes(self, forward: Forward, batch: ModelBatch) -> torch.Tensor | None:  # [samples + asked, vocabulary]
        """The logits of a step that takes several passes through the model; None: one pass does it."""
        return None

    @property
    def does_all(self) -> bool:
        """Whether this backend could run every layer so far without falling back to a slower way."""
        return True
