"""The attention that transformers calls: registered once by name, told what to do by the step that runs.

Layers reach it through transformers' ``AttentionInterface``. What the step is about comes through a context variable
rather than through the model's keyword arguments, because some architectures drop those on the way.
"""

from __future__ import annotations

from typing import Protocol

from transformers import AttentionInterface

from ..patches.attention_interface import ATTENTION_NAME, AttentionContext, attention_forward
from .batch import AttentionBatch


class AttentionBackend(Protocol):
    """How attention is computed: plain torch on whatever device, or kernels."""

    short_chunk: int  # prompt chunks of no more tokens are to stand before longer ones

    def prepare(self, batch: AttentionBatch) -> AttentionContext:
        """Whatever can be worked out for a step once, before its layers run."""

    def release(self) -> None:
        """Let go of the memory that is kept from one step to the next."""


AttentionInterface.register(ATTENTION_NAME, attention_forward)
