"""All that is swapped in a model while steps run: the model is the library's, or its user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from ..inputs.base_model import base_model
from ..interrupts import held_back, users_handler
from ..patches.adapter_swap import AdapterSwap
from ..patches.attention_interface import ATTENTION_NAME
from ..patches.attention_swap import AttentionSwap
from ..patches.cpu_lm_head import HeadSwap
from ..patches.fixed_forwards import ForwardsInPlace
from ..patches.fusion import FusedLayers
from ..patches.state_functions import StateFunctions
from ..patches.uncompiled import Uncompiled, every_module


class ModelControl:
    """Each step applies it, which costs nothing where it is applied. It is put back before code of the user's runs.

    ``apply`` and ``restore`` may be called again and again. In between, no other thread runs steps of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        fused: FusedLayers | None = None,
        fixed: ForwardsInPlace | None = None,
        adapters: AdapterSwap | None = None,  # where prompts name their adapters
    ) -> None:
        self.adapters = adapters
        self.is_applied = False
        self.around_users: Callable[[], AbstractContextManager[None]] = nullcontext  # while code of theirs runs
        self._attention = AttentionSwap(model)
        self._compiled = Uncompiled(every_module(model))
        swaps = adapters, self._compiled, fused, HeadSwap(base_model(model).get_output_embeddings()), fixed
        self._swaps = [*(each for each in swaps if each is not None), StateFunctions(model)]

    def apply(self) -> None:
        """From here on the model runs as steps do."""
        if self.is_applied:
            return
        try:
            self._attention.apply(ATTENTION_NAME)
            with held_back():
                for swap in self._swaps:
                    swap.apply()
                self.is_applied = True
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """From here on the model is as its user left it."""
        with held_back():
            self.is_applied = False
            for swap in reversed(self._swaps):
                swap.restore()
            self._attention.restore()

    @contextmanager
    def users_turn(self) -> Iterator[None]:
        """While the block runs, code of the user's may run the model, which has the adapter of the call's steps."""
        with self._adapter_alone(), users_handler(), self.around_users():
            yield

    @contextmanager
    def without_attention(self) -> Iterator[None]:
        """While the block runs, parts of the model run with the adapter and uncompiled, in their own attention."""
        with self._adapter_alone(), self._compiled.applied():
            yield

    @contextmanager
    def _adapter_alone(self) -> Iterator[None]:
        self.restore()
        with nullcontext() if self.adapters is None else self.adapters.applied_alone():
            yield
