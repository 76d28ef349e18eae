"""The user's model for the length of a call: its layers fused, its runner over the call's KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager

from torch import nn

from ..config import BatchConfig
from ..inputs.adapters import adapter_configs
from ..notices import Notices
from ..patches.adapter_swap import AdapterSwap, active_in, adapted_layers
from ..patches.all_reduced_rows import AllReduce
from ..patches.fixed_products import WideProducts
from ..patches.fusion import FusedLayers, Fusion
from ..planning.step import Chunk
from .attention.choose_backend import (
    check_backend,
    fused_kernels,
    make_backend,
    refused_groups,
    state_kernels,
    warn_of_refused,
    without_refused,
)
from .attention.kv_storage import KVStorage
from .batch_builder import BatchBuilder
from .image_features import ImageFeatures
from .inspection.architecture import Architecture
from .inspection.invariance import refuse_what_varies
from .inspection.user_warnings import warn_of_user_state
from .runner import ModelRunner


class ModelInUse:
    """Makes runners over storages, and lets go of the model when the call is over. ``runner``: the latest one."""

    def __init__(
        self, model: nn.Module, architecture: Architecture, config: BatchConfig, fusion: Fusion, notices: Notices
    ) -> None:
        self.model = model
        self.architecture = architecture
        self.device = architecture.device
        self.config = config
        self._fusion = fusion
        self.notices = notices
        self._fused: FusedLayers | None = None
        self._replaced: str | None = None  # code of transformers or torch, for whose sake nothing is fused
        self.runner: ModelRunner | None = None
        self.wide_products: WideProducts | None = None  # of later runners, as an AttentionBackend has it
        self.all_reduce: Callable[[], AllReduce | None] = lambda: None  # where the model is in several parts

    def check(self) -> list[str]:
        """Refuse a backend that cannot be used, and say what works differently in this model.

        Gives the groups of kernels that cannot be used.
        """
        refuse_what_varies(self.model, self.architecture, self.config)
        check_backend(self.config, self.device, self.notices)
        groups = self._groups
        warn_of_refused(groups, self.config, self.device, self.notices)
        warn_of_user_state(self.model, self.notices)
        return [*refused_groups(groups, self.config, self.device)]

    @property
    def _groups(self) -> list[str]:
        """The groups of kernels, beside those for attention."""
        return [
            *(["layers"] if self.config.fuse else []),
            *(["states"] if self.architecture.states else []),
            "sampling",
        ]

    def fuse(self) -> None:
        """Merge the weights of fused layers: before the KV cache takes the memory that is free."""
        kernels = fused_kernels(self.config, self.device)
        if kernels is not None:  # they stand for all code that a layer would call
            self._replaced = next(iter(self.architecture.own_code.found.replacing), None)
        if kernels is not None and self._replaced is None:
            kernels = without_refused(kernels, self._fusion, self.config, self.device)
            kernels = dataclasses.replace(kernels, all_reduce=self.all_reduce())
            self._fused = self._fusion.merge(kernels)

    def run_over(self, storage: KVStorage, adapters: AdapterSwap | None = None) -> ModelRunner:
        """A runner whose attention reads and writes ``storage``."""
        backend = make_backend(self.config, self.device, storage, self.notices)
        backend.wide_products = self.wide_products
        kernels = state_kernels(self.config, self.device) if self.architecture.states else None
        self.runner = ModelRunner(self.model, self.architecture, backend, self._fused, kernels, adapters)
        return self.runner

    def show(self, images: ImageFeatures | None) -> None:
        """Steps of the latest runner, and batches for it, may have these images."""
        assert self.runner is not None
        self.runner.images = images

    def builder(self, most_times: int = 0, wanted: Callable[[Chunk], Sequence[Chunk]] | None = None) -> BatchBuilder:
        """Makes batches for the latest runner. ``most_times`` and ``wanted`` as BatchBuilder has them."""
        assert self.runner is not None
        images = self.runner.images
        return BatchBuilder(
            self.config.page_size,
            pin_memory=self.device.type == "cuda",
            short_chunk=self.runner.backend.short_chunk,
            most_times=most_times,
            wanted=wanted,
            carries_states=bool(self.architecture.states),
            placeholder=None if images is None else images.placeholder,
            two_way=None if images is None else images.two_way,
        )

    def drop_runner(self) -> None:
        """The runner goes, with the storage that it holds."""
        if self.runner is not None:
            self.runner.restore()
            self.runner = None

    def active_adapters(self) -> Hashable:
        """The adapters that are active on the model, as its user has them."""
        return active_in(adapted_layers(self.model))

    def adapter_swap(self) -> AdapterSwap:
        """What has the model's steps run with another adapter."""
        return AdapterSwap(self.model, adapter_configs(self.model))

    def put_back(self) -> None:
        """The model is as its user left it, until the next step."""
        if self.runner is not None:
            self.runner.control.restore()

    def users_turn(self) -> AbstractContextManager[None]:
        """While code of the user's runs, after the first step."""
        assert self.runner is not None
        return self.runner.control.users_turn()

    def restore(self) -> None:
        """After the last step, and after one that broke off."""
        if self.runner is not None:
            self.runner.restore()

    def release(self) -> None:
        """A traceback may keep this object, and with it merged weights that ``close()`` takes apart."""
        if self._fused is not None:
            self._fused.release()

    @property
    def kernels_by_name(self) -> bool:
        """Whether kernels were asked for by name, without which none run on AMD's cards."""
        return self.config.backend == "triton"

    @property
    def fused_summary(self) -> str:
        """For the report; empty where nothing was to be fused."""
        if self._replaced is not None:
            return f"nothing: {self._replaced} has been replaced"
        return self._fusion.summary if self._fused is not None else ""
